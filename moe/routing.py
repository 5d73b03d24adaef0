"""What a router decides: which tokens enter which expert slot, and how outputs are mixed back.

A `Routing` turns tokens into a static, expert-major buffer of slots and back again:

    x_GSD --dispatch--> x_END --experts--> y_END --combine--> y_GSD

Dimensions used in `moe/`:
    B images   G groups routed on their own   S tokens per group   D model width   F hidden width   H heads
    E experts   C slots per expert and group   K experts per token, or of a subset   N = G*C slots per expert
    M rows of any number per expert   R ranks

Source: one formula for all routers, Liu et al. 2024, "Routers in Vision MoE", eq. 2 and 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor


class Routing(Protocol):
    """The contract between routers and the MoE layer. All shapes are static in G, S, E, C."""

    @property
    def aux_G(self) -> Tensor:
        """Auxiliary loss of each group, weighted by the router's config; zeros where there is none."""
        ...

    @property
    def stats(self) -> Mapping[str, Tensor]:
        """Detached scalars to log: the keys of `moe.stats.routing_stats`, the same for every router."""
        ...

    @property
    def gates_GSE(self) -> Tensor:
        """How much each token's combination gives to each expert, before any dropping."""
        ...

    @property
    def load_GE(self) -> Tensor:
        """Tokens that want (soft: mass that goes to) each expert; detached."""
        ...

    @property
    def kept_GE(self) -> Tensor | None:
        """Booleans: experts whose outputs are combined; None if all are."""
        ...

    def only(self, expert_GK: Tensor) -> Self:
        """The same for K experts of each group: block k of what it dispatches and combines, (K, G*C, D),
        belongs to expert_GK[g, k] in the rows of group g.
        """
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
    """

    token_GEC: Tensor
    weight_GEC: Tensor
    gates_GSE: Tensor
    load_GE: Tensor
    aux_G: Tensor
    stats: Mapping[str, Tensor]
    kept_GE: Tensor | None = None

    def only(self, expert_GK: Tensor) -> Self:
        return replace(
            self,
            token_GEC=_of_experts(self.token_GEC, 1, expert_GK),
            weight_GEC=_of_experts(self.weight_GEC, 1, expert_GK),
        )

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        D = x_GSD.shape[-1]
        x_padded = torch.cat([x_GSD, x_GSD.new_zeros(len(x_GSD), 1, D)], 1)  # row S: the empty slots' token
        return x_padded.flatten(0, 1).index_select(0, self._rows_EN()).view(self.token_GEC.shape[1], -1, D)

    def combine(self, y_END: Tensor) -> Tensor:
        G, S, _ = self.gates_GSE.shape
        weight_EN = self.weight_GEC.transpose(0, 1).flatten(1).unsqueeze(-1)
        weighted = (y_END * weight_EN.to(y_END.dtype)).flatten(0, 1)
        out = weighted.new_zeros(G * (S + 1), y_END.shape[-1]).index_add(0, self._rows_EN(), weighted)
        return out.view(G, S + 1, -1)[:, :S]

    def _rows_EN(self) -> Tensor:
        """Slots' tokens as rows of the padded (G * (S + 1), D), expert-major; flat."""
        G, S, _ = self.gates_GSE.shape
        offset_G = torch.arange(G, device=self.token_GEC.device) * (S + 1)
        return (self.token_GEC + offset_G[:, None, None]).transpose(0, 1).flatten()


@dataclass(frozen=True, kw_only=True)
class SoftRouting:
    """Every slot is a mix of all tokens, every token a mix of all slots.

    Attributes:
        dispatch_GSEC: sums to 1 over S.
        combine_GSEC: sums to 1 over (E, C).
    """

    dispatch_GSEC: Tensor
    combine_GSEC: Tensor
    gates_GSE: Tensor
    load_GE: Tensor
    aux_G: Tensor
    stats: Mapping[str, Tensor]
    kept_GE: Tensor | None = None

    def only(self, expert_GK: Tensor) -> Self:
        return replace(
            self,
            dispatch_GSEC=_of_experts(self.dispatch_GSEC, 2, expert_GK),
            combine_GSEC=_of_experts(self.combine_GSEC, 2, expert_GK),
        )

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        return torch.einsum("gsec,gsd->egcd", self.dispatch_GSEC.to(x_GSD.dtype), x_GSD).flatten(1, 2)

    def combine(self, y_END: Tensor) -> Tensor:
        G, _, _, C = self.combine_GSEC.shape
        y_EGCD = y_END.unflatten(1, (G, C))
        return torch.einsum("gsec,egcd->gsd", self.combine_GSEC.to(y_END.dtype), y_EGCD)


@dataclass(frozen=True, kw_only=True)
class DenseRouting:
    """Every expert sees every token (C = S); only the mix of their outputs is routed.

    Attributes:
        weight_GSE: weight of each expert's output; sums to 1 over E, unless experts are left out.
    """

    weight_GSE: Tensor
    gates_GSE: Tensor
    load_GE: Tensor
    aux_G: Tensor
    stats: Mapping[str, Tensor]
    kept_GE: Tensor | None = None

    def only(self, expert_GK: Tensor) -> Self:
        return replace(self, weight_GSE=_of_experts(self.weight_GSE, 2, expert_GK))

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        return x_GSD.flatten(0, 1).expand(self.weight_GSE.shape[-1], -1, -1)

    def combine(self, y_END: Tensor) -> Tensor:
        G, S, _ = self.weight_GSE.shape
        y_EGSD = y_END.unflatten(1, (G, S))
        return torch.einsum("gse,egsd->gsd", self.weight_GSE.to(y_END.dtype), y_EGSD)


def _of_experts(x: Tensor, dim: int, expert_GK: Tensor) -> Tensor:
    """Each group's own K of the E along `dim`."""
    shape = [1] * x.ndim
    shape[0], shape[dim] = expert_GK.shape
    return x.take_along_dim(expert_GK.view(shape), dim)


def at_least_fp32(x: Tensor) -> Tensor:
    """Router maths runs in float32 under bf16 weights, and in float64 where the model does."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
