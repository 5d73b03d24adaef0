"""Token choice: every token picks its K best experts, each of which has room for C tokens.

Source: Riquelme et al. 2021, "Scaling Vision with Sparse MoE", https://arxiv.org/abs/2106.05974: softmax,
then top-k (section 2.3); buffer capacity (2.4); first choices before second ones (algorithm 1).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moe.init import Draw, lecun_normal
from moe.routers.capacity import check_factor, slots_per_expert
from moe.routers.losses import importance_loss
from moe.routing import GatherRouting, at_least_fp32, routing_stats


@dataclass(frozen=True, kw_only=True)
class TokenChoiceConfig:
    kind: Literal["token_choice"] = "token_choice"
    k: int = 1
    capacity_factor: float = 1.05  # V-MoE section 3.1
    importance_weight: float = 0.005  # the authors' released configs

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        if self.importance_weight < 0:
            raise ValueError(f"importance_weight must not be negative, got {self.importance_weight}")
        check_factor(self.capacity_factor)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """C: slots per expert in a group of `num_tokens`."""
        if self.k > num_experts:
            raise ValueError(f"k={self.k} exceeds num_experts={num_experts}")
        return slots_per_expert(num_tokens * self.k, num_experts, self.capacity_factor)


class TokenChoiceRouter(nn.Module):
    def __init__(self, config: TokenChoiceConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config = config
        self.num_experts = num_experts
        self.gate_DE = nn.Parameter(torch.empty(dim, num_experts))

    def draws(self) -> dict[str, Draw]:
        return {"gate_DE": lecun_normal(self.gate_DE.shape[0])}

    def forward(self, x_GSD: Tensor, valid_GS: Tensor) -> GatherRouting:
        G, S, _ = x_GSD.shape
        gates_GSE = (at_least_fp32(x_GSD) @ at_least_fp32(self.gate_DE)).softmax(-1)
        expert_GSK = gates_GSE.argsort(dim=-1, descending=True, stable=True)[..., : self.config.k]
        capacity = self.config.slots(num_tokens=S, num_experts=self.num_experts)
        token_GEC = fill_slots(expert_GSK, valid_GS, num_experts=self.num_experts, capacity=capacity)

        seated_GEC = token_GEC < S
        gates_GES = gates_GSE.transpose(1, 2)
        weight_GEC = gates_GES.gather(2, token_GEC.clamp(max=S - 1)) * seated_GEC
        seats_GS = token_GEC.new_zeros(G, S + 1).scatter_add(
            1, token_GEC.flatten(1), seated_GEC.flatten(1).long()
        )
        chosen_GSE = torch.zeros_like(gates_GSE).scatter(-1, expert_GSK, 1.0) * valid_GS.unsqueeze(-1)
        return GatherRouting(
            token_GEC=token_GEC,
            weight_GEC=weight_GEC,
            num_tokens=S,
            aux_G=self.config.importance_weight * importance_loss(gates_GSE, valid_GS),
            stats=routing_stats(
                gates_GSE=gates_GSE, load_GE=chosen_GSE.sum(1), seats_GS=seats_GS[:, :S], valid_GS=valid_GS
            ),
        )


def fill_slots(expert_GSK: Tensor, valid_GS: Tensor, *, num_experts: int, capacity: int) -> Tensor:
    """Seats each assignment in its expert's queue: all first choices, then all second ones, each in token
    order.

    V-MoE algorithm 1 without its loops: a stable sort by expert of the choice-major list keeps the queue
    order, and an assignment's seat is its distance from the first of its expert. Padding tokens queue for
    no expert.

    Returns:
        token_GEC as in `GatherRouting`.
    """
    G, S, K = expert_GSK.shape
    expert = torch.where(valid_GS.bool().unsqueeze(-1), expert_GSK, num_experts)  # E: the queue to nowhere
    expert_GQ = expert.transpose(1, 2).flatten(1)  # Q = K*S assignments, choice-major
    sorted_GQ, order_GQ = expert_GQ.sort(dim=1, stable=True)
    first_GE = torch.searchsorted(
        sorted_GQ, torch.arange(num_experts + 1, device=expert.device).expand(G, -1).contiguous()
    )
    seat_GQ = torch.arange(K * S, device=expert.device) - first_GE.gather(1, sorted_GQ)

    overflow = num_experts * capacity  # one slot more collects the dropped, and is then cut off
    kept_GQ = (seat_GQ < capacity) & (sorted_GQ < num_experts)
    slot_GQ = torch.where(kept_GQ, sorted_GQ * capacity + seat_GQ, overflow)
    token_slots = order_GQ.new_full((G, overflow + 1), S).scatter(1, slot_GQ, order_GQ % S)
    return token_slots[:, :overflow].unflatten(1, (num_experts, capacity))
