"""From filled slots to a routing: weights, expert subset and statistics of token and expert choice."""

from torch import Tensor

from moe.overrides import RoutingOverrides
from moe.routing import GatherRouting
from moe.stats import routing_stats


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
    """`weights_GSE` weigh the outputs of the seated tokens, not renormalised. `chosen_GS` as in
    `routing_stats`; None where the choice is the capacity (expert choice)."""
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
