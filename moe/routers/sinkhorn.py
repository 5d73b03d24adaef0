"""The entropic transport plan between tokens and experts, and its exact gradient.

Source: Routers in Vision MoE, eq. 8: argmax <P, logits> - <P, log P> over plans whose rows (tokens) sum to 1
and whose columns (experts) to T/E. Column update first, row update last, as in the authors' code; they stop
after 20 iterations outside the log domain, which overflows, and take no gradient.
"""

import math

import torch
from torch import Tensor


def sinkhorn_plan(logits_GSE: Tensor, valid_GS: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """The plan after at most `iterations` updates of columns and rows, and how far its columns are off.

    In the dtype of the logits, float32 or float64; nothing waits for the host. Rows of valid tokens sum to 1
    exactly, rows of padding are zero. A converged group is frozen, so its plan depends neither on the groups
    beside it nor on further iterations. The gradient is that of the converged plan: right when the residual
    is small, whatever the number of iterations, and once differentiable.

    Args:
        valid_GS: 1 for real tokens, 0 for padding; T counts the former.

    Returns:
        plan_GSE and residual_G, the largest deviation of a column sum from T/E, relative to T/E.
    """
    plan_GSE, residual_G = _sinkhorn(logits_GSE, valid_GS.bool(), iterations)
    return plan_GSE, residual_G.detach()


# one opaque operator: the graph of torch.compile does not grow with the iterations
@torch.library.custom_op("moe_frontier::sinkhorn", mutates_args=())
def _sinkhorn(logits_GSE: Tensor, valid_GS: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    # a group of padding alone is solved as if it were all real and emptied at the end: no log of 0
    counted_GS1 = (valid_GS | ~valid_GS.any(1, keepdim=True)).unsqueeze(-1)
    logits = logits_GSE.masked_fill(~valid_GS.unsqueeze(-1), 0.0)
    target_G11 = counted_GS1.sum(1, keepdim=True).to(logits) / logits.shape[-1]
    tolerance = torch.finfo(logits.dtype).eps ** 0.75  # above the rounding of a sum over thousands of tokens
    row_GS1 = torch.zeros_like(logits[..., :1])
    column_G1E = torch.zeros_like(logits[:, :1])
    active_G11 = torch.ones_like(target_G11, dtype=torch.bool)
    for _ in range(iterations):
        tokens_GSE = (logits + row_GS1).masked_fill(~counted_GS1, -math.inf)
        update_G1E = target_G11.log() - tokens_GSE.logsumexp(1, keepdim=True)
        # exp(column - update) is the current column sum over its target
        off_G11 = (column_G1E - update_G1E).expm1().abs().amax(-1, keepdim=True)
        active_G11 = active_G11 & (off_G11 > tolerance)
        column_G1E = torch.where(active_G11, update_G1E, column_G1E)
        row_GS1 = -(logits + column_G1E).logsumexp(-1, keepdim=True)
    plan_GSE = (logits + column_G1E).softmax(-1) * counted_GS1
    residual_G = (plan_GSE.sum(1, keepdim=True) / target_G11 - 1).abs().amax((1, 2))
    filled_G = valid_GS.any(1)
    return plan_GSE * valid_GS.unsqueeze(-1), residual_G * filled_G


@_sinkhorn.register_fake
def _(logits_GSE: Tensor, valid_GS: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits_GSE), logits_GSE.new_empty(len(logits_GSE))


def _save_plan(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[0])


def _implicit_gradient(ctx, grad_plan_GSE: Tensor, grad_residual_G: Tensor):
    """P * (R - u 1' - 1 v'): u and v keep the sums of rows and columns fixed. The residual has no gradient.

    With u eliminated, v solves (diag(P' 1) - P' P) v = column sums of P * (R - row sums of P * R), singular
    along v = 1. Adding T/E * 1 1' picks the v that sums to 0, without an error: both sides are orthogonal
    to 1. The ridge, one rounding of the diagonal, is for plans of zeros and ones, with more flat directions.
    """
    (P_GSE,) = ctx.saved_tensors
    R_GSE, E = grad_plan_GSE, P_GSE.shape[-1]
    centred_GSE = P_GSE * (R_GSE - (P_GSE * R_GSE).sum(-1, keepdim=True))
    column_GE = P_GSE.sum(1)
    target_G11 = column_GE.sum(-1).clamp(min=1)[:, None, None] / E
    ridge_GEE = (
        torch.finfo(P_GSE.dtype).eps * target_G11 * torch.eye(E, dtype=P_GSE.dtype, device=P_GSE.device)
    )
    system_GEE = torch.diag_embed(column_GE) - P_GSE.mT @ P_GSE + target_G11 + ridge_GEE
    v_GE1, _ = torch.linalg.solve_ex(system_GEE, centred_GSE.sum(1).unsqueeze(-1))
    return centred_GSE - P_GSE * (v_GE1.mT - P_GSE @ v_GE1), None, None


_sinkhorn.register_autograd(_implicit_gradient, setup_context=_save_plan)
