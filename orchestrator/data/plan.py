"""The order of samples in training: a function of integers, the same for any number of workers.

Step s takes `batch_size / lanes` samples from each lane, lane 0 first. A lane is a part of the data set that
is read independently: with L lanes and M samples in an epoch, the samples of training, counted from its
start, are dealt to the lanes in turn (the v-th sample to lane v mod L), so that every lane knows how many
samples it has in each epoch. In an epoch the shards are permuted and laid end to end; that line is cut into
one segment per lane, and the samples of a segment are permuted within windows, in runs of neighbours. Every
sample comes once per epoch.

With r repeats, the v-th image of training is view v mod r of sample v // r of this order: views of a sample
lie in neighbouring lanes, and so in one batch (Hoffer et al. 2020, https://arxiv.org/abs/1901.09335, as in
DeiT). As many images as an epoch has then come from a part of the samples; r such parts are all of them.

Memory does not grow with the number of samples: the order of an epoch's shards is an array, everything else
is arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Places(NamedTuple):
    """The locations of samples, as arrays of one shape. `row` counts within the shard, `view` the repeats."""

    epoch: Ints
    shard: Ints
    row: Ints
    view: Ints


@dataclass(frozen=True, kw_only=True, eq=False)  # hashed by identity: `rows` may be long
class Plan:
    """The order of training for a data set.

    rows: (shards,) rows of each shard.
    seed: the seed of all permutations.
    lanes: divides `batch_size`.
    shuffle_window: number of neighbouring samples of a lane that are permuted with each other.
    shuffle_run: number of neighbouring samples that stay together, so that one request can fetch them.
    tail: ``wrap``: batches cross the ends of epochs. ``drop``: an epoch is whole batches; the samples of an
        incomplete batch are left out, other samples in each epoch.
    repeats: views of each sample, one after another.
    """

    rows: Sequence[int] | Ints
    seed: int
    lanes: int
    batch_size: int
    shuffle_window: int
    shuffle_run: int = 1
    tail: Literal["wrap", "drop"] = "wrap"
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.batch_size % self.lanes:
            raise ValueError(f"lanes={self.lanes} does not divide batch_size={self.batch_size}")
        if not self.epoch_size:
            raise ValueError(
                f"{np.sum(self.rows)} samples do not fill a batch of {self.batch_size}, and tail='drop' drops"
                " them: use a smaller batch or tail='wrap'"
            )

    @cached_property
    def epoch_size(self) -> int:
        """The number of samples that an epoch trains on."""
        samples = int(np.sum(self.rows, dtype=np.int64))
        return samples - samples % self.batch_size if self.tail == "drop" else samples

    def slots(self, step: int, lanes: range) -> tuple[Ints, Ints]:
        """(lane, index within the lane) of the samples that `lanes` contribute to a step, each (images,)."""
        per_lane = self.batch_size // self.lanes
        index = step * per_lane + np.arange(per_lane)
        return np.repeat(np.array(lanes), per_lane), np.tile(index, len(lanes))

    def sample_and_view(self, lane: Ints, index: Ints) -> tuple[Ints, Ints]:
        """Returns the number of a sample in the order without repeats, and which view of it comes."""
        return np.divmod(index * self.lanes + lane, self.repeats)

    def locate(self, lane: Ints, index: Ints) -> Places:
        """Locates image `index` of `lane`, counted from the start of training; arrays of one shape."""
        size, (sample, view) = self.epoch_size, self.sample_and_view(lane, index)
        epoch, index, lane = sample // size, *divmod(sample, self.lanes)
        within = index - _before(self, lane, epoch)
        window = within // self.shuffle_window
        places = Places(epoch, np.empty_like(index), np.empty_like(index), view)
        groups = np.stack([epoch, lane, window], -1).reshape(-1, 3)
        for group in np.unique(groups, axis=0):
            here = (groups == group).all(-1).reshape(index.shape)
            shard, row = _window(self, *map(int, group))
            places.shard[here] = shard[within[here] % self.shuffle_window]
            places.row[here] = row[within[here] % self.shuffle_window]
        return places


def _before(plan: Plan, lane: Ints, epoch: Ints) -> Ints:
    """The number of samples of `lane` before `epoch`: all v < epoch * size with v mod lanes = lane."""
    return (epoch * plan.epoch_size + plan.lanes - 1 - lane) // plan.lanes


def _segment(plan: Plan, epoch: int, lane: int) -> tuple[int, int]:
    """The first and last (exclusive) position of the lane's segment on the epoch's line of samples."""

    def of_lanes_below(lane: int, samples: int) -> int:
        return samples // plan.lanes * lane + min(samples % plan.lanes, lane)

    def first(lane: int) -> int:
        size = plan.epoch_size
        return of_lanes_below(lane, (epoch + 1) * size) - of_lanes_below(lane, epoch * size)

    return first(lane), first(lane + 1)


@lru_cache(maxsize=4)
def _line(plan: Plan, epoch: int) -> tuple[Ints, Ints]:
    """The epoch's shards in order, and the position on the line at which each begins."""
    order = np.random.default_rng((plan.seed, epoch)).permutation(len(plan.rows))
    return order, np.concatenate([[0], np.cumsum(np.asarray(plan.rows)[order])])


@lru_cache(maxsize=4096)
def _window(plan: Plan, epoch: int, lane: int, window: int) -> tuple[Ints, Ints]:
    """(shard, row) of the window's samples in the order in which they are read."""
    first, last = _segment(plan, epoch, lane)
    start = first + window * plan.shuffle_window
    size = min(plan.shuffle_window, last - start)
    # + 1, because numpy takes (seed, epoch, 0) for (seed, epoch), the generator of the shards' order.
    rng = np.random.default_rng((plan.seed, epoch, lane + 1, window + 1))
    runs = rng.permutation(-(-size // plan.shuffle_run))
    within = (runs[:, None] * plan.shuffle_run + np.arange(plan.shuffle_run)).ravel()
    places = start + within[within < size]
    order, begins = _line(plan, epoch)
    at = np.searchsorted(begins, places, side="right") - 1
    return order[at], places - begins[at]
