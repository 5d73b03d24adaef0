"""Auxiliary losses that balance token choice. One value per group; the caller averages."""

from torch import Tensor


def importance_loss(gates_GSE: Tensor, valid_GS: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' summed gates, (G, S, E) -> (G,).

    0 at perfect balance, E - 1 when all tokens give everything to one expert. Population variance; written as
    var / mean^2 because the gradient of std at zero variance is NaN. Source: V-MoE appendix A; Routers,
    appendix A.
    """
    importance_GE = (gates_GSE * valid_GS.unsqueeze(-1)).sum(1)
    return importance_GE.var(-1, correction=0) / importance_GE.mean(-1).square().clamp(min=1e-9)
