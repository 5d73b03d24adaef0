"""Samples into shards: parquet files of encoded images, and one manifest that says what they hold.

A data set is a directory with `manifest.json`, `train/*.parquet` and `val/*.parquet`; columns image (encoded
bytes), label (int32), key (string). Images stay as they are encoded until a worker decodes them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator import storage
from orchestrator.config import UsageError
from orchestrator.data.manifest import Manifest, Shard, has_manifest, save_manifest

ROWS_PER_SHARD = 512  # about 50 MB of ImageNet JPEGs
SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int32()), ("key", pa.string())])


class Sample(NamedTuple):
    image: bytes
    label: int
    key: str


def write_shards(out: str, classes: Iterable[str], splits: Mapping[str, Iterable[Sample]]) -> Manifest:
    """Packs the samples of each split, in their order; the manifest is written last. Same input, same bytes.

    Raises:
        UsageError: if `out` already holds a data set, or a split has no samples.
    """
    if has_manifest(out):
        raise UsageError(f"{out} already holds a data set; choose another place or delete it")
    packed: dict[str, tuple[Shard, ...]] = {}
    for split, samples in splits.items():
        rows, shards = iter(samples), []
        while chunk := list(islice(rows, ROWS_PER_SHARD)):
            shards.append(write_shard(out, f"{split}/{len(shards):06d}.parquet", chunk))
        if not shards:
            raise UsageError(f"no {split} images: nothing to train and validate on")
        packed[split] = tuple(shards)
    manifest = Manifest(classes=tuple(classes), splits=packed)
    save_manifest(out, manifest)
    return manifest


def write_shard(out: str, path: str, samples: list[Sample]) -> Shard:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist([sample._asdict() for sample in samples], schema=SCHEMA)
    pq.write_table(table, sink, compression="none")  # images are compressed already
    content = sink.getvalue().to_pybytes()
    storage.write_bytes(storage.join(out, path), content)
    return Shard(path=path, rows=len(samples), bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
