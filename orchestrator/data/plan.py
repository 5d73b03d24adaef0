"""Which sample is at which position of training: a pure function of integers, the same for any world size.

Positions count samples from the start of training: step s of batch size B covers s*B .. (s+1)*B, over epoch
borders without a gap, and every sample comes once per epoch. In an epoch the shards are permuted, cut into
windows of `shuffle_shards`, and the rows of a window are permuted together; so a reader needs one window in
memory, and nothing here is proportional to the data set but the list of its shards.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Attributes:
    rows: rows per shard.
    seed: of all permutations.
    shuffle_shards: shards per window.
    """

    rows: tuple[int, ...]
    seed: int
    shuffle_shards: int

    def locate(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """(N,) positions, ascending -> (epoch, shard, row), each (N,)."""
        epochs, offsets = np.divmod(positions, sum(self.rows))
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs):
            starts = _window_starts(self, int(epoch))
            windows = np.where(epochs == epoch, np.searchsorted(starts, offsets, side="right") - 1, -1)
            for window in np.unique(windows[windows >= 0]):
                here = windows == window
                window_shard, window_row = _window(self, int(epoch), int(window))
                within = offsets[here] - starts[window]
                shards[here], rows[here] = window_shard[within], window_row[within]
        return epochs, shards, rows


def _shard_order(plan: Plan, epoch: int) -> Ints:
    return np.random.default_rng((plan.seed, epoch)).permutation(len(plan.rows))


@lru_cache(maxsize=4)
def _window_starts(plan: Plan, epoch: int) -> Ints:
    """First offset of each window of the epoch, (windows,)."""
    ends = np.cumsum(np.asarray(plan.rows)[_shard_order(plan, epoch)])
    return np.concatenate([[0], ends[plan.shuffle_shards - 1 : -1 : plan.shuffle_shards]])


@lru_cache(maxsize=4)
def _window(plan: Plan, epoch: int, window: int) -> tuple[Ints, Ints]:
    """(shard, row) of every offset of the window, in the order in which they are read."""
    first = window * plan.shuffle_shards
    shards = _shard_order(plan, epoch)[first : first + plan.shuffle_shards]
    counts = np.asarray(plan.rows)[shards]
    shard = np.repeat(shards, counts)
    row = np.concatenate([np.arange(count) for count in counts])
    # + 1, because numpy takes (seed, epoch, 0) for (seed, epoch): the generator of the shards' order
    order = np.random.default_rng((plan.seed, epoch, window + 1)).permutation(len(shard))
    return shard[order], row[order]
