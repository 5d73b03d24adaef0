"""The images that one worker reads, and how some of them become arrays: the same wherever they are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Literal

import numpy as np

from orchestrator.config import DataConfig, RunConfig
from orchestrator.data import augment
from orchestrator.data.batch import Batch, DecodeError, PartialBatch, SampleLocation, sample_id
from orchestrator.data.images import BadImage, Transform
from orchestrator.data.manifest import open_manifest
from orchestrator.data.plan import Ints, Plan
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError

Split = Literal["train", "val"]
MAX_CONSECUTIVE_BAD = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The part of every global batch that one worker reads: slots `rank * share` to `(rank + 1) * share`.

    With a plan, for training, a slot whose image cannot be decoded takes the next sample of its lane that can
    be; that sample then comes twice, and no later slot moves. Without a plan, the split is read once in the
    order of its shards, and such a slot stays empty.
    """

    run: RunConfig
    split: Split
    rank: int
    workers: int
    data: DataSet
    plan: Plan | None
    transform: Transform

    def share(self) -> int:
        """Images of a batch for this worker."""
        return self.run.data.batch_size // self.workers

    def epoch(self) -> int:
        """Images of the split."""
        return self.data.manifest.rows(self.split)

    def steps(self) -> range:
        """The steps that read the split once; empty slots fill the last global batch."""
        return range(-(-self.epoch() // self.run.data.batch_size))

    def read(self, step: int, slots: range) -> PartialBatch:
        """Reads some slots of this worker's share of `step`.

        Raises:
            UsageError: for a shard that differs from the manifest, and for too many bad images in a row.
        """
        n, size, config = len(slots), self.transform.size, self.run.data
        first = step * config.batch_size + self.rank * self.share() + slots.start
        key = np.arange(first, first + n)
        image, label = np.zeros((n, size, size, 3), np.uint8), np.zeros(n, np.int64)
        valid, sample = np.zeros(n, np.float32), np.zeros(n, np.int64)
        bad: list[DecodeError] = []
        names = [""] * n
        for i, locations in enumerate(self._training(step, slots) if self.plan else self._in_order(key)):
            for attempt, (epoch, shard, row) in enumerate(locations, start=1):
                rows = self.data.open(self.split, shard)
                names[i] = f"{self.run.train.seed}/{epoch}/{rows.keys[row]}"
                try:
                    pixels = self.transform(rows.image(row), names[i])
                except BadImage as error:
                    bad.append(DecodeError(rows.location, row, rows.keys[row], str(error)))
                    if attempt > MAX_CONSECUTIVE_BAD:
                        raise UsageError(f"{attempt} images in a row cannot be decoded: {bad[-1]}") from None
                    continue
                image[i] = pixels.permute(1, 2, 0).numpy()
                label[i], valid[i], sample[i] = rows.labels[row], 1, sample_id(rows.keys[row])
                break
        mixup, cutmix = (config.mixup, config.cutmix) if self.plan else (0, 0)
        mix = augment.draw(names, mixup=mixup, cutmix=cutmix, size=size)
        return PartialBatch(image, label, valid, key, sample, mix, bad)

    def _training(self, step: int, slots: range) -> Iterator[Iterator[SampleLocation]]:
        """For each slot, its sample and then those that may replace it."""
        plan = self.plan
        assert plan
        lanes = plan.lanes // self.workers
        lane, index = plan.slots(step, range(self.rank * lanes, (self.rank + 1) * lanes))
        lane, index = lane[slots.start : slots.stop], index[slots.start : slots.stop]

        def candidates(first: SampleLocation, lane: int, index: int) -> Iterator[SampleLocation]:
            yield first
            for following in count(index + 1):
                yield SampleLocation(*map(int, plan.locate(np.array(lane), np.array(following))))

        for *first, lane_of, index_of in zip(*plan.locate(lane, index), lane, index, strict=True):
            yield candidates(SampleLocation(*map(int, first)), lane_of, index_of)

    def _in_order(self, positions: Ints) -> Iterator[Iterator[SampleLocation]]:
        starts = np.cumsum([0, *(shard.rows for shard in self.data.manifest.splits[self.split])])
        for position in positions[positions < starts[-1]]:
            shard = int(np.searchsorted(starts, position, side="right")) - 1
            yield iter([SampleLocation(0, shard, int(position - starts[shard]))])


Reader = Callable[[Stream, range], Iterator[Batch]]  # the stream's batches of some steps, in order


@lru_cache(maxsize=64)  # one process decodes for many workers
def open_stream(run: RunConfig, split: Split, rank: int, workers: int) -> Stream:
    """The training images in the order of the plan, or the validation images once. Raises as `in_order`."""
    stream, config = in_order(run, split, rank, workers), run.data
    if split == "val":
        return stream
    transform = Transform(
        size=run.model.image_size,
        augment=config.augment,
        randaugment=config.randaugment,
        randaugment_magnitude=config.randaugment_magnitude,
        eval_crop=config.eval_crop,
    )
    return replace(stream, plan=_plan(config, run.train.seed), transform=transform)


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
