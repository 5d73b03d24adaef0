"""Reading shards: the bytes of any image of a shard, without the other images in memory.

When a node first opens a shard, its SHA-256 is checked and an index of its rows is written to the node's
cache: the offset of each image in the file (uncompressed parquet and tar hold images verbatim), its label and
key. A shard on S3 is copied to the cache first; the images of compressed parquet are unpacked into it.

The cache is a folder on the node's disk that holds files by name, up to a total size; the least recently used
files are removed. Any number of processes share it: one process makes a file while others wait for it. A file
appears whole or not at all, and processes that have it open can read it after it is removed.
"""

import fcntl
import hashlib
import mmap
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestrator import storage
from orchestrator.data.formats import read_samples
from orchestrator.data.manifest import Manifest, Shard, check_digest, locate
from orchestrator.errors import UsageError

CACHE_FOLDER = "MOE_FRONTIER_CACHE"  # environment variable; default: a folder of this user below /tmp
NEEDLE_BYTES = 256  # an image is found by its beginning, because a search for the whole takes much longer


class Rows:
    """An open shard: its location, and the key and label of each row."""

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
    """A data set, opened by one process; its shards take up to `cache_bytes` of this node's disk."""

    path: str
    manifest: Manifest
    cache_bytes: int

    def open(self, split: str, shard: int) -> Rows:
        """Opens a shard by its number.

        Raises:
            UsageError: if the shard differs from the manifest.
            OSError: if it cannot be read.
        """
        return _open(self, split, shard)


@lru_cache(maxsize=256)  # files that stay open
def _open(data: DataSet, split: str, number: int) -> Rows:
    shard = data.manifest.splits[split][number]
    location, limit = locate(data.path, shard), data.cache_bytes
    if storage.is_local(location):
        whole = open(location, "rb")  # noqa: SIM115 - stays open
        state = os.fstat(whole.fileno())
        # A shard that changed after it was checked must not find the old index.
        name = f"{shard.sha256}-{state.st_ino}-{state.st_mtime_ns}"
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


def _download(location: str, shard: Shard, to: Path) -> None:
    digest = hashlib.sha256()
    with to.open("wb") as copy:
        for piece in storage.pieces(location):
            digest.update(piece)
            copy.write(piece)
    check_digest(location, shard, digest.hexdigest())


def _write_index(location: str, shard: Shard, whole: BinaryIO, to: Path) -> None:
    content = _mapped(whole)
    check_digest(location, shard, hashlib.sha256(content).hexdigest())
    table, _ = read_samples(pa.py_buffer(content), shard.format, location)
    sizes = np.array([len(image) for image in _images(table)], dtype=np.int64)
    offsets = _offsets(content, table)
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
    table, _ = read_samples(pa.py_buffer(_mapped(whole)), shard.format, location)
    with to.open("wb") as file:
        file.writelines(_images(table))


def _offsets(content: mmap.mmap, table: pa.Table) -> NDArray[np.int64] | None:
    """Returns the offsets of the images in the file, if it holds them verbatim and in order; else None."""
    offsets, end = [], 0
    for image in _images(table):
        offset = content.find(image[:NEEDLE_BYTES], end)
        if offset < 0 or content[offset : offset + len(image)] != image:
            return None
        offsets.append(offset)
        end = offset + len(image)
    return np.array(offsets, dtype=np.int64)


def _images(table: pa.Table) -> Iterator[bytes]:
    return (image or b"" for chunk in table["image"].chunks for image in (row.as_py() for row in chunk))


def _labels(location: str, index: pa.Table, classes: tuple[str, ...]) -> NDArray[np.int64]:
    """Returns the class number of each row. Raises UsageError for a label that is not among the classes."""
    found = index["label"].to_pylist()
    known = {name: label for label, name in enumerate(classes)} if isinstance(found[0], str) else None
    labels = [label if known is None else known.get(label, -1) for label in found]
    for label, name, key in zip(labels, found, index["key"].to_pylist(), strict=True):
        if not 0 <= label < len(classes):
            raise UsageError(f"{location}: {key} has label {name!r}, the data set has {len(classes)} classes")
    return np.array(labels)


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def cached(name: str, make: Callable[[Path], None], *, limit: int) -> BinaryIO:
    """Opens a file of the cache for reading; if it is missing, `make(path)` writes it.

    All files together take at most `limit` bytes; a larger file is kept alone.

    Raises:
        OSError: if the disk is full or the folder belongs to another user.
    """
    path = _folder() / name
    if file := _open_if_there(path):
        return file
    with _locked(f"{name}.lock"):
        if file := _open_if_there(path):
            return file
        temporary = path.with_name(f"{name}.{uuid.uuid4().hex}.tmp")
        try:
            make(temporary)
            file = temporary.open("rb")
            with _locked("lock"):
                _make_room(limit - temporary.stat().st_size)
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return file


def _folder() -> Path:
    folder = Path(os.environ.get(CACHE_FOLDER) or f"{tempfile.gettempdir()}/moe-frontier-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        hint = f"set ${CACHE_FOLDER} to a folder of your own"
        raise PermissionError(f"{folder} belongs to another user: {hint}")
    return folder


def _open_if_there(path: Path) -> BinaryIO | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    os.utime(file.fileno())
    return file


def _make_room(limit: int) -> None:
    files = []
    for path in _folder().iterdir():
        with suppress(FileNotFoundError):
            if path.suffix not in (".lock", ".tmp") and path.name != "lock":
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Holds a lock that one process of this node has at a time; the process's death releases it."""
    with open(_folder() / name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
