"""The affinity of tokens and experts: the softmax over experts, or a transport plan that balances experts.

Source: Routers in Vision MoE, where affinity is one of two axes (the other is allocation: token or expert
choice): sections 2.1 (softmax, eq. 6), 2.2 (Sinkhorn, eq. 8) and 2.5 (sparsity-constrained, eq. 9).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from moe.config import Family, PositiveInt
from moe.init import gaussian, split
from moe.routers.sparse_transport import sparse_plan
from moe.routing import at_least_fp32


@dataclass(frozen=True, kw_only=True)
class AffinityConfig(Family, ABC, default="softmax"):
    """An affinity.

    Attributes:
        has_gradient: whether the router learns from it, if it weighs outputs.
        sees_group: why the affinity of a token depends on the others of its group; empty if it does not.
    """

    has_gradient: ClassVar[bool] = True
    sees_group: ClassVar[str] = "the transport plan balances the experts over all tokens: use softmax"

    def family(self, kind: str) -> str:
        """Returns the routing algorithm of a router of that kind: ``sinkhorn_token_choice``."""
        return f"{self.kind}_{kind}"

    @abstractmethod
    def plan(
        self, logits_GSE: Tensor, gates_GSE: Tensor, valid_GS: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the affinity by the logits and their softmax, and the residual as in `Gating`."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(AffinityConfig):
    """The softmax of the logits over experts."""

    kind: Literal["softmax"] = "softmax"
    sees_group: ClassVar[str] = ""

    def family(self, kind: str) -> str:
        return kind

    def plan(
        self, logits_GSE: Tensor, gates_GSE: Tensor, valid_GS: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor | None]:
        return gates_GSE, None


@dataclass(frozen=True, kw_only=True)
class SinkhornConfig(AffinityConfig):
    """Entropic transport of the logits.

    Attributes:
        iterations: updates of the plan; 20 as in the authors' code.
    """

    kind: Literal["sinkhorn"] = "sinkhorn"
    iterations: PositiveInt = 20

    def plan(
        self, logits_GSE: Tensor, gates_GSE: Tensor, valid_GS: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor | None]:
        return sinkhorn_plan(logits_GSE, valid_GS, self.iterations)


@dataclass(frozen=True, kw_only=True)
class SparseTransportConfig(AffinityConfig):
    """Quadratic transport of the softmax with at most C tokens per expert.

    At 1576 tokens and 32 experts 200 iterations leave the assignment (E*C <= S) within 6e-5 of its optimum,
    the semi-dual (E*C > S) within 3e-3.

    Attributes:
        iterations: bound of the updates of the plan.
    """

    kind: Literal["sparse_transport"] = "sparse_transport"
    iterations: PositiveInt = 200
    has_gradient: ClassVar[bool] = False

    def plan(
        self, logits_GSE: Tensor, gates_GSE: Tensor, valid_GS: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor | None]:
        plan_GSE, _, residual_G = sparse_plan(gates_GSE, valid_GS, capacity, self.iterations)
        return plan_GSE, residual_G


class Gating(NamedTuple):
    """Logits, softmax and affinity of a group's tokens and experts.

    Attributes:
        logits_GSE: logits without noise.
        noisy_GSE: logits that decide; the same tensor as `logits_GSE` without noise.
        gates_GSE: softmax of the noisy logits over the experts.
        plan_GSE: affinity that allocates tokens; the rows of padding are 0 if it is a transport plan.
        residual_G: largest violation of the plan's constraints; None for the softmax.
    """

    logits_GSE: Tensor
    noisy_GSE: Tensor
    gates_GSE: Tensor
    plan_GSE: Tensor
    residual_G: Tensor | None


def gating(
    affinity: AffinityConfig,
    x_GSD: Tensor,
    gate_DE: Tensor,
    valid_GS: Tensor,
    keys_GS: Tensor | None,
    random_GS: Tensor | None,
    noise_std: float,
    capacity: int,
) -> Gating:
    """Computes the affinity of tokens and experts; `capacity` bounds the tokens of one expert.

    `keys_GS` seed noise of standard deviation noise_std / E (V-MoE section 2.3); without keys there is none.
    `random_GS` is as in `gate_logits`.
    """
    E = gate_DE.shape[1]
    logits_GSE = gate_logits(x_GSD, gate_DE, random_GS)
    noisy_GSE = logits_GSE
    if keys_GS is not None and noise_std:
        noisy_GSE = logits_GSE + noise_std / E * gaussian(split(keys_GS, E)).to(logits_GSE.dtype)
    gates_GSE = noisy_GSE.softmax(-1)
    plan_GSE, residual_G = affinity.plan(noisy_GSE, gates_GSE, valid_GS, capacity)
    return Gating(logits_GSE, noisy_GSE, gates_GSE, plan_GSE, residual_G)


def gate_logits(x_GSD: Tensor, gate_DE: Tensor, random_GS: Tensor | None) -> Tensor:
    """Computes the logits x W; with `random_GS` they are N(0, 1) numbers seeded by it."""
    logits_GSE = at_least_fp32(x_GSD) @ at_least_fp32(gate_DE)
    if random_GS is None:
        return logits_GSE
    return gaussian(split(random_GS, gate_DE.shape[1])).to(logits_GSE.dtype)


def sinkhorn_plan(logits_GSE: Tensor, valid_GS: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Computes the entropic transport plan of tokens and experts by at most `iterations` updates.

    Source: Routers in Vision MoE, eq. 8: argmax <P, logits> - <P, log P> over plans whose rows (tokens) sum
    to 1 and whose columns (experts) sum to T/E. As in the authors' code, columns are updated first and rows
    last; their code stops after 20 iterations outside the log domain, which overflows, and takes no gradient.

    Computes in the dtype of the logits, float32 or float64, without a host sync. Rows of valid tokens sum to
    1 exactly, rows of padding are zero; T counts the valid tokens. A converged group is frozen, so its plan
    depends neither on the groups beside it nor on further iterations. The gradient is that of the converged
    plan: it is exact when the residual is small, whatever the number of iterations, and can be taken once.

    Returns plan_GSE and residual_G, the largest deviation of a column sum from T/E, relative to T/E.
    """
    # An exported graph runs where our operators are unknown.
    solve = _alternate if torch.compiler.is_exporting() else _sinkhorn
    plan_GSE, residual_G = solve(logits_GSE, valid_GS.bool(), iterations)
    return plan_GSE, residual_G.detach()


# One opaque operator, so that the graph of torch.compile does not grow with the iterations.
@torch.library.custom_op("moe_frontier::sinkhorn", mutates_args=())
def _sinkhorn(logits_GSE: Tensor, valid_GS: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    return _alternate(logits_GSE, valid_GS, iterations)


def _alternate(logits_GSE: Tensor, valid_GS: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Normalises columns and rows in turn, in the log domain."""
    # A group of padding alone is solved as if it were valid and emptied at the end, which avoids log(0).
    counted_GS1 = (valid_GS | ~valid_GS.any(1, keepdim=True)).unsqueeze(-1).to(logits_GSE)
    log_counted_GS1 = counted_GS1.log()  # -inf for padding
    logits = logits_GSE.masked_fill(~valid_GS.unsqueeze(-1), 0.0)
    target_G11 = counted_GS1.sum(1, keepdim=True) / logits.shape[-1]
    log_target_G11 = target_G11.log()
    # The tolerance is above the rounding of a sum over thousands of tokens.
    tolerance = torch.finfo(logits.dtype).eps ** 0.75
    column_G1E = log_target_G11 - (logits + log_counted_GS1).logsumexp(1, keepdim=True)
    for _ in range(iterations - 1):
        rows_GSE = (logits + column_G1E).log_softmax(-1) + log_counted_GS1
        # The logarithm of the current column sum divided by its target.
        off_G1E = rows_GSE.logsumexp(1, keepdim=True) - log_target_G11
        active_G11 = off_G1E.abs().amax(-1, keepdim=True) > tolerance
        column_G1E = torch.where(active_G11, column_G1E - off_G1E, column_G1E)
    plan_GSE = (logits + column_G1E).softmax(-1) * counted_GS1
    residual_G = (plan_GSE.sum(1, keepdim=True) / target_G11 - 1).abs().amax((1, 2))
    filled_G = valid_GS.any(1)
    return plan_GSE * valid_GS.unsqueeze(-1), residual_G * filled_G


@_sinkhorn.register_fake
def _(logits_GSE: Tensor, valid_GS: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits_GSE), logits_GSE.new_empty(logits_GSE.shape[0])


def _save_plan(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[0])


def _implicit_gradient(ctx, grad_plan_GSE: Tensor, grad_residual_G: Tensor):
    """Returns P * (R - u 1' - 1 v'), where u and v keep row and column sums fixed.

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
