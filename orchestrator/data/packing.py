"""Samples into shards: parquet files of encoded images, and one manifest that says what they hold.

A data set is a directory with `manifest.json`, `train/*.parquet` and `val/*.parquet`; columns image (encoded
bytes), label (int32), key (string). Images stay as they are encoded until a worker decodes them.
"""

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator import storage
from orchestrator.data.decode import BadImage
from orchestrator.data.manifest import Manifest, Shard, has_manifest, save_manifest
from orchestrator.data.sources.source import Execute, Sample, Source
from orchestrator.data.sources.stored import stored
from orchestrator.errors import UsageError

ROWS_PER_SHARD = 512  # about 50 MB of ImageNet JPEGs
SHARD_BYTES = 64 << 20  # of larger images, fewer
ROWS_PER_GROUP = 64  # what other readers of parquet have in memory at a time
PROGRESS_EVERY_S = 5.0
SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int32()), ("key", pa.string())])

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A shard that is to be packed, on whatever node."""

    out: str
    path: str
    samples: Sequence[Sample]
    fetch: Callable[[Sequence[Any]], Iterable[bytes | BadImage]]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What became of a task. Attributes:
    shard: None if it had no valid image.
    skipped: samples that have none, with the reason.
    labels: images of each class.
    """

    path: str
    shard: Shard | None
    skipped: tuple[str, ...]
    labels: Counter[int]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Attributes:
    skipped: everything that was left out, with the reason; also in `skipped.txt` beside the manifest.
    labels: split -> images of each class.
    """

    manifest: Manifest
    skipped: tuple[str, ...]
    labels: Mapping[str, Counter[int]]


def pack(out: str, source: Source, *, overwrite: bool = False, execute: Execute = map) -> Report:
    """Packs a source's valid images; the manifest is written last. Same source, same bytes, however executed.

    Raises:
        UsageError: if `out` holds a data set and is not to be overwritten, or a split has no valid images.
        OSError: if storage fails.
    """
    _make_room(out, overwrite)
    tasks = [
        Task(out=out, path=_shard_path(split, number), samples=samples, fetch=source.fetch)
        for split in source.splits
        for number, samples in enumerate(_cut(source.splits[split]))
    ]
    done = sorted(_with_progress(execute(pack_shard, tasks), len(tasks)), key=lambda packed: packed.path)
    skipped = (*source.skipped, *(line for packed in done for line in packed.skipped))
    if skipped:
        storage.write_bytes(storage.join(out, "skipped.txt"), "".join(f"{s}\n" for s in skipped).encode())
    splits, labels = {}, {}
    for split in source.splits:
        mine = [packed for packed in done if packed.path.startswith(f"{split}/")]
        splits[split] = tuple(packed.shard for packed in mine if packed.shard)
        labels[split] = sum((packed.labels for packed in mine), Counter[int]())
        if not splits[split]:
            raise UsageError(f"no valid {split} images, see {out}/skipped.txt; the first: {skipped[0]}")
    manifest = Manifest(
        classes=source.classes, splits=splits, val_majority=max(labels["val"].values(), default=None)
    )
    save_manifest(out, manifest)
    return Report(manifest=manifest, skipped=skipped, labels=labels)


def pack_shard(task: Task) -> Packed:
    """Reads, checks and writes the images of one shard."""
    valid, skipped = [], []
    contents = task.fetch([sample.image for sample in task.samples])
    for sample, content in zip(task.samples, contents, strict=True):
        try:
            if isinstance(content, BadImage):
                raise content
            valid.append(sample._replace(image=stored(content)))
        except BadImage as error:
            skipped.append(f"{sample.key}: {error}")
    return Packed(
        path=task.path,
        shard=write_shard(task.out, task.path, valid) if valid else None,
        skipped=tuple(skipped),
        labels=Counter(sample.label for sample in valid),
    )


def write_shards(out: str, classes: Iterable[str], splits: Mapping[str, Iterable[Sample[bytes]]]) -> Manifest:
    """Packs images in memory, unchecked; the manifest is written last. Same input, same bytes.

    Raises:
        UsageError: if `out` already holds a data set, or a split has no samples.
    """
    _make_room(out, overwrite=False)
    packed: dict[str, tuple[Shard, ...]] = {}
    splits = {split: list(samples) for split, samples in splits.items()}
    for split, samples in splits.items():
        packed[split] = tuple(
            write_shard(out, _shard_path(split, number), chunk) for number, chunk in enumerate(_cut(samples))
        )
        if not packed[split]:
            raise UsageError(f"no {split} images: nothing to train and validate on")
    counts = Counter(sample.label for sample in splits.get("val", ()))
    manifest = Manifest(
        classes=tuple(classes), splits=packed, val_majority=max(counts.values(), default=None)
    )
    save_manifest(out, manifest)
    return manifest


def write_shard(out: str, path: str, samples: Sequence[Sample[bytes]]) -> Shard:
    images, labels, keys, _ = zip(*samples, strict=True)
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table([images, labels, keys], schema=SCHEMA),
        sink,
        row_group_size=ROWS_PER_GROUP,
        compression="none",  # images are compressed already, and readers find them as they are
        use_dictionary=False,
        write_statistics=["label"],  # pyright: ignore[reportArgumentType] # or columns
        write_page_checksum=True,
    )
    content = sink.getvalue().to_pybytes()
    storage.write_bytes(storage.join(out, path), content)
    return Shard(path=path, rows=len(samples), bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def check_free(out: str) -> None:
    """Raises UsageError if a data set is there."""
    if has_manifest(out):
        raise UsageError(f"{out} already holds a data set; choose another place, or --overwrite")


def _make_room(out: str, overwrite: bool) -> None:
    """Drops the data set that is there, its manifest first: the rest could not be taken for one."""
    if not overwrite:
        return check_free(out)
    if has_manifest(out):
        storage.delete(storage.join(out, "manifest.json"))
        for name in storage.files(out):
            if re.fullmatch(r"(train|val)/\d{6}\.parquet|skipped\.txt", name):
                storage.delete(storage.join(out, name))


def _shard_path(split: str, number: int) -> str:
    return f"{split}/{number:06d}.parquet"


def _cut(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Up to `ROWS_PER_SHARD`, and about `SHARD_BYTES` where sizes are known."""
    chunk: list[Sample] = []
    size = 0
    for sample in samples:
        if chunk and (len(chunk) == ROWS_PER_SHARD or size + sample.size > SHARD_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(sample)
        size += sample.size
    if chunk:
        yield chunk


def _with_progress(results: Iterable[Packed], shards: int) -> Iterator[Packed]:
    began = said = time.monotonic()
    images = 0
    for number, packed in enumerate(results, start=1):
        images += packed.labels.total()
        now = time.monotonic()
        if now - said >= PROGRESS_EVERY_S:
            said = now
            log.info(
                "packed %d images, %.0f/s, %d of %d shards", images, images / (now - began), number, shards
            )
        yield packed
