"""How alike the slots of soft routers are, and what each of them sees.

Source: Soft MoE (Puigcerver et al. 2023), section 6 and appendices G and I: the slots of one expert align.
As in the authors' code: cosines of slots' dispatch weights, of slot parameters, of tokens' combine weights;
least, mean and largest without the diagonal.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.routers.soft import SoftRouter
from moe.routing import SoftRouting


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of the cosines between different vectors; NaN if there is only one."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True, kw_only=True)
class SlotSums:
    """Sums over groups; N slots, expert-major. Attributes:
    dispatch_NN: cosines between two slots' weights over the tokens.
    dispatch, combine: (3,): least, mean, largest cosine of slots' weights and of tokens' rows in each group.
    """

    groups: int
    dispatch_NN: Tensor
    dispatch: Tensor
    combine: Tensor

    def __add__(self, other: "SlotSums") -> "SlotSums":
        return SlotSums(
            groups=self.groups + other.groups,
            dispatch_NN=self.dispatch_NN + other.dispatch_NN,
            dispatch=self.dispatch + other.dispatch,
            combine=self.combine + other.combine,
        )

    def cpu(self) -> "SlotSums":
        return replace(
            self,
            dispatch_NN=self.dispatch_NN.cpu(),
            dispatch=self.dispatch.cpu(),
            combine=self.combine.cpu(),
        )

    def mean_NN(self) -> Tensor:
        return self.dispatch_NN / self.groups

    def spreads(self) -> dict[str, Spread]:
        """Means over groups."""
        return {
            name: Spread(**dict(zip(("least", "mean", "most"), (sums / self.groups).tolist(), strict=True)))
            for name, sums in (("dispatch", self.dispatch), ("combine", self.combine))
        }


def slot_sums(routing: SoftRouting, valid_GS: Tensor) -> SlotSums | None:
    """Group by group, as N x N of all of them may not fit; None if all groups are padding."""
    total = None
    for dispatch_SEC, combine_SEC, valid_S in zip(
        routing.dispatch_GSEC, routing.combine_GSEC, valid_GS.bool(), strict=True
    ):
        if not valid_S.any():
            continue
        dispatch_NN = cosines(dispatch_SEC[valid_S].flatten(1).T)
        part = SlotSums(
            groups=1,
            dispatch_NN=dispatch_NN,
            dispatch=off_diagonal(dispatch_NN),
            combine=off_diagonal(cosines(combine_SEC[valid_S].flatten(1))),
        )
        total = part if total is None else total + part
    return total


def parameter_cosines(router: nn.Module) -> Tensor | None:
    """(N, N) between the slots' parameters, the columns of Phi; None for a router that has none."""
    if not isinstance(router, SoftRouter) or not router.config.learned():
        return None
    return cosines(router.phi_DEC.detach().flatten(1).T)


def cosines(vectors_ND: Tensor) -> Tensor:
    """(N, N); 0 with a vector of zeros."""
    unit_ND = F.normalize(vectors_ND.double(), dim=1)
    return unit_ND @ unit_ND.T


def off_diagonal(similarity_NN: Tensor) -> Tensor:
    """(3,): least, mean, largest of two different vectors."""
    N = len(similarity_NN)
    pairs = similarity_NN[~torch.eye(N, dtype=torch.bool, device=similarity_NN.device)]
    return (
        torch.stack([pairs.amin(), pairs.mean(), pairs.amax()]) if N > 1 else pairs.new_full((3,), torch.nan)
    )


def spread(similarity_NN: Tensor) -> Spread:
    return Spread(**dict(zip(("least", "mean", "most"), off_diagonal(similarity_NN).tolist(), strict=True)))
