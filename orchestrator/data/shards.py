"""A shard as it is read: the bytes of any of its images, without the others in memory.

When a shard is first opened on a node, its SHA-256 is checked and an index of its rows goes into the node's
cache: where in the file each image lies (uncompressed parquet and tar hold it as it is), its label and key. A
shard on S3 is copied to the cache first; of compressed parquet the images are.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestrator import storage
from orchestrator.data.cache import cached
from orchestrator.data.check import PIECE_BYTES, check_digest
from orchestrator.data.formats import read_table
from orchestrator.data.manifest import Manifest, Shard, locate
from orchestrator.errors import UsageError

NEEDLE_BYTES = 256


class Rows:
    """An open shard. Attributes:
    location: of its file.
    keys: name of each row's sample.
    labels: (rows,) int64.
    """

    def __init__(self, location: str, content: BinaryIO, index: pa.Table, labels: NDArray[np.int64]) -> None:
        self.location = location
        self.keys: list[str] = index["key"].to_pylist()
        self.labels = labels
        self._content = content
        self._offsets, self._sizes = index["offset"].to_numpy(), index["size"].to_numpy()

    def image(self, row: int) -> bytes:
        return os.pread(self._content.fileno(), int(self._sizes[row]), int(self._offsets[row]))


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSet:
    """A data set as this process reads it. Attributes:
    cache_bytes: of this node's disk that its shards may take.
    """

    path: str
    manifest: Manifest
    cache_bytes: int

    def open(self, split: str, shard: int) -> Rows:
        """Raises UsageError if the shard is not what the manifest describes, OSError if it cannot be read."""
        return _open(self, split, shard)


@lru_cache(maxsize=256)  # files that stay open
def _open(data: DataSet, split: str, number: int) -> Rows:
    shard = data.manifest.splits[split][number]
    location, limit = locate(data.path, shard), data.cache_bytes
    if storage.is_local(location):
        whole = _opened(location)
        state = os.fstat(whole.fileno())
        name = f"{shard.sha256}-{state.st_ino}-{state.st_mtime_ns}"  # what was checked once may have changed
    else:
        whole = cached(shard.sha256, lambda to: _download(location, shard, to), limit=limit)
        name = shard.sha256
    with cached(f"{name}.index", lambda to: _write_index(location, shard, whole, to), limit=limit) as file:
        index = pa.ipc.open_file(file).read_all()
    content = whole
    if index.schema.metadata[b"verbatim"] == b"no":
        content = cached(
            f"{shard.sha256}.images", lambda to: _unpack(location, shard, whole, to), limit=limit
        )
    return Rows(location, content, index, _labels(location, index, data.manifest.classes))


def _opened(path: str) -> BinaryIO:
    return open(path, "rb")


def _download(location: str, shard: Shard, to: Path) -> None:
    digest = hashlib.sha256()
    with storage.open_to_read(location) as source, to.open("wb") as copy:
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
            copy.write(piece)
    check_digest(location, shard, digest.hexdigest())


def _write_index(location: str, shard: Shard, whole: BinaryIO, to: Path) -> None:
    content = _mapped(whole)
    check_digest(location, shard, hashlib.sha256(content).hexdigest())
    table = read_table(pa.py_buffer(content), shard.format, location)
    sizes = np.array([len(image) for image in _images(table)], dtype=np.int64)
    offsets = _places(content, table)
    verbatim = offsets is not None
    index = pa.table(
        {
            "offset": offsets if verbatim else np.concatenate([[0], np.cumsum(sizes)[:-1]]),
            "size": sizes,
            "label": table["label"],
            "key": table["key"],
        },
        metadata={"verbatim": "yes" if verbatim else "no"},
    )
    with pa.OSFile(str(to), "wb") as file, pa.ipc.new_file(file, index.schema) as writer:
        writer.write_table(index)


def _unpack(location: str, shard: Shard, whole: BinaryIO, to: Path) -> None:
    table = read_table(pa.py_buffer(_mapped(whole)), shard.format, location)
    with to.open("wb") as file:
        file.writelines(_images(table))


def _places(content: mmap.mmap, table: pa.Table) -> NDArray[np.int64] | None:
    """Where the images lie in the file, one after the other; None if they do not."""
    places, end = [], 0
    for image in _images(table):
        place = content.find(image[:NEEDLE_BYTES], end)  # looking for all of it would take much longer
        if place < 0 or content[place : place + len(image)] != image:
            return None
        places.append(place)
        end = place + len(image)
    return np.array(places, dtype=np.int64)


def _images(table: pa.Table) -> Iterator[bytes]:
    return (image or b"" for chunk in table["image"].chunks for image in (row.as_py() for row in chunk))


def _labels(location: str, index: pa.Table, classes: tuple[str, ...]) -> NDArray[np.int64]:
    """Raises UsageError for a label that is none of the data set's classes."""
    found = index["label"].to_pylist()
    known = {name: label for label, name in enumerate(classes)} if isinstance(found[0], str) else None
    labels = [label if known is None else known.get(label, -1) for label in found]
    for label, name, key in zip(labels, found, index["key"].to_pylist(), strict=True):
        if not 0 <= label < len(classes):
            raise UsageError(f"{location}: {key} has label {name!r}, the data set has {len(classes)} classes")
    return np.array(labels)


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
