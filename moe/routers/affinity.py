"""How much a token and an expert want each other: one of the two axes of the routers of one formula.

The softmax over experts, or a transport plan that balances them. Source: Routers in Vision MoE, sections 2.1
(eq. 6), 2.2 (eq. 8) and 2.5 (eq. 9).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from moe.noise import normal, split
from moe.routers.sinkhorn import sinkhorn_plan
from moe.routers.sparse_transport import sparse_plan
from moe.routing import at_least_fp32


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig:
    kind: Literal["softmax"] = "softmax"


@dataclass(frozen=True, kw_only=True)
class SinkhornConfig:
    """Entropic transport of the logits; as many iterations as the authors' code."""

    kind: Literal["sinkhorn"] = "sinkhorn"
    iterations: int = 20

    def __post_init__(self) -> None:
        _check_iterations(self.iterations)


@dataclass(frozen=True, kw_only=True)
class SparseTransportConfig:
    """Quadratic transport of the softmax with at most C tokens per expert.

    At 1576 tokens and 32 experts 200 iterations leave the assignment (E*C <= S) within 6e-5 of its optimum,
    the semi-dual (E*C > S) within 3e-3.
    """

    kind: Literal["sparse_transport"] = "sparse_transport"
    iterations: int = 200

    def __post_init__(self) -> None:
        _check_iterations(self.iterations)


AffinityConfig = SoftmaxConfig | SinkhornConfig | SparseTransportConfig


class Gating(NamedTuple):
    """Attributes:
    logits_GSE: without noise.
    noisy_GSE: what decides; the same tensor where there is no noise.
    gates_GSE: softmax of the noisy logits over the experts.
    plan_GSE: who meets whom goes by it; 0 in the rows of padding if it is a transport plan.
    residual_G: how far the plan is from its constraints; None for the softmax.
    clean_plan_GSE: the plan without noise; None where there is no noise.
    """

    logits_GSE: Tensor
    noisy_GSE: Tensor
    gates_GSE: Tensor
    plan_GSE: Tensor
    residual_G: Tensor | None
    clean_plan_GSE: Tensor | None


def gating(
    affinity: AffinityConfig,
    x_GSD: Tensor,
    gate_DE: Tensor,
    valid_GS: Tensor,
    *,
    capacity: int,
    noise_std: float,
    keys_GS: Tensor | None,
    random_GS: Tensor | None,
) -> Gating:
    """How much tokens and experts want each other; `capacity` is the most tokens of one expert.

    `keys_GS` draw noise of standard deviation noise_std / E (V-MoE section 2.3); without them there is none.
    `random_GS` draw N(0, 1) logits in place of x W.
    """
    E = gate_DE.shape[1]
    logits_GSE = at_least_fp32(x_GSD) @ at_least_fp32(gate_DE)
    if random_GS is not None:
        logits_GSE = normal(split(random_GS, E)).to(logits_GSE.dtype)
    noisy_GSE, clean_plan_GSE = logits_GSE, None
    if keys_GS is not None and noise_std:
        noisy_GSE = logits_GSE + noise_std / E * normal(split(keys_GS, E)).to(logits_GSE.dtype)
        clean_plan_GSE, _ = _plan(affinity, logits_GSE, logits_GSE.softmax(-1), valid_GS, capacity)
    gates_GSE = noisy_GSE.softmax(-1)
    plan_GSE, residual_G = _plan(affinity, noisy_GSE, gates_GSE, valid_GS, capacity)
    return Gating(logits_GSE, noisy_GSE, gates_GSE, plan_GSE, residual_G, clean_plan_GSE)


def _plan(
    config: AffinityConfig, logits_GSE: Tensor, gates_GSE: Tensor, valid_GS: Tensor, capacity: int
) -> tuple[Tensor, Tensor | None]:
    if isinstance(config, SinkhornConfig):
        return sinkhorn_plan(logits_GSE, valid_GS, config.iterations)
    if isinstance(config, SparseTransportConfig):
        plan_GSE, _, residual_G = sparse_plan(gates_GSE, valid_GS, capacity, config.iterations)
        return plan_GSE, residual_G
    return gates_GSE, None


def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
