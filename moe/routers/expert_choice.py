"""Expert choice: every expert picks its C best tokens. Balanced by construction.

Source: Zhou et al. 2022, https://arxiv.org/abs/2202.09368; Routers in Vision MoE, section 2.3 and algorithm
2.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moe.init import Draw, lecun_normal
from moe.routers.capacity import check_factor, slots_per_expert
from moe.routing import GatherRouting, at_least_fp32, routing_stats


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceConfig:
    kind: Literal["expert_choice"] = "expert_choice"
    capacity_factor: float = 1.0

    def __post_init__(self) -> None:
        check_factor(self.capacity_factor)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """C: slots per expert in a group of `num_tokens`."""
        slots = slots_per_expert(num_tokens, num_experts, self.capacity_factor)
        if slots > num_tokens:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} asks each of {num_experts} experts for {slots} of"
                f" only {num_tokens} tokens; use at most {num_experts}"
            )
        return slots


class ExpertChoiceRouter(nn.Module):
    def __init__(self, config: ExpertChoiceConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config = config
        self.num_experts = num_experts
        self.gate_DE = nn.Parameter(torch.empty(dim, num_experts))

    def draws(self) -> dict[str, Draw]:
        return {"gate_DE": lecun_normal(self.gate_DE.shape[0])}

    def forward(self, x_GSD: Tensor, valid_GS: Tensor) -> GatherRouting:
        G, S, _ = x_GSD.shape
        gates_GSE = (at_least_fp32(x_GSD) @ at_least_fp32(self.gate_DE)).softmax(-1)
        gates_GES = gates_GSE.transpose(1, 2)
        capacity = self.config.slots(num_tokens=S, num_experts=self.num_experts)
        preference = torch.where(valid_GS.bool().unsqueeze(1), gates_GES, -1.0)  # padding comes last
        picked_GEC = preference.argsort(dim=-1, descending=True, stable=True)[..., :capacity]
        valid_GEC = valid_GS.bool().unsqueeze(1).expand_as(gates_GES).gather(2, picked_GEC)
        token_GEC = torch.where(valid_GEC, picked_GEC, S)
        seats_GS = token_GEC.new_zeros(G, S + 1).scatter_add(
            1, token_GEC.flatten(1), valid_GEC.flatten(1).long()
        )
        return GatherRouting(
            token_GEC=token_GEC,
            weight_GEC=gates_GES.gather(2, picked_GEC) * valid_GEC,
            num_tokens=S,
            aux_G=gates_GES.new_zeros(G),
            stats=routing_stats(
                gates_GSE=gates_GSE, load_GE=valid_GEC.sum(-1), seats_GS=seats_GS[:, :S], valid_GS=valid_GS
            ),
        )
