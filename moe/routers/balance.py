"""Load balancing: a bias in the choice that follows the load of experts without a gradient, or a loss.

Sources: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
https://arxiv.org/abs/2408.15664, centred as in torchtitan; quantile balancing as in Megatron-Core, by counts
in bins; Qiu et al. 2025, "Demons in the Detail", https://arxiv.org/abs/2501.11873, for the levels of the
loss.

Both follow integer counts of a whole batch, so they are the same to the bit however it is split.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.config import Family, Fraction, NonNegativeFloat, PositiveInt

Level = Literal["group", "pass", "batch"]


@dataclass(frozen=True, kw_only=True)
class BalanceConfig(Family, ABC, default="none"):
    """The rule of the bias that is added to the scores by which tokens choose, and to nothing else.

    Attributes:
        unit_scores: whether scores must lie in 0..1.
    """

    unit_scores: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """The number of integers that it counts for each expert; 0: there is no bias."""
        return 0

    @abstractmethod
    def count(self, scores_GSE: Tensor, bias_E: Tensor, chosen_GSE: Tensor, valid_GS: Tensor) -> Tensor:
        """Returns what is counted in a pass, (rows, E), int64. `chosen_GSE`: 1 for each choice of a valid
        token.
        """

    @abstractmethod
    def next_bias(self, bias_E: Tensor, counts_RE: Tensor, k: int) -> Tensor:
        """Returns the bias for the next batch from the counts of this one."""


@dataclass(frozen=True, kw_only=True)
class NoBalanceConfig(BalanceConfig):
    """No bias: nothing is counted, and nothing changes."""

    kind: Literal["none"] = "none"

    def count(self, scores_GSE: Tensor, bias_E: Tensor, chosen_GSE: Tensor, valid_GS: Tensor) -> Tensor:
        return chosen_GSE.new_zeros(0, chosen_GSE.shape[-1], dtype=torch.int64)

    def next_bias(self, bias_E: Tensor, counts_RE: Tensor, k: int) -> Tensor:
        return bias_E


@dataclass(frozen=True, kw_only=True)
class SignConfig(BalanceConfig):
    """Loss-free balancing: the bias of an expert with less than the mean load rises, with more it falls.

    Attributes:
        rate: by how much; 0 keeps the bias. Scores lie between 0 and 1, so 0.001 takes many updates.
        centre: take the mean off the changes, so that biases do not all grow.
    """

    kind: Literal["sign"] = "sign"
    rate: NonNegativeFloat = 1e-3
    centre: bool = True

    @property
    def rows(self) -> int:
        return 1

    def count(self, scores_GSE: Tensor, bias_E: Tensor, chosen_GSE: Tensor, valid_GS: Tensor) -> Tensor:
        return chosen_GSE.long().sum((0, 1)).unsqueeze(0)

    def next_bias(self, bias_E: Tensor, counts_RE: Tensor, k: int) -> Tensor:
        # The sign of mean - count, in integers.
        change_E = self.rate * (counts_RE.sum() - counts_RE.shape[1] * counts_RE[0]).sign().to(bias_E)
        return bias_E + (change_E - change_E.mean() if self.centre else change_E)


@dataclass(frozen=True, kw_only=True)
class QuantileConfig(BalanceConfig):
    """Quantile balancing: the bias with which k/E of the batch's tokens would have entered each expert.

    A token's cutoff is its (k+1)-th biased score, and cutoff - score the bias that an expert would need.

    Attributes:
        ema: the part of the old bias in the next one; 1 keeps it.
        bins: in which the needed biases are counted.
    """

    kind: Literal["quantile"] = "quantile"
    ema: Fraction = 0.0
    bins: PositiveInt = 1000

    unit_scores: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        return self.bins

    def count(self, scores_GSE: Tensor, bias_E: Tensor, chosen_GSE: Tensor, valid_GS: Tensor) -> Tensor:
        # The cutoff is the largest biased score that is left without the choices.
        left_GSE = (scores_GSE + bias_E).masked_fill(chosen_GSE.bool(), -torch.inf)
        need_GSE = left_GSE.amax(-1, keepdim=True) - scores_GSE
        low, width = self._bins(bias_E)
        bin_GSE = ((need_GSE - low) / width).nan_to_num(0.0).clamp(0, self.bins - 1).long()
        valid_GSE = valid_GS.long().unsqueeze(-1).expand_as(bin_GSE)
        counts_RE = bin_GSE.new_zeros(self.bins, scores_GSE.shape[-1])
        return counts_RE.scatter_add(0, bin_GSE.flatten(0, 1), valid_GSE.flatten(0, 1))

    def next_bias(self, bias_E: Tensor, counts_RE: Tensor, k: int) -> Tensor:
        E = len(bias_E)
        tokens, (_, width) = counts_RE[:, 0].sum(), self._bins(bias_E)
        # From where the bins begin, which the mean takes off.
        needed_E = width * quantile_bin(counts_RE, self.rank(tokens, k / E))
        mixed_E = self.ema * bias_E + (1 - self.ema) * needed_E.to(bias_E)
        return torch.where((tokens > 0) & (k < E), mixed_E - mixed_E.mean(), bias_E)

    def rank(self, tokens: Tensor, share: float) -> Tensor:
        """Returns how many tokens need less than the next bias."""
        return tokens * share

    def _bins(self, bias_E: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where the bins begin, and their width; scores in 0..1 need no bias outside of them."""
        low, high = bias_E.min() - 1, bias_E.max() + 1
        return low, (high - low) / self.bins


def quantile_bin(counts_RE: Tensor, rank: Tensor) -> Tensor:
    """Returns the bin of the number of that rank (from 0) of each column; between two ranks, of both in
    proportion.
    """
    until_ER = counts_RE.cumsum(0).T.contiguous()
    below = rank.floor()
    ranks_E2 = torch.stack([below, below + 1]).to(until_ER.dtype).expand(len(until_ER), 2).contiguous()
    last_E1 = until_ER[:, -1:] - 1
    bins_E2 = torch.searchsorted(until_ER, torch.minimum(ranks_E2, last_E1), right=True)
    first_E, second_E = bins_E2.to(rank.dtype).clamp(max=len(counts_RE) - 1).unbind(-1)
    return first_E + (rank - below) * (second_E - first_E)


def frequency(chosen_GSE: Tensor, level: Level) -> Tensor:
    """Returns the share of all choices that go to each expert, in each group or in all of them: (G or 1, E).
    Without any choice it is 0.
    """
    counts_GE = chosen_GSE.detach().sum(1)
    if level != "group":
        counts_GE = counts_GE.sum(0, keepdim=True)
    return counts_GE / counts_GE.sum(-1, keepdim=True).clamp(min=1)


def frequency_loss(gates_GSE: Tensor, share_GE: Tensor, valid_GS: Tensor, level: Level) -> Tensor:
    """Returns E * sum_e (share of choices of e) * (mean gate of e), (G,): 1 at perfect balance, 0 without
    valid tokens. Only the gates have a gradient.

    The shares and the mean are those of each group, or with level ``pass`` of all groups, whose losses are
    then equal; with ``batch`` shares are of a batch, and means of each group.
    """
    valid_GS1 = valid_GS.to(gates_GSE.dtype).unsqueeze(-1)
    sum_GE, tokens_G1 = (gates_GSE * valid_GS1).sum(1), valid_GS1.sum(1)
    if level == "pass":
        sum_GE, tokens_G1 = sum_GE.sum(0, keepdim=True), tokens_G1.sum(0, keepdim=True)
    loss_G = gates_GSE.shape[-1] * (share_GE * sum_GE / tokens_G1.clamp(min=1)).sum(-1)
    return loss_G.expand(gates_GSE.shape[0])
