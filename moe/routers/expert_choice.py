"""Expert choice: every expert picks its C best tokens, so the load is balanced by construction.

Source: Zhou et al. 2022, https://arxiv.org/abs/2202.09368; Routers in Vision MoE, section 2.3 and algorithm
2; with a Sinkhorn plan in place of the softmax, section 2.4; with a sparsity-constrained plan, section 2.5.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe.config import NonNegativeFloat
from moe.overrides import RoutingOverrides
from moe.routers.affinity import AffinityConfig, Gating, SoftmaxConfig
from moe.routers.choice import CapacityConfig, ChoiceRouter, best_of
from moe.routing import at_least_fp32


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceConfig(CapacityConfig):
    """Expert choice.

    Attributes:
        affinity: the score by which experts pick.
        combine: weigh outputs by the softmax (Routers, section 2.2) or by the affinity itself.
        normalize: divide a token's weights by their sum over the experts that picked it.
        noise_std: standard deviation of the training noise on the logits, times E.
    """

    kind: Literal["expert_choice"] = "expert_choice"
    affinity: AffinityConfig = SoftmaxConfig()
    combine: Literal["softmax", "affinity"] = "softmax"
    normalize: bool = False
    noise_std: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.combine == "affinity" and not self.affinity.has_gradient:
            raise ValueError(
                f"combine='affinity' would train no router: the {self.affinity.kind} plan has no gradient;"
                " use combine='softmax' or another affinity"
            )

    @property
    def reads_keys(self) -> bool:
        return self.noise_std > 0

    def family(self) -> str:
        return self.affinity.family(self.kind)

    def build(self, *, dim: int, num_experts: int) -> "ExpertChoiceRouter":
        return ExpertChoiceRouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """Returns C, the slots per expert in a group of `num_tokens`."""
        slots = self.capacity(num_tokens, num_experts)
        if slots > num_tokens:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} asks each of {num_experts} experts for {slots} of"
                f" only {num_tokens} tokens; use at most {num_experts}, and a smaller capacity_multiple_of"
            )
        return slots

    def leaks_future(self, *, num_tokens: int, num_experts: int) -> str:
        if self.slots(num_tokens=num_tokens, num_experts=num_experts) == num_tokens:
            return self.affinity.sees_group if self.combine == "affinity" else ""
        return (
            "experts pick the best tokens of the whole group;"
            f" capacity_factor={num_experts} lets each of {num_experts} experts take all of them"
        )

    def active_experts(self, num_experts: int) -> float:
        return self.capacity_factor

    def grid(self, num_experts: int) -> list[RoutingOverrides]:
        capacities = [RoutingOverrides(capacity_factor=factor) for factor in (*self.CAPACITIES, 2.0)]
        return capacities + [RoutingOverrides(experts=num_experts * part // 4) for part in (1, 2, 3)]


class ExpertChoiceRouter(ChoiceRouter):
    def choose(self, config: ExpertChoiceConfig, plan_GSE: Tensor, valid_GS: Tensor, capacity: int) -> Tensor:
        return best_tokens(plan_GSE, valid_GS, capacity)

    def chosen(self, choice: Tensor, valid_GS: Tensor) -> Tensor:
        G, S = valid_GS.shape
        picked_GES = at_least_fp32(valid_GS).new_zeros(G, self.num_experts, S + 1).scatter(2, choice, 1.0)
        return picked_GES[..., :S].transpose(1, 2)

    def weights(self, config: ExpertChoiceConfig, choice: Tensor, gated: Gating) -> Tensor:
        weights_GSE = super().weights(config, choice, gated)
        if not config.normalize:
            return weights_GSE
        picked_GSE = weights_GSE * self.chosen(choice, weights_GSE[..., 0])
        return picked_GSE / picked_GSE.sum(-1, keepdim=True).clamp(min=torch.finfo(picked_GSE.dtype).tiny)


def best_tokens(affinity_GSE: Tensor, valid_GS: Tensor, capacity: int) -> Tensor:
    """Returns each expert's best tokens, best first, ties to the earlier token, as token_GEC."""
    return best_of(affinity_GSE, valid_GS.bool().unsqueeze(-1).expand_as(affinity_GSE), capacity)
