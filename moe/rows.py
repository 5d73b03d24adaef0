"""Dropless routing: no slots, but a row for each choice of a token, sorted by expert.

Source: Gale et al. 2022, "MegaBlocks", https://arxiv.org/abs/2211.15841; the order of rows is torchtitan's.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe.init import split
from moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class RowsRouting(Routing):
    """A routing whose experts have rows of any number, `count_E`:

        x_GSD --dispatch--> x_MD --experts--> y_MD --combine--> y_GSD

    M = G*S*K whatever the choices. The choices of padding, and of experts that are left out, are rows of
    zeros, after the rows of all experts.

    Attributes:
        expert_GSK: the experts that each token chooses.
        weight_GSK: weights of their outputs; 0 for a choice that no expert computes.
        order_M: the choice of each row, of G*S*K in the order of tokens and of their choices.
    """

    expert_GSK: Tensor
    weight_GSK: Tensor
    order_M: Tensor

    def only(self, expert_GK: Tensor) -> Self:
        """Returns itself: experts that are left out have no rows."""
        return self

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        """Sorts a copy of each token for each of its choices: (G, S, D) -> (M, D)."""
        assert self.count_E is not None
        x_padded = torch.cat([x_GSD.flatten(0, 1), x_GSD.new_zeros(1, x_GSD.shape[-1])])
        row_M = torch.arange(len(self.order_M), device=self.order_M.device)
        token_M = torch.where(
            row_M < self.count_E.sum(), self.order_M // self.expert_GSK.shape[-1], len(x_padded) - 1
        )
        return x_padded.index_select(0, token_M)

    def combine(self, y_END: Tensor) -> Tensor:
        """Adds the outputs of each token's choices: (M, D) -> (G, S, D)."""
        row_M = torch.empty_like(self.order_M).scatter(
            0, self.order_M, torch.arange(len(self.order_M), device=self.order_M.device)
        )
        G, S, K = self.expert_GSK.shape
        weight_T1K = self.weight_GSK.reshape(G * S, 1, K).to(y_END.dtype)
        return torch.bmm(weight_T1K, y_END.index_select(0, row_M).view(G * S, K, -1)).view(G, S, -1)

    def keys(self, keys_GS: Tensor, x_END: Tensor) -> Tensor:
        return split(keys_GS, self.expert_GSK.shape[-1]).flatten()[self.order_M]


def sort_by_expert(expert_GSK: Tensor, computed_GSK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns order_M and count_E of a `RowsRouting`; choices that are not computed come last."""
    expert_M = torch.where(computed_GSK, expert_GSK, num_experts).flatten()
    count_E = expert_M.new_zeros(num_experts + 1).scatter_add(0, expert_M, torch.ones_like(expert_M))
    return expert_M.argsort(stable=True), count_E[:-1]


def has_values(tensor: Tensor) -> bool:
    """Returns whether a tensor is more than a shape, as it is not in estimates of costs."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def sizes_of(counts: Tensor, rows: int) -> list[int]:
    """Returns counts as numbers, for which the host waits; without values they are equal parts of `rows`."""
    if has_values(counts):
        return counts.tolist()
    return [(rows + i) // len(counts) for i in range(len(counts))]
