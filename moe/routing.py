"""What a router decides: which tokens enter which expert slot, and how outputs are mixed back.

A `Routing` turns tokens into a static, expert-major buffer of slots and back again:

    x_GSD --dispatch--> x_END --experts--> y_END --combine--> y_GSD

Dimensions used in `moe/`:
    B images   G groups routed on their own   S tokens per group   D model width   F hidden width   H heads
    E experts   C slots per expert and group   K experts per token   N = G*C slots per expert   R ranks

Source: one formula for all routers, Liu et al. 2024, "Routers in Vision MoE", eq. 2 and 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Routing(Protocol):
    """The contract between routers and the MoE layer. All shapes are static in G, S, E, C."""

    @property
    def aux_G(self) -> Tensor:
        """Auxiliary loss of each group, weighted by the router's config; zeros where there is none."""
        ...

    @property
    def stats(self) -> Mapping[str, Tensor]:
        """Detached scalars to log; the keys of `routing_stats`, the same for every router."""
        ...

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        """(G, S, D) -> (E, G*C, D)."""
        ...

    def combine(self, y_END: Tensor) -> Tensor:
        """(E, G*C, D) -> (G, S, D)."""
        ...


@dataclass(frozen=True, kw_only=True)
class GatherRouting:
    """Every slot holds at most one whole token (token choice, expert choice).

    Attributes:
        token_GEC: index of the token in the slot; ``S`` marks an empty slot.
        weight_GEC: weight of the slot's output in its token's sum; 0 for empty slots.
        num_tokens: S.
    """

    token_GEC: Tensor
    weight_GEC: Tensor
    num_tokens: int
    aux_G: Tensor
    stats: Mapping[str, Tensor]

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        x_padded = F.pad(x_GSD, (0, 0, 0, 1))  # row S is the zero token of empty slots
        x_slots = x_padded.gather(1, self._index(x_GSD.shape[-1]))  # (G, E*C, D)
        return x_slots.unflatten(1, self.token_GEC.shape[1:]).transpose(0, 1).flatten(1, 2)

    def combine(self, y_END: Tensor) -> Tensor:
        G, _, C = self.token_GEC.shape
        y_slots = y_END.unflatten(1, (G, C)).transpose(0, 1).flatten(1, 2)  # (G, E*C, D)
        weighted = y_slots * self.weight_GEC.flatten(1).unsqueeze(-1).to(y_slots.dtype)
        out = weighted.new_zeros(G, self.num_tokens + 1, y_END.shape[-1])
        return out.scatter_add(1, self._index(y_END.shape[-1]), weighted)[:, : self.num_tokens]

    def _index(self, width: int) -> Tensor:
        return self.token_GEC.flatten(1).unsqueeze(-1).expand(-1, -1, width)


@dataclass(frozen=True, kw_only=True)
class SoftRouting:
    """Every slot is a convex mix of all tokens, every token a convex mix of all slots.

    Attributes:
        dispatch_GSEC: sums to 1 over S.
        combine_GSEC: sums to 1 over (E, C).
    """

    dispatch_GSEC: Tensor
    combine_GSEC: Tensor
    aux_G: Tensor
    stats: Mapping[str, Tensor]

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        return torch.einsum("gsec,gsd->egcd", self.dispatch_GSEC.to(x_GSD.dtype), x_GSD).flatten(1, 2)

    def combine(self, y_END: Tensor) -> Tensor:
        G, _, _, C = self.combine_GSEC.shape
        y_EGCD = y_END.unflatten(1, (G, C))
        return torch.einsum("gsec,egcd->gsd", self.combine_GSEC.to(y_END.dtype), y_EGCD)


def at_least_fp32(x: Tensor) -> Tensor:
    """Router maths runs in float32 under bf16 weights, and in float64 where the model does."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def routing_stats(
    gates_GSE: Tensor, load_GE: Tensor, seats_GS: Tensor, valid_GS: Tensor
) -> dict[str, Tensor]:
    """What every router reports, over the valid tokens of all groups; detached scalars.

    Args:
        gates_GSE: how much each token's combination gives to each expert, summing to 1 over E.
        load_GE: tokens (or slot mass) per expert.
        seats_GS: in how many slots each token sits.
        valid_GS: 1 for real tokens, 0 for padding.

    Returns:
        ``dropped_frac`` tokens that no expert sees; ``load_cv`` standard deviation over mean of the experts'
        load, averaged over groups with a valid token; ``gate_entropy_nats`` mean entropy of a token's gates.
    """
    gates_GSE, load_GE = gates_GSE.detach(), at_least_fp32(load_GE.detach())
    count = valid_GS.sum(dtype=torch.float32).clamp(min=1)  # a bf16 mask would round it
    filled_G = valid_GS.bool().any(1)
    entropy_GS = -torch.xlogy(gates_GSE, gates_GSE).sum(-1)
    dropped_GS = (seats_GS == 0).float()
    load_cv_G = load_GE.std(-1, correction=0) / load_GE.mean(-1).clamp(min=1e-9)
    return {
        "dropped_frac": (dropped_GS * valid_GS).sum() / count,
        "load_cv": (load_cv_G * filled_G).sum() / filled_G.sum().clamp(min=1),
        "gate_entropy_nats": (entropy_GS * valid_GS).sum() / count,
    }
