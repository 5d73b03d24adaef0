"""Image shards: parquet files of encoded images, and one manifest that says what they hold.

A data set is a directory with `manifest.json`, `train/*.parquet` and `val/*.parquet`; columns image (encoded
bytes), label (int32), key (string). Images stay JPEG or PNG until a worker decodes them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator import storage
from orchestrator.config import UsageError

ROWS_PER_SHARD = 512  # about 50 MB of ImageNet JPEGs
SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int32()), ("key", pa.string())])


class Sample(NamedTuple):
    image: bytes
    label: int
    key: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    path: str  # below the data set
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Attributes:
    classes: names by label.
    splits: ``train`` and ``val`` -> shards in order.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, tuple[Shard, ...]]

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.splits[split])

    def digest(self) -> str:
        """SHA-256 over all shards' own: two data sets of equal digest are equal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def write_shards(out: str, classes: Iterable[str], splits: Mapping[str, Iterable[Sample]]) -> Manifest:
    """Packs the samples of each split, in their order; the manifest is written last. Same input, same bytes.

    Raises:
        UsageError: if `out` already holds a data set, or a split has no samples.
    """
    if storage.size(storage.join(out, "manifest.json")) is not None:
        raise UsageError(f"{out} already holds a data set; choose another place or delete it")
    packed: dict[str, tuple[Shard, ...]] = {}
    for split, samples in splits.items():
        rows, shards = iter(samples), []
        while chunk := list(islice(rows, ROWS_PER_SHARD)):
            shards.append(_write_shard(out, f"{split}/{len(shards):06d}.parquet", chunk))
        if not shards:
            raise UsageError(f"no {split} images: nothing to train and validate on")
        packed[split] = tuple(shards)
    manifest = Manifest(classes=tuple(classes), splits=packed)
    storage.write_bytes(storage.join(out, "manifest.json"), json.dumps(asdict(manifest), indent=1).encode())
    return manifest


def _write_shard(out: str, path: str, samples: list[Sample]) -> Shard:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist([sample._asdict() for sample in samples], schema=SCHEMA)
    pq.write_table(table, sink, compression="none")  # images are compressed already
    content = sink.getvalue().to_pybytes()
    storage.write_bytes(storage.join(out, path), content)
    return Shard(path=path, rows=len(samples), bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def open_manifest(path: str) -> Manifest:
    """Reads a data set's manifest and checks that every shard is there in its full size.

    Contents are checked against their SHA-256 when a shard is first read.

    Raises:
        UsageError: naming the path or shard that is missing or cut short.
    """
    try:
        tree = json.loads(storage.read_bytes(storage.join(path, "manifest.json")))
        manifest = Manifest(
            classes=tuple(tree["classes"]),
            splits={split: tuple(Shard(**s) for s in shards) for split, shards in tree["splits"].items()},
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"no data set at {path}: {error}; pack one with jobs/pack_shards.py") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}/manifest.json is not a shard manifest ({error!r})") from None
    for split in ("train", "val"):
        if not manifest.splits.get(split):
            raise UsageError(f"{path}/manifest.json has no {split} shards")
        for shard in manifest.splits[split]:
            found = storage.size(storage.join(path, shard.path))
            if found != shard.bytes:
                state = "is missing" if found is None else f"has {found} bytes"
                raise UsageError(
                    f"shard {path}/{shard.path} {state}, the manifest says {shard.bytes}: copy it again"
                )
    return manifest


@lru_cache(maxsize=16)
def read_shard(path: str, shard: Shard) -> pa.Table:
    """The shard's rows, in memory; each process keeps the last 16.

    Raises:
        UsageError: if its bytes are not those that the manifest describes.
    """
    content = storage.read_bytes(storage.join(path, shard.path))
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise UsageError(f"shard {path}/{shard.path} changed since it was packed (SHA-256 differs)")
    return pq.read_table(pa.BufferReader(content))
