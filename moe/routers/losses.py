"""Auxiliary losses that balance token choice. One value per group; the caller averages.

Means run over the valid tokens. Squared coefficients of variation are var / mean^2 with the population
variance, because the gradient of std at zero variance is NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.routing import at_least_fp32


def importance_loss(gates_GSE: Tensor, valid_GS: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' summed gates without noise, (G, S, E) -> (G,).

    0 at perfect balance, E - 1 when all tokens give everything to one expert. Source: V-MoE appendix A;
    Routers, appendix A.
    """
    return _squared_cv((gates_GSE * valid_GS.unsqueeze(-1)).sum(1))


def load_loss(logits_GSE: Tensor, noisy_GSE: Tensor, valid_GS: Tensor, *, k: int, std: float) -> Tensor:
    """Squared coefficient of variation of the experts' chances to be chosen if noise of `std` were redrawn.

    A token's threshold is its k-th largest noisy logit, its own winners included. Source: Routers, appendix
    A, eq. 12-15, with the standard deviation 1/E of V-MoE and of the authors' code, not the variance.
    """
    threshold_GS1 = noisy_GSE.topk(k, dim=-1).values[..., -1:]
    chance_GSE = 0.5 * torch.erfc((threshold_GS1 - logits_GSE) / (std * 2**0.5))
    return _squared_cv((chance_GSE * valid_GS.unsqueeze(-1)).sum(1))


def balance_loss(gates_GSE: Tensor, valid_GS: Tensor) -> Tensor:
    """E * sum_e (share of tokens whose first choice is e) * (mean gate of e); 1 at perfect balance.

    Source: GShard; Switch, eq. 4. The gradient runs through the mean gates alone.
    """
    E = gates_GSE.shape[-1]
    valid_GS = at_least_fp32(valid_GS)  # a bf16 mask would round the counts
    share_GS1 = (valid_GS / valid_GS.sum(1, keepdim=True).clamp(min=1)).unsqueeze(-1)
    first_GSE = F.one_hot(gates_GSE.detach().argmax(-1), E)
    return E * ((first_GSE * share_GS1).sum(1) * (gates_GSE * share_GS1).sum(1)).sum(-1)


def z_loss(logits_GSE: Tensor, valid_GS: Tensor) -> Tensor:
    """Mean squared log-sum-exp of the logits, which keeps them small. Source: ST-MoE, eq. 5."""
    valid_GS = at_least_fp32(valid_GS)  # a bf16 mask would round the counts
    z_GS = logits_GSE.logsumexp(-1).square() * valid_GS
    return z_GS.sum(1) / valid_GS.sum(1).clamp(min=1)


def _squared_cv(value_GE: Tensor) -> Tensor:
    return value_GE.var(-1, correction=0) / value_GE.mean(-1).square().clamp(min=1e-9)
