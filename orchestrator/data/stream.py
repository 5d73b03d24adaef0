"""What one worker reads, and how a part of it becomes arrays: the same wherever it is read."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.config import DataConfig, RunConfig
from orchestrator.data import mixing
from orchestrator.data.decode import BadImage
from orchestrator.data.manifest import open_manifest
from orchestrator.data.plan import Ints, Plan
from orchestrator.data.shards import DataSet
from orchestrator.data.transforms import Transform
from orchestrator.errors import UsageError

Split = Literal["train", "val"]
MOST_BAD_IN_A_ROW = 1000


class Bad(NamedTuple):
    """An image that cannot be decoded."""

    shard: str
    row: int
    key: str
    reason: str


class Batch(NamedTuple):
    """Attributes:
    image: (B, 3, H, W) uint8, channels last in memory.
    label: (B,) int64.
    valid: (B,) float32, 0 for what evaluation leaves out: padding, and images that cannot be decoded.
    key: (B,) int64, the image's place in the run (or in the validation set), the same for every number of
        workers: what its router noise depends on.
    sample: (B,) int64, the `sample_id` of what is there.
    mix: (B, 5) float32, how the image is mixed with its neighbour; see `mixing`.
    bad: what could not be decoded while this was read.
    """

    image: Tensor
    label: Tensor
    valid: Tensor
    key: Tensor
    sample: Tensor
    mix: Tensor
    bad: tuple[Bad, ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """With every tensor replaced."""
        return Batch(*map(function, self[:-1]), bad=self.bad)


class Piece(NamedTuple):
    """Some slots of a worker's share: a Batch of n images as arrays, image (n, H, W, 3)."""

    image: NDArray[np.uint8]
    label: Ints
    valid: NDArray[np.float32]
    key: Ints
    sample: Ints
    mix: NDArray[np.float32]
    bad: list[Bad]


class Place(NamedTuple):
    epoch: int
    shard: int
    row: int


Reader = Callable[["Stream", range], Iterator[Batch]]  # the stream's batches of some steps, in order


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The part of every global batch that one worker reads: slots `rank * share` .. `(rank + 1) * share`.

    A slot of training whose image cannot be decoded takes the next sample of its lane that can, which then
    comes twice: nothing that follows moves. Without a plan it is left empty.

    Attributes:
    plan: of training; None: the split once, in the order of its shards.
    """

    run: RunConfig
    split: Split
    rank: int
    workers: int
    data: DataSet
    plan: Plan | None
    transform: Transform

    def share(self) -> int:
        return self.run.data.batch_size // self.workers

    def epoch(self) -> int:
        """Images of the split."""
        return self.data.manifest.rows(self.split)

    def steps(self) -> range:
        """Of the split once: the last global batch is filled up with empty slots."""
        return range(-(-self.epoch() // self.run.data.batch_size))

    def read(self, step: int, slots: range) -> Piece:
        """Some slots of this worker's share of `step`.

        Raises:
            UsageError: for a shard that is not what the manifest describes, and for no end of bad images.
        """
        n, size, config = len(slots), self.transform.size, self.run.data
        first = step * config.batch_size + self.rank * self.share() + slots.start
        key = np.arange(first, first + n)
        image, label = np.zeros((n, size, size, 3), np.uint8), np.zeros(n, np.int64)
        valid, sample = np.zeros(n, np.float32), np.zeros(n, np.int64)
        bad: list[Bad] = []
        names = [""] * n
        for i, places in enumerate(self._training(step, slots) if self.plan else self._in_order(key)):
            for tried, place in enumerate(places, start=1):
                rows = self.data.open(self.split, place.shard)
                names[i] = f"{self.run.train.seed}/{place.epoch}/{rows.keys[place.row]}"
                try:
                    pixels = self.transform(rows.image(place.row), names[i])
                except BadImage as error:
                    bad.append(Bad(rows.location, place.row, rows.keys[place.row], str(error)))
                    if tried > MOST_BAD_IN_A_ROW:
                        raise UsageError(f"{tried} images in a row cannot be decoded: {bad[-1]}") from None
                    continue
                image[i] = pixels.permute(1, 2, 0).numpy()
                label[i], valid[i], sample[i] = rows.labels[place.row], 1, sample_id(rows.keys[place.row])
                break
        mixup, cutmix = (config.mixup, config.cutmix) if self.plan else (0, 0)
        mix = mixing.draw(names, mixup=mixup, cutmix=cutmix, size=size)
        return Piece(image, label, valid, key, sample, mix, bad)

    def _training(self, step: int, slots: range) -> Iterator[Iterator[Place]]:
        """For each slot its place, and those that may stand in for it."""
        plan = self.plan
        assert plan
        lanes = plan.lanes // self.workers
        lane, index = plan.slots(step, range(self.rank * lanes, (self.rank + 1) * lanes))
        lane, index = lane[slots.start : slots.stop], index[slots.start : slots.stop]

        def places(first: Place, lane: int, index: int) -> Iterator[Place]:
            yield first
            for following in count(index + 1):
                yield Place(*map(int, plan.locate(np.array(lane), np.array(following))))

        for *first, lane_of, index_of in zip(*plan.locate(lane, index), lane, index, strict=True):
            yield places(Place(*map(int, first)), lane_of, index_of)

    def _in_order(self, positions: Ints) -> Iterator[Iterator[Place]]:
        starts = np.cumsum([0, *(shard.rows for shard in self.data.manifest.splits[self.split])])
        for position in positions[positions < starts[-1]]:
            shard = int(np.searchsorted(starts, position, side="right")) - 1
            yield iter([Place(0, shard, int(position - starts[shard]))])


@lru_cache(maxsize=64)  # a process decodes for many workers
def open_stream(run: RunConfig, split: Split, rank: int, workers: int) -> Stream:
    """Raises UsageError if there is no data set."""
    config = run.data
    transform = Transform(
        size=run.model.image_size,
        augment=config.augment,
        randaugment=config.randaugment,
        randaugment_magnitude=config.randaugment_magnitude,
        eval_crop=config.eval_crop,
    )
    if split == "val":
        return in_order(run, split, rank, workers)
    return Stream(
        run=run,
        split=split,
        rank=rank,
        workers=workers,
        data=_data_set(config),
        plan=_plan(config, run.train.seed),
        transform=transform,
    )


def in_order(run: RunConfig, split: Split, rank: int = 0, workers: int = 1) -> Stream:
    """Every image of a split once, without augmentation. Raises UsageError if there is no data set."""
    return Stream(
        run=run,
        split=split,
        rank=rank,
        workers=workers,
        data=_data_set(run.data),
        plan=None,
        transform=Transform(size=run.model.image_size, eval_crop=run.data.eval_crop),
    )


@lru_cache(maxsize=4)
def _data_set(config: DataConfig) -> DataSet:
    return DataSet(
        path=config.path, manifest=open_manifest(config.path), cache_bytes=int(config.cache_gb * 1e9)
    )


@lru_cache(maxsize=4)
def _plan(config: DataConfig, seed: int) -> Plan:
    return Plan(
        rows=tuple(shard.rows for shard in _data_set(config).manifest.splits["train"]),
        seed=seed,
        lanes=config.lane_count(),
        batch_size=config.batch_size,
        shuffle_window=config.shuffle_window,
        tail=config.tail,
    )


def sample_id(key: str) -> int:
    """63 bits of the key's SHA-256: what was trained on, for those who compare."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def to_batch(pieces: Sequence[Piece]) -> Batch:
    """One after the other."""
    *arrays, bad = zip(*pieces, strict=True)
    image, *others = (torch.from_numpy(np.concatenate(parts)) for parts in arrays)
    return Batch(image.permute(0, 3, 1, 2), *others, bad=tuple(one for some in bad for one in some))
