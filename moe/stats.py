"""What every router reports about a forward pass, under the same names."""

import torch
from torch import Tensor

from moe.routing import at_least_fp32


def routing_stats(
    *,
    gates_GSE: Tensor,
    load_GE: Tensor,
    chosen_GS: Tensor,
    seats_GS: Tensor,
    valid_GS: Tensor,
    flip_G: Tensor | None = None,
    residual_G: Tensor | None = None,
    slot_similarity_G: Tensor | None = None,
) -> dict[str, Tensor]:
    """Detached float32 scalars over the valid tokens of all groups; groups of padding alone do not count.

    Args:
        gates_GSE: how much each token's combination gives to each expert, summing to 1 over E.
        load_GE: tokens that want each expert (soft: slot mass), capacity aside.
        chosen_GS: how many experts want the token or it wants, before capacity.
        seats_GS: in how many slots each token sits.
        valid_GS: 1 for real tokens, 0 for padding.
        flip_G: share of the group's choices that router noise changed; none without noise.
        residual_G: how far a transport plan is from its constraints; none for softmax affinities.
        slot_similarity_G: mean cosine between the dispatch weights of two slots; none for whole tokens.

    Returns:
        ``unchosen_frac`` tokens that no expert would see even with unlimited room; ``dropped_frac`` tokens
        that no expert sees; ``load_mean``, ``load_cv``, ``load_min``, ``load_max`` of the experts' load and
        ``seats_max`` of the tokens' seats (multiplicity), averaged over groups; ``seats_mean``;
        ``gate_entropy_nats``; ``flip_frac``, ``transport_residual`` and ``slot_similarity``: 0 where there
        is none.
    """
    gates_GSE, load_GE = gates_GSE.detach(), at_least_fp32(load_GE.detach())
    valid_GS = valid_GS.to(torch.float32)  # a bf16 mask would round the counts
    tokens = valid_GS.sum().clamp(min=1)
    filled_G = valid_GS.amax(1)
    groups = filled_G.sum().clamp(min=1)
    mean_G = load_GE.mean(-1)

    def over_tokens(value_GS: Tensor) -> Tensor:
        return (value_GS * valid_GS).sum() / tokens

    def over_groups(value_G: Tensor | None) -> Tensor:
        return filled_G.new_zeros(()) if value_G is None else (value_G.detach() * filled_G).sum() / groups

    stats = {
        "unchosen_frac": over_tokens((chosen_GS == 0).float()),
        "dropped_frac": over_tokens((seats_GS == 0).float()),
        "load_mean": over_groups(mean_G),
        "load_cv": over_groups(load_GE.std(-1, correction=0) / mean_G.clamp(min=1e-9)),
        "load_min": over_groups(load_GE.amin(-1)),
        "load_max": over_groups(load_GE.amax(-1)),
        "seats_mean": over_tokens(seats_GS.float()),
        "seats_max": over_groups((seats_GS * valid_GS).amax(1)),
        "gate_entropy_nats": over_tokens(-(gates_GSE * gates_GSE.clamp(min=1e-30).log()).sum(-1)),
        "flip_frac": over_groups(flip_G),
        "transport_residual": over_groups(residual_G),
        "slot_similarity": over_groups(slot_similarity_G),
    }
    return {name: value.float() for name, value in stats.items()}
