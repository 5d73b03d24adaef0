"""The parts that token choice and expert choice share: number of slots, forward pass, filled slots.

Source of the number of slots: V-MoE section 2.4, B_e = round(k*N*P*C/E); Routers in Vision MoE section 3.1,
round(c*T/E). `round` is half to even, as in the authors' code; their later code takes `ceil` and multiples of
4, which the config selects.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.config import PositiveFloat, PositiveInt
from moe.init import Draw, lecun_normal
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers.affinity import Gating, gating
from moe.routing import GatherRouting, Router, RouterConfig, Routing, routing_stats
from moe.rows import RowsRouting, sort_by_expert

AnyRouting = TypeVar("AnyRouting", bound=Routing)


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(RouterConfig):
    """The number of slots per expert.

    Attributes:
        capacity_factor: slots per assignment (tokens, times choices); below 1 some assignments are dropped.
        eval_capacity_factor: the same in evaluation mode (V-MoE's released S/32); None: as in training.
        capacity_rounding, capacity_multiple_of: how the number of slots per expert becomes an integer.
    """

    capacity_factor: PositiveFloat = 1.0
    eval_capacity_factor: PositiveFloat | None = None
    capacity_rounding: Literal["round", "ceil"] = "round"
    capacity_multiple_of: PositiveInt = 1

    # Operating points worth trying.
    CAPACITIES: ClassVar = (0.15, 0.3, 0.5, 0.75, 1.0, 1.5)

    def eval_config(self) -> Self:
        """Returns the config in evaluation mode."""
        if self.eval_capacity_factor is None:
            return self
        return replace(self, capacity_factor=self.eval_capacity_factor, eval_capacity_factor=None)

    def capacity(self, assignments: int, num_experts: int) -> int:
        """Returns the slots per expert and group for the number of `assignments` in the group. Raises
        ValueError if the number rounds to 0."""
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


class ChoiceRouter(Router):
    """A router with one linear gate; tokens choose experts, or experts choose tokens, by affinity."""

    def __init__(self, config: Any, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config, self.num_experts = config, num_experts
        self.gate_DE = nn.Parameter(torch.empty(dim, num_experts))

    def draws(self) -> dict[str, Draw]:
        return {"gate_DE": lecun_normal(self.gate_DE.shape[0])}

    @abstractmethod
    def choose(self, config: Any, plan_GSE: Tensor, valid_GS: Tensor, capacity: int) -> Tensor:
        """Returns the choices by affinity: experts of each token, or tokens of each expert."""

    @abstractmethod
    def chosen(self, choice: Tensor, valid_GS: Tensor) -> Tensor:
        """Returns chosen_GSE: 1 for each chosen pair of a valid token and an expert."""

    def seat(self, config: Any, choice: Tensor, plan_GSE: Tensor, valid_GS: Tensor, capacity: int) -> Tensor:
        """Returns token_GEC as in `GatherRouting`; here the choices are that already."""
        return choice

    def weights(self, config: Any, choice: Tensor, gated: Gating) -> Tensor:
        """Returns weights_GSE of the outputs of seated tokens."""
        return gated.gates_GSE if config.combine == "softmax" else gated.plan_GSE

    def aux_loss(self, config: Any, gated: Gating, valid_GS: Tensor) -> Tensor:
        """Returns the weighted auxiliary loss of each group, (G,)."""
        return gated.gates_GSE.new_zeros(valid_GS.shape[0])

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
        # In a graph of any number of groups even the number of their tokens is a formula of it.
        capacity = config.slots(num_tokens=int(x_GSD.shape[1]), num_experts=self.num_experts)
        gated = gating(
            config.affinity, x_GSD, self.gate_DE, valid_GS, keys_GS, random_GS, config.noise_std, capacity
        )
        choice = self.choose(config, gated.plan_GSE, valid_GS, capacity)
        chosen_GSE = flip_G = None
        if return_stats:
            chosen_GSE = self.chosen(choice, valid_GS)
            if gated.noisy_GSE is not gated.logits_GSE:
                clean, gates_GSE = gated.logits_GSE.detach(), gated.logits_GSE.detach().softmax(-1)
                plan_GSE, _ = config.affinity.plan(clean, gates_GSE, valid_GS, capacity)
                clean_GSE = self.chosen(self.choose(config, plan_GSE, valid_GS, capacity), valid_GS)
                kept_G = (clean_GSE * chosen_GSE).sum((1, 2))
                flip_G = 1 - kept_G / clean_GSE.sum((1, 2)).clamp(min=1)
        return gather_routing(
            self.seat(config, choice, gated.plan_GSE, valid_GS, capacity),
            chosen_GSE=chosen_GSE,
            weights_GSE=self.weights(config, choice, gated),
            gates_GSE=gated.gates_GSE,
            valid_GS=valid_GS,
            overrides=overrides,
            aux_G=self.aux_loss(config, gated, valid_GS),
            residual_G=gated.residual_G,
            flip_G=flip_G,
        )


def best_of(value_GSE: Tensor, candidate_GSE: Tensor, capacity: int) -> Tensor:
    """Returns each expert's candidates of the largest values (none negative), best first, ties to the earlier
    token, as token_GEC.
    """
    candidate_GES, S = candidate_GSE.transpose(1, 2), candidate_GSE.shape[1]
    # The others come last.
    preference_GES = torch.where(candidate_GES, value_GSE.detach().transpose(1, 2), -1.0)
    picked_GEC = preference_GES.argsort(dim=-1, descending=True, stable=True)[..., :capacity]
    token_GEC = torch.where(candidate_GES.gather(2, picked_GEC), picked_GEC, S)
    return F.pad(token_GEC, (0, capacity - S), value=S) if capacity > S else token_GEC


def gather_routing(
    token_GEC: Tensor,
    *,
    chosen_GSE: Tensor | None,
    weights_GSE: Tensor,
    gates_GSE: Tensor,
    valid_GS: Tensor,
    overrides: RoutingOverrides,
    aux_G: Tensor,
    residual_G: Tensor | None = None,
    flip_G: Tensor | None = None,
    bias_E: Tensor | None = None,
    counts: Tensor | None = None,
) -> GatherRouting:
    """Makes a routing of filled slots: weights, expert subset and statistics.

    `chosen_GSE` is 1 for each valid token and expert of which one chose the other, whatever the capacity;
    without it there are no statistics. `weights_GSE` weigh the outputs of the seated tokens and are not
    renormalised.
    """
    G, S, _ = gates_GSE.shape
    seated_GEC = token_GEC < S
    weight_GEC = weights_GSE.transpose(1, 2).gather(2, token_GEC.clamp(max=S - 1)) * seated_GEC
    kept_GE = overrides.kept(weight_GEC.detach().sum(-1))
    if kept_GE is not None:
        seated_GEC = seated_GEC & kept_GE.unsqueeze(-1)
        weight_GEC = weight_GEC * seated_GEC
    routing = GatherRouting(
        token_GEC=token_GEC,
        weight_GEC=weight_GEC,
        gates_GSE=gates_GSE,
        aux_G=aux_G,
        kept_GE=kept_GE,
        counts=counts,
    )
    if chosen_GSE is None:
        return routing
    seats_GS = token_GEC.new_zeros(G, S + 1).scatter_add(
        1, token_GEC.flatten(1), seated_GEC.flatten(1).long()
    )[:, :S]
    return _with_stats(
        routing, chosen_GSE, seats_GS, valid_GS, flip_G=flip_G, residual_G=residual_G, bias_E=bias_E
    )


def rows_routing(
    choice_GSK: Tensor,
    *,
    chosen_GSE: Tensor,
    weights_GSE: Tensor,
    gates_GSE: Tensor,
    valid_GS: Tensor,
    overrides: RoutingOverrides,
    aux_G: Tensor,
    bias_E: Tensor | None = None,
    counts: Tensor | None = None,
    return_stats: bool = True,
) -> RowsRouting:
    """Makes a routing that computes every choice of a valid token; the other arguments are as those of
    `gather_routing`.
    """
    computed_GSK = valid_GS.bool().unsqueeze(-1).expand(choice_GSK.shape)
    kept_GE = overrides.kept((weights_GSE * chosen_GSE).detach().sum(1))
    if kept_GE is not None:
        kept_GSE = kept_GE.unsqueeze(1).expand(gates_GSE.shape)
        computed_GSK = computed_GSK & kept_GSE.gather(-1, choice_GSK)
    order_M, count_E = sort_by_expert(choice_GSK, computed_GSK, gates_GSE.shape[-1])
    routing = RowsRouting(
        expert_GSK=choice_GSK,
        weight_GSK=weights_GSE.gather(-1, choice_GSK) * computed_GSK,
        order_M=order_M,
        count_E=count_E,
        gates_GSE=gates_GSE,
        aux_G=aux_G,
        kept_GE=kept_GE,
        counts=counts,
    )
    if not return_stats:
        return routing
    return _with_stats(routing, chosen_GSE, computed_GSK.sum(-1), valid_GS, bias_E=bias_E)


def _with_stats(
    routing: AnyRouting, chosen_GSE: Tensor, seats_GS: Tensor, valid_GS: Tensor, **others: Tensor | None
) -> AnyRouting:
    load_GE = chosen_GSE.sum(1)
    stats = routing_stats(
        gates_GSE=routing.gates_GSE,
        load_GE=load_GE,
        chosen_GS=chosen_GSE.sum(2),
        seats_GS=seats_GS,
        valid_GS=valid_GS,
        **others,
    )
    return replace(routing, load_GE=load_GE, stats=stats)
