"""The parts that token choice and expert choice share: number of slots, gate, and routing of filled slots.

Source of the number of slots: V-MoE section 2.4, B_e = round(k*N*P*C/E); Routers in Vision MoE section 3.1,
round(c*T/E). `round` is half to even, as in the authors' code; their later code takes `ceil` and multiples of
4, which the config selects.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moe.init import Draw, lecun_normal
from moe.overrides import RoutingOverrides
from moe.routing import GatherRouting, routing_stats


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """The number of slots per expert.

    Attributes:
        capacity_factor: slots per assignment (tokens, times choices); below 1 some assignments are dropped.
        capacity_rounding, capacity_multiple_of: how the number of slots per expert becomes an integer.
    """

    capacity_factor: float = 1.0
    capacity_rounding: Literal["round", "ceil"] = "round"
    capacity_multiple_of: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor must be positive and finite, got {self.capacity_factor}")
        if self.capacity_multiple_of < 1:
            raise ValueError(f"capacity_multiple_of must be at least 1, got {self.capacity_multiple_of}")

    def capacity(self, assignments: int, num_experts: int) -> int:
        """Returns the slots per expert and group for the number of `assignments` in the group.

        Raises:
            ValueError: if the number rounds to 0.
        """
        to_integer = round if self.capacity_rounding == "round" else math.ceil
        slots = to_integer(assignments * self.capacity_factor / num_experts)
        if slots < 1:
            least = 0.5 * num_experts / assignments
            raise ValueError(
                f"capacity_factor={self.capacity_factor} leaves no slot: {assignments} assignments x"
                f" {self.capacity_factor} / {num_experts} experts rounds to 0; use more than {least:.3g},"
                " fewer experts or more images_per_group"
            )
        return math.ceil(slots / self.capacity_multiple_of) * self.capacity_multiple_of


class GatedRouter(nn.Module):
    """A router with one linear gate, whose weights start with variance 1 / D."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_DE = nn.Parameter(torch.empty(dim, num_experts))

    def draws(self) -> dict[str, Draw]:
        return {"gate_DE": lecun_normal(self.gate_DE.shape[0])}


def gather_routing(
    token_GEC: Tensor,
    *,
    weights_GSE: Tensor,
    gates_GSE: Tensor,
    valid_GS: Tensor,
    overrides: RoutingOverrides,
    aux_G: Tensor,
    load_GE: Tensor,
    chosen_GS: Tensor | None = None,
    residual_G: Tensor | None = None,
    flip_G: Tensor | None = None,
) -> GatherRouting:
    """Makes a routing of filled slots: weights, expert subset and statistics.

    `weights_GSE` weigh the outputs of the seated tokens and are not renormalised. `chosen_GS` is as in
    `routing_stats`; None if capacity and choice are the same (expert choice).
    """
    G, S, _ = gates_GSE.shape
    seated_GEC = token_GEC < S
    weight_GEC = weights_GSE.transpose(1, 2).gather(2, token_GEC.clamp(max=S - 1)) * seated_GEC

    def seats() -> Tensor:
        count = token_GEC.new_zeros(G, S + 1)
        return count.scatter_add(1, token_GEC.flatten(1), seated_GEC.flatten(1).long())[:, :S]

    chosen_GS = seats() if chosen_GS is None else chosen_GS
    kept_GE = overrides.kept(weight_GEC.detach().sum(-1))
    if kept_GE is not None:
        seated_GEC = seated_GEC & kept_GE.unsqueeze(-1)
        weight_GEC = weight_GEC * seated_GEC
    return GatherRouting(
        token_GEC=token_GEC,
        weight_GEC=weight_GEC,
        gates_GSE=gates_GSE,
        load_GE=load_GE.detach(),
        aux_G=aux_G,
        kept_GE=kept_GE,
        stats=routing_stats(
            gates_GSE=gates_GSE,
            load_GE=load_GE,
            chosen_GS=chosen_GS,
            seats_GS=seats(),
            valid_GS=valid_GS,
            flip_G=flip_G,
            residual_G=residual_G,
        ),
    )
