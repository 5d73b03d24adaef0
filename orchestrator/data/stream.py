"""The batches that one worker reads: which images, how they become arrays, and decoding them ahead.

`in_process` decodes in threads of the process that trains; `ray_data.py` decodes on any CPU of a cluster.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from orchestrator.config import DataConfig, RunConfig
from orchestrator.data import augment
from orchestrator.data.batch import Batch, DecodeError, PartialBatch, SampleLocation, join, sample_id
from orchestrator.data.images import BadImage, Transform
from orchestrator.data.manifest import open_manifest
from orchestrator.data.plan import Ints, Plan
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError

Split = Literal["train", "val"]
MAX_CONSECUTIVE_BAD = 1000
CORES = torch.get_num_threads()  # $OMP_NUM_THREADS, which Ray sets to the CPUs of a process, else all cores
SLOTS = 16  # decoded by one task of a thread; even, because images are mixed in pairs
DECODED_BYTES = 64 << 20  # images decoded ahead, or two steps if these are larger
BATCHES_AHEAD = 3  # fetched, and pinned for a GPU


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
        """Returns this worker's number of images per batch."""
        return self.run.data.batch_size // self.workers

    def epoch(self) -> int:
        """Returns the number of images of the split."""
        return self.data.manifest.rows(self.split)

    def steps(self) -> range:
        """Returns the steps that read the split once; empty slots fill the last global batch."""
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
        """Yields for each slot its sample, and then the samples that may replace it."""
        plan = self.plan
        assert plan
        lanes = plan.lanes // self.workers
        all_slots = plan.slots(step, range(self.rank * lanes, (self.rank + 1) * lanes))
        lane, index = (array[slots.start : slots.stop] for array in all_slots)

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


Reader = Callable[[Stream, range], Iterator[Batch]]  # yields the stream's batches of some steps, in order


@lru_cache(maxsize=64)  # one process decodes for many workers
def open_stream(run: RunConfig, split: Split, rank: int, workers: int) -> Stream:
    """Opens the training images in the order of the plan, or the validation images once.

    Raises as `in_order` does.
    """
    stream, config = in_order(run, split, rank, workers), run.data
    if split == "val":
        return stream
    transform = replace(
        stream.transform,
        augment=config.augment,
        randaugment=config.randaugment,
        randaugment_magnitude=config.randaugment_magnitude,
    )
    return replace(stream, plan=_plan(config, run.train.seed), transform=transform)


def in_order(run: RunConfig, split: Split, rank: int = 0, workers: int = 1) -> Stream:
    """Opens every image of a split once, without augmentation. Raises UsageError if there is no data set."""
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


def in_process(stream: Stream, steps: range) -> Iterator[Batch]:
    """Yields this worker's batches of `steps`, decoded by one thread per core."""
    share = stream.share()
    parts = [range(first, min(first + SLOTS, share)) for first in range(0, share, SLOTS)]
    ahead = max(2, min(32, DECODED_BYTES // (share * 3 * stream.transform.size**2)))
    waiting: deque[list[Future[PartialBatch]]] = deque()
    pool = ThreadPoolExecutor(CORES, thread_name_prefix="decode")
    try:
        for step in steps:
            waiting.append([pool.submit(stream.read, step, part) for part in parts])
            if len(waiting) > ahead:
                yield join([part.result() for part in waiting.popleft()])
        while waiting:
            yield join([part.result() for part in waiting.popleft()])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def prefetched(batches: Iterator[Batch], device: torch.device) -> Generator[Batch]:
    """Yields the same batches on `device`, fetched by a thread; those for a GPU through pinned memory."""

    def fetch() -> Batch | None:
        batch = next(batches, None)
        return batch.map(Tensor.pin_memory) if batch and device.type == "cuda" else batch

    def fetched() -> Generator[Batch]:
        waiting = deque(pool.submit(fetch) for _ in range(BATCHES_AHEAD))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(fetch))
            yield batch

    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        yield from _on_gpu(fetched(), device) if device.type == "cuda" else fetched()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _on_gpu(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Copies each batch while the GPU works on the batch before it."""
    copying = torch.cuda.Stream(device)
    before: Batch | None = None
    for batch in batches:
        with torch.cuda.stream(copying):
            following = batch.map(lambda pinned: pinned.to(device, non_blocking=True))
        if before is not None:
            yield before
        torch.cuda.current_stream(device).wait_stream(copying)
        for field in following[:-1]:
            field.record_stream(torch.cuda.current_stream(device))
        before = following
    if before is not None:
        yield before
