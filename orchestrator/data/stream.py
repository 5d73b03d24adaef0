"""The batches that one worker reads: which images, how they become arrays, and decoding them ahead.

`in_process` decodes in threads of the process that trains; `ray_data.py` decodes on any CPU of a cluster.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator import storage
from orchestrator.config import DataConfig, RunConfig
from orchestrator.data.augment.base import at, draw
from orchestrator.data.batch import Batch, DecodeError, PartialBatch, SampleLocation, Traffic, join_batches
from orchestrator.data.decoded import decoded_split
from orchestrator.data.fields import Field, check_fields
from orchestrator.data.images import BadImage, Transform
from orchestrator.data.index import NO_LABEL, Ints, Records, labels_of
from orchestrator.data.manifest import Manifest, open_manifest
from orchestrator.data.plan import Places, Plan
from orchestrator.data.shards import DataSet, Image, fetch_whole
from orchestrator.errors import UsageError
from orchestrator.threads import CORES

log = logging.getLogger(__name__)
Reads = dict[str, Image]  # field of bytes -> what waits for them
Split = Literal["train", "val"]
MAX_CONSECUTIVE_BAD = 1000
SLOTS = 32  # decoded by one task of a thread; even, because images are mixed in pairs
DECODED_BYTES = 64 << 20  # images decoded ahead, or two steps if these are larger
BATCHES_AHEAD = 3  # fetched, and pinned for a GPU


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The part of every global batch that one worker reads: slots `rank * share` to `(rank + 1) * share`.

    With a plan, for training, a slot whose image cannot be decoded takes the next sample of its lane that can
    be; that sample then comes twice, and no later slot moves. Without a plan, the split is read once in the
    order of its shards, and such a slot stays empty.

    features: what a frozen tower made of every image of the split, (images, D), in the order of its shards:
        then batches have these rows in the place of images, and no image is read.
    """

    run: RunConfig
    split: Split
    rank: int
    workers: int
    data: DataSet
    plan: Plan | None
    transform: Transform
    fields: Mapping[str, Field]
    features: NDArray[np.float32] | None = None

    def share(self) -> int:
        """Returns this worker's number of images per batch."""
        return self.run.data.batch_size // self.workers

    def epoch(self) -> int:
        """Returns the number of images of the split."""
        return self.data.manifest.rows(self.split)

    def in_split(self, images: Ints) -> Ints:
        """Returns the places in the split of images that are counted in reading order without a plan."""
        return images

    def steps(self) -> range:
        """Returns the steps that read the split once; empty slots fill the last global batch."""
        return range(-(-self.epoch() // self.run.data.batch_size))

    def read(self, step: int, slots: range) -> PartialBatch:
        """Reads some slots of this worker's share of `step`: fetches their images, then decodes them."""
        return self.decode(self.fetch(step, slots))

    def fetch(self, step: int, slots: range) -> "Fetch":
        """Locates the images of some slots of this worker's share of `step`, and begins to read them."""
        first = step * self.run.data.batch_size + self.rank * self.share() + slots.start
        key = np.arange(first, first + len(slots))
        if self.plan:
            lanes = self.plan.lanes // self.workers
            all_slots = self.plan.slots(step, range(self.rank * lanes, (self.rank + 1) * lanes))
            lane, within = (array[slots.start : slots.stop] for array in all_slots)
            places = self.plan.locate(lane, within)
        else:
            lane = within = np.array([], np.int64)
            images = self.in_split(key[key < self.epoch()])
            none = np.zeros_like(images)
            places = Places(none, *self.data.places(self.split, images), none)
        records = self.data.records(self.split, places.shard, places.row)
        kept = decoded_split(self.data, self.split, self.transform)
        known = kept.of(self.data.starts(self.split)[places.shard] + places.row) if kept else None
        if known is not None and not self.fields and self.features is None:
            return Fetch(key, lane, within, places, records, [], Traffic(), known)
        reads, traffic = self._read(places, records)
        return Fetch(key, lane, within, places, records, reads, traffic, None)

    def _read(self, places: Places, records: Records) -> tuple[list[Reads], Traffic]:
        """Begins to read the fields of bytes of some samples."""
        reads: list[Reads] = [{} for _ in records]
        traffic = Traffic()
        images = ["image"] if self.features is None and self.transform.size else []
        for name in (*images, *(name for name, field in self.fields.items() if field.stored == "bytes")):
            found, more = self.data.images(self.split, places.shard, records, name)
            traffic = Traffic(*map(sum, zip(traffic, more, strict=True)))
            for values, read in zip(reads, found, strict=True):
                values[name] = read
        return reads, traffic

    def decode(self, fetch: "Fetch") -> PartialBatch:
        """Waits for the images of some slots and decodes them.

        Raises:
            UsageError: for a shard that differs from the manifest, and for too many bad images in a row.
        """
        n, size, config = len(fetch.key), self.transform.size, self.run.data
        image, label = np.zeros((n, size, size, 3), np.uint8), self._no_labels(n)
        if self.features is not None:
            image = np.zeros((n, self.features.shape[1]), np.float32)
        further = {name: field.empty(n) for name, field in self.fields.items()}
        valid, sample = np.zeros(n, np.float32), np.zeros(n, np.int64)
        bad: list[DecodeError] = []
        names = [""] * n
        if (known := fetch.known) is not None:
            image[: len(known)], valid[: len(known)] = known, 1
            label[: len(known)], sample[: len(known)] = labels_of(fetch.records), fetch.records["sample"]
            for i, (epoch, view) in enumerate(
                zip(fetch.places.epoch.tolist(), fetch.places.view.tolist(), strict=True)
            ):
                names[i] = self._name(epoch, sample[i], view)
                if self.transform.varies():
                    central = torch.from_numpy(known[i]).permute(2, 0, 1)
                    image[i] = _by_place(self.transform.vary(central, names[i]))
        for i in range(len(fetch.reads)):
            for attempt, (place, record, reads) in enumerate(self._candidates(fetch, i), start=1):
                names[i] = self._name(place.epoch, record["sample"].item(), place.view)
                try:
                    found = self._image(place, reads, names[i]) if size else image[i]
                    for name, field in self.fields.items():
                        value = reads[name]() if name in reads else record[name].item()
                        further[name][i] = field.decode(value)
                except BadImage as error:
                    key = self.data.keys(self.split, place.shard)[place.row]
                    location = self.data.location(self.split, place.shard)
                    bad.append(DecodeError(location, place.row, key, str(error)))
                    if attempt > MAX_CONSECUTIVE_BAD:
                        raise UsageError(f"{attempt} images in a row cannot be decoded: {bad[-1]}") from None
                    continue
                image[i] = found
                label[i], valid[i], sample[i] = labels_of(record)[0], 1, record["sample"].item()
                break
        fields = {"label": label, **further}
        if self.transform.size:
            fields = {"image": image, **fields}
        if self.plan and (mixing := at(config.augment, "batch")):
            fields["mix"] = draw(mixing, names, size)
        return PartialBatch(fields, valid, fetch.key, sample, bad, fetch.traffic)

    def _name(self, epoch: int, sample: int, view: int) -> str:
        """Returns the key of an image's random numbers."""
        return f"{self.run.train.seed}/{epoch}/{sample}" + (f"/{view}" if view else "")

    def _image(self, place: SampleLocation, reads: Reads, name: str) -> NDArray[Any]:
        """Returns a sample's image, (H, W, 3) uint8, or its features, (D,). Raises `BadImage`."""
        in_split = self.data.starts(self.split)[place.shard] + place.row
        if self.features is not None:
            if not np.isfinite(row := self.features[in_split]).all():
                raise BadImage("it could not be decoded when its features were computed")
            return row
        if kept := decoded_split(self.data, self.split, self.transform):
            pixels = self.transform.central(reads["image"]())
            kept.keep(in_split, _by_place(pixels))
            return _by_place(self.transform.vary(pixels, name))
        return _by_place(self.transform(reads["image"](), name))

    def _no_labels(self, n: int) -> Ints:
        """Returns the labels of `n` empty slots: class 0, which no score counts."""
        label = np.full((n, self.data.manifest.labels), NO_LABEL, np.int64)
        label[:, 0] = 0
        return label

    def _candidates(self, fetch: "Fetch", slot: int) -> Iterator[tuple[SampleLocation, Records, Reads]]:
        """Yields the slot's sample, its record, (1,), and its bytes; with a plan also what may replace it."""
        place = SampleLocation(*(int(array[slot]) for array in fetch.places))
        yield place, fetch.records[slot : slot + 1], fetch.reads[slot]
        if self.plan:
            for following in count(fetch.within[slot] + 1):
                places = self.plan.locate(fetch.lane[slot, None], following[None])
                records = self.data.records(self.split, places.shard, places.row)
                (reads,), _ = self._read(places, records)
                yield SampleLocation(*(int(array[0]) for array in places)), records, reads


class Fetch(NamedTuple):
    """n slots whose images are being read; without a plan, fewer images where the split ends.

    key: (n,), as in `Batch`.
    lane, within: (n,), the slots' lanes, and their samples' numbers within the lane; empty without a plan.
    places, records, reads: the sample of each slot.
    known: (n, size, size, 3), the images if this process has decoded them all before: none is read then.
    """

    key: Ints
    lane: Ints
    within: Ints
    places: Places
    records: Records
    reads: list[Reads]
    traffic: Traffic
    known: NDArray[np.uint8] | None


def _by_place(image: Tensor) -> NDArray[np.uint8]:
    """(3, H, W) -> (H, W, 3)."""
    return image.permute(1, 2, 0).numpy()


Reader = Callable[[Stream, range], Iterator[Batch]]  # yields the stream's batches of some steps, in order


@lru_cache(maxsize=64)  # one process decodes for many workers
def open_stream(run: RunConfig, split: Split, rank: int, workers: int, *, whole: bool = False) -> Stream:
    """Opens the training images in the order of the plan, or the validation images once.

    `whole`: see `fetches_whole_shards`. Raises as `in_order` does.
    """
    stream, config = in_order(run, split, rank, workers, whole=whole), run.data
    if split == "val":
        return stream
    transform = replace(stream.transform, augment=config.augment)
    return replace(stream, plan=_plan(config, run.lane_count(), run.train.seed), transform=transform)


def in_order(
    run: RunConfig,
    split: Split,
    rank: int = 0,
    workers: int = 1,
    *,
    fields: Mapping[str, Field] | None = None,
    whole: bool = False,
) -> Stream:
    """Opens every image of a split once, without augmentation, with `fields`, by default those of the task.
    Raises UsageError if there is no data set, or it lacks one of them.
    """
    data, fields = _data_set(run.data, whole), run.task.fields(run.model) if fields is None else fields
    check_fields(fields, data.manifest.fields, run.data.path)
    return Stream(
        run=run,
        split=split,
        rank=rank,
        workers=workers,
        data=data,
        fields=fields,
        plan=None,
        transform=Transform(size=run.model.image_side(), **run.data.eval_settings()),
    )


def fetches_whole_shards(run: RunConfig, *, nodes: int) -> bool:
    """Returns whether a run whose images are decoded on `nodes` nodes also fetches whole shards into their
    caches, and logs why.
    """
    if storage.is_local(run.data.path):
        return False
    manifest, cache_bytes = _manifest(run.data.path), run.data.cache_gb * 1e9
    reads = run.train.steps * run.data.batch_size / manifest.rows("train")
    whole, why = fetch_whole(manifest, cache_bytes=cache_bytes, reads=reads, nodes=nodes)
    log.info("%s: images are read by ranges%s: %s", run.name, " and whole shards" if whole else "", why)
    return whole


@lru_cache(maxsize=4)
def _manifest(path: str) -> Manifest:
    return open_manifest(path)


@lru_cache(maxsize=4)
def _data_set(config: DataConfig, whole: bool) -> DataSet:
    return DataSet(
        path=config.path,
        manifest=_manifest(config.path),
        cache_bytes=int(config.cache_gb * 1e9),
        whole=whole,
    )


@lru_cache(maxsize=4)
def _plan(config: DataConfig, lanes: int, seed: int) -> Plan:
    return Plan(
        rows=np.array([shard.rows for shard in _manifest(config.path).splits["train"]]),
        seed=seed,
        lanes=lanes,
        batch_size=config.batch_size,
        shuffle_window=config.shuffle_window,
        shuffle_run=config.shuffle_run,
        tail=config.tail,
        repeats=config.repeats,
    )


def in_process(stream: Stream, steps: range) -> Iterator[Batch]:
    """Yields this worker's batches of `steps`, decoded by one thread per core."""
    whole = fetches_whole_shards(stream.run, nodes=1)
    stream = replace(stream, data=_data_set(stream.run.data, whole))
    share = stream.share()
    parts = [range(first, min(first + SLOTS, share)) for first in range(0, share, SLOTS)]
    ahead = max(2, min(32, DECODED_BYTES // (share * stream.run.pixels())))
    waiting: deque[list[Future[PartialBatch]]] = deque()
    pool = ThreadPoolExecutor(CORES, thread_name_prefix="decode")
    try:
        for step in steps:
            waiting.append([pool.submit(stream.decode, stream.fetch(step, part)) for part in parts])
            if len(waiting) > ahead:
                yield join_batches([part.result() for part in waiting.popleft()])
        while waiting:
            yield join_batches([part.result() for part in waiting.popleft()])
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
        for field in following.tensors():
            field.record_stream(torch.cuda.current_stream(device))
        before = following
    if before is not None:
        yield before
