"""ReLU routing: every expert whose gate is positive is open to a token, and a penalty keeps most gates shut.

Source: Wang et al. 2024, "ReMoE: Fully Differentiable Mixture-of-Experts with ReLU Routing",
https://arxiv.org/abs/2412.14711, and its code. Their experts take all tokens whose gates are open. Here an
expert has C slots, for k experts a token, and keeps the tokens of its largest gates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from moe.config import Bound, PositiveFloat, PositiveInt
from moe.init import Draw, constant, lecun_normal, zeros
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers.affinity import gate_logits
from moe.routers.choice import CapacityConfig, best_of, gather_routing
from moe.routing import GatherRouting, Router, at_least_fp32


@dataclass(frozen=True, kw_only=True)
class ReLUConfig(CapacityConfig):
    """ReLU routing.

    Attributes:
        k: open gates per token that the penalty aims at, on average.
        coefficient: of the penalty, at the start. One for all layers, which changes after every update.
        factor: by which it grows where fewer gates are shut than 1 - k/E of all, and else shrinks.
    """

    kind: Literal["relu"] = "relu"
    k: PositiveInt = 1
    coefficient: PositiveFloat = 1e-8
    factor: Annotated[float, Bound(">=", 1)] = 1.2

    @property
    def can_overflow(self) -> bool:
        return True

    def build(self, *, dim: int, num_experts: int) -> "ReLURouter":
        return ReLURouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """Returns C, the slots per expert in a group of `num_tokens`."""
        if self.k > num_experts:
            raise ValueError(f"k={self.k} exceeds num_experts={num_experts}")
        return min(self.capacity(num_tokens * self.k, num_experts), num_tokens)

    def leaks_future(self, *, num_tokens: int, num_experts: int) -> str:
        if self.slots(num_tokens=num_tokens, num_experts=num_experts) == num_tokens:
            return ""
        return (
            "experts keep the tokens of the largest gates of the whole group;"
            f" capacity_factor={num_experts / self.k:g} keeps all"
        )

    def active_experts(self, num_experts: int) -> float:
        return self.k

    def grid(self, num_experts: int) -> list[RoutingOverrides]:
        return [RoutingOverrides(capacity_factor=factor) for factor in self.CAPACITIES]


class ReLURouter(Router):
    """The router. Its buffer `coefficient` is that of the penalty; it counts shut and all gates."""

    coefficient: Tensor

    def __init__(self, config: ReLUConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config, self.num_experts = config, num_experts
        self.gate_DE = nn.Parameter(torch.empty(dim, num_experts))
        self.register_buffer("coefficient", torch.empty(1))
        self.register_buffer("counts", torch.empty(2, dtype=torch.int64), persistent=False)

    def draws(self) -> dict[str, Draw]:
        gate, coefficient = lecun_normal(self.gate_DE.shape[0]), constant(self.config.coefficient)
        return {"gate_DE": gate, "coefficient": coefficient, "counts": zeros()}

    def after_batch(self, routers: Sequence[Router]) -> None:
        counts = [r.counts for r in routers if isinstance(r, ReLURouter) and r.counts is not None]
        shut, gates = torch.stack(counts).sum(0).unbind()
        E, k = self.num_experts, self.config.k
        grows = shut * E < gates * (E - k)  # exact in integers; where they are equal, it shrinks
        changed = torch.where(
            grows, self.coefficient * self.config.factor, self.coefficient / self.config.factor
        )
        self.coefficient.copy_(torch.where(gates > 0, changed, self.coefficient))

    def forward(
        self,
        x_GSD: Tensor,
        valid_GS: Tensor,
        keys_GS: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        random_GS: Tensor | None = None,
        return_stats: bool = True,
    ) -> GatherRouting:
        config = overrides.apply(self.config if self.training else self.config.eval_config())
        capacity = config.slots(num_tokens=int(x_GSD.shape[1]), num_experts=self.num_experts)
        weights_GSE = gate_logits(x_GSD, self.gate_DE, random_GS).relu()
        open_GSE = (weights_GSE > 0) & valid_GS.bool().unsqueeze(-1)
        counts = None
        if self.training:
            gates = valid_GS.bool().sum() * self.num_experts
            counts = torch.stack([gates - open_GSE.sum(), gates])
        total_GS1 = weights_GSE.sum(-1, keepdim=True).clamp(min=torch.finfo(weights_GSE.dtype).tiny)
        return gather_routing(
            best_of(weights_GSE, open_GSE, capacity),
            chosen_GSE=open_GSE.to(weights_GSE.dtype) if return_stats else None,
            weights_GSE=weights_GSE,
            gates_GSE=weights_GSE / total_GS1,
            valid_GS=valid_GS,
            overrides=overrides,
            aux_G=self.coefficient * openness_loss(weights_GSE, valid_GS, config.k),
            counts=counts,
        )


def openness_loss(weights_GSE: Tensor, valid_GS: Tensor, k: int) -> Tensor:
    """Returns E / (k n^2) * sum_e (sum_t weight of e) * (tokens to which e is open), (G,), of n valid tokens;
    only weights have a gradient. An expert that is open to more tokens is shut with more force.
    """
    valid_GS1 = at_least_fp32(valid_GS).unsqueeze(-1).to(weights_GSE.dtype)
    mean_GSE = weights_GSE * (valid_GS1 / valid_GS1.sum(1, keepdim=True).clamp(min=1))
    share_GE = ((weights_GSE.detach() > 0) * valid_GS1).sum(1) / valid_GS1.sum(1).clamp(min=1)
    return weights_GSE.shape[-1] / k * (mean_GSE.sum(1) * share_GE).sum(-1)
