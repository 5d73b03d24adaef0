"""Reading shards: the bytes of any image of a shard, by the range of the file that holds them.

Local files are read in place. From remote ones, in an object storage or on a web server, an image is fetched
by a request of its own, with many requests in flight; neighbours in a file share a request. Where it is
cheaper (`fetch_whole`), whole shards are fetched into the node's cache beside that. A compressed parquet file
holds no image verbatim: its images are unpacked into the cache. A remote index is fetched into it, too.
"""

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from queue import Queue
from threading import Thread
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from orchestrator import storage
from orchestrator.data.batch import Traffic
from orchestrator.data.cache import cached, open_cached
from orchestrator.data.images import BadImage
from orchestrator.data.index import Ints, Records, place_of, read_keys, record_type
from orchestrator.data.manifest import Manifest, Shard, check_digest, locate
from orchestrator.errors import UsageError, reason_of

# Requests in flight. A core decodes some 600 images/s, and object storages answer after 0.02 to 0.2 s.
REQUESTS_PER_CORE = 64
MAX_REQUESTS = 256
MERGED_GAP = 32 << 10  # bytes between two images that one request still fetches together
MERGED_BYTES = 8 << 20  # the most bytes of such a request
SHARDS_AT_ONCE = 2  # fetched whole by one process

log = logging.getLogger(__name__)
Image = Callable[[], bytes]  # waits for the encoded bytes of an image
Place = tuple[int, int, int]  # shard number, offset, size


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSet:
    """A data set, opened by one process.

    cache_bytes: the most that the node's cache takes of its disk. Without any, each process keeps the index
        of a remote data set in memory.
    whole: whether remote shards are also fetched whole into the cache.
    """

    path: str
    manifest: Manifest
    cache_bytes: int
    whole: bool = False

    def records(self, split: str, shard: Ints, row: Ints) -> Records:
        """Returns the records of images by shard number and row, both (images,)."""
        index = _index(self, split)
        return index.records[index.starts[shard] + row]

    def starts(self, split: str) -> Ints:
        """Returns the number of images before each shard of a split."""
        return _index(self, split).starts

    def places(self, split: str, images: Ints) -> tuple[Ints, Ints]:
        """Returns shard number and row, (images,) each, of images that are counted through the split."""
        starts = _index(self, split).starts
        shard = np.searchsorted(starts, images, side="right") - 1
        return shard, images - starts[shard]

    def labels(self, split: str) -> Ints:
        """Returns the first label of every image of a split, (images,)."""
        places = self.places(split, np.arange(self.manifest.rows(split)))
        return self.records(split, *places)["label"].astype(np.int64)

    def keys(self, split: str, shard: int) -> list[str]:
        return read_keys(self.path, split, shard)

    def location(self, split: str, shard: int) -> str:
        return locate(self.path, self.manifest.splits[split][shard])

    def images(
        self, split: str, shard: Ints, records: Records, field: str = "image"
    ) -> tuple[list[Image], Traffic]:
        """Begins to read images, or another field of bytes, given the shard number and the record of each.

        An image raises UsageError if its shard changed, OSError if it cannot be read, and BadImage if its
        bytes are not those that were indexed.
        """
        offset, size, crc32 = place_of(records, field)
        places: list[Place] = list(zip(*(column.tolist() for column in (shard, offset, size)), strict=True))
        images: list[Image] = []
        requests = fetched = 0
        for run in _runs(places):
            of = self.manifest.splits[split][run[0][0]]
            location = locate(self.path, of)
            if of.unpacked is not None:
                images += [partial(self._unpacked, location, of, *place[1:]) for place in run]
            elif storage.is_local(location):
                images += [partial(_from_disk, location, of, *place[1:]) for place in run]
            else:
                begin, size = run[0][1], run[-1][1] + run[-1][2] - run[0][1]
                file = open_cached(of.sha256) if self.whole else None
                if file:
                    read = _requests().submit(_from_cache, file, location, begin, size)
                else:
                    if self.whole:
                        _fetch_beside(location, of, self.cache_bytes)
                    read = _requests().submit(_from_remote, location, of, begin, size)
                    requests, fetched = requests + 1, fetched + size
                images += [partial(_part, read.result, place[1] - begin, place[2]) for place in run]
        checked: list[Image] = [partial(_checked, *each) for each in zip(images, crc32.tolist(), strict=True)]
        return checked, Traffic(requests, fetched)

    def readers(self, split: str, images: Ints) -> list[Image]:
        """Begins to read images, which are counted through the split."""
        shard, row = self.places(split, images)
        return self.images(split, shard, self.records(split, shard, row))[0]

    def _unpacked(self, location: str, shard: Shard, offset: int, size: int) -> bytes:
        assert shard.unpacked is not None
        make = partial(_unpack, location, shard)
        file = cached(f"{shard.sha256}.images", shard.unpacked, make, limit=self.cache_bytes)
        return _from_cache(file, location, offset, size)


def fetch_whole(manifest: Manifest, *, cache_bytes: float, reads: float, nodes: int) -> tuple[bool, str]:
    """Returns whether whole remote shards are fetched into the nodes' caches, and why.

    `reads` is how often the training images are read. By ranges, the nodes fetch the data set `reads` times
    together. Whole, each of the `nodes` fetches it once, because any node may read any shard; its cache must
    hold the data set.
    """
    gb = (
        sum({shard.path: shard.bytes for split in manifest.splits.values() for shard in split}.values()) / 1e9
    )
    if gb > cache_bytes / 1e9:
        return False, f"{gb:.1f} GB of shards exceed the cache of {cache_bytes / 1e9:g} GB per node"
    by_range, whole = reads * gb, nodes * gb
    return by_range > whole, f"ranges would fetch {by_range:.1f} GB, whole shards {whole:.1f} GB"


class _Index(NamedTuple):
    """The records of a split, and the number of the first of each shard."""

    records: Records
    starts: Ints


@lru_cache(maxsize=8)
def _index(data: DataSet, split: str) -> _Index:
    """Maps the index of a split; a remote one is first copied, once for all processes of the node."""
    file, kind = data.manifest.index_of(split), record_type(data.manifest.labels, data.manifest.fields)
    location, name = locate(data.path, file), f"{file.sha256}.index"
    if storage.is_local(location):
        if (size := os.path.getsize(location)) != file.bytes:
            raise UsageError(
                f"{location} describes {size / kind.itemsize:g} images, the manifest {file.rows}: copy the"
                " data set again, or pack it anew"
            )
        records = np.memmap(location, kind, mode="r")
    elif data.cache_bytes:
        fetch = partial(_download, location, file)
        # The map keeps the file open and so in the cache, as long as a process uses it.
        with cached(name, file.bytes, fetch, limit=data.cache_bytes) as copy:
            records = np.memmap(copy, kind, mode="r")
    else:
        _download(location, file, content := BytesIO())
        records = np.frombuffer(content.getbuffer(), kind)
    rows = [shard.rows for shard in data.manifest.splits[split]]
    return _Index(records, np.concatenate([[0], np.cumsum(np.asarray(rows, np.int64))]))


def _runs(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Yields runs of images that follow each other in a file, which one request fetches."""
    run: list[Place] = []
    for place in places:
        if run:
            begin, end = run[0][1], run[-1][1] + run[-1][2]
            gap, size = place[1] - end, place[1] + place[2] - begin
            if place[0] != run[0][0] or not 0 <= gap <= MERGED_GAP or size > MERGED_BYTES:
                yield run
                run = []
        run.append(place)
    if run:
        yield run


def _checked(read: Image, crc: int) -> bytes:
    content = read()
    if zlib.crc32(content) != crc:
        raise BadImage("its bytes are not those that were indexed (their CRC-32 differs)")
    return content


def _part(read: Image, offset: int, size: int) -> bytes:
    return read()[offset : offset + size]


@lru_cache(maxsize=256)
def _open(location: str, shard: Shard) -> BinaryIO:
    return open(location, "rb")


def _from_disk(location: str, shard: Shard, offset: int, size: int) -> bytes:
    # The name keeps the file open, which another thread may drop from the cache of `_open`.
    file = _open(location, shard)
    content = os.pread(file.fileno(), size, offset)
    if len(content) != size:
        raise UsageError(f"{location} is shorter than the {shard.bytes} bytes of its manifest: copy it again")
    return content


def _from_cache(file: BinaryIO, location: str, offset: int, size: int) -> bytes:
    with file:
        content = os.pread(file.fileno(), size, offset)
    if len(content) != size:
        raise UsageError(f"{location} has fewer bytes of images than its index says: index it again")
    return content


def _from_remote(location: str, shard: Shard, offset: int, size: int) -> bytes:
    found = None
    try:
        found = storage.read_range(location, offset, size)
    except OSError:
        # A file that became shorter does not have the range.
        if storage.size(location) in (shard.bytes, None):
            raise
    if not found or found.whole_bytes != shard.bytes or _etag(location, found.etag) != found.etag:
        raise UsageError(f"{location} was replaced since it was packed, or while it is read: pack it again")
    return found.content


_etags: dict[str, str | None] = {}


def _etag(location: str, etag: str | None) -> str | None:
    """Returns the ETag that the file had when this process first read it."""
    return _etags.setdefault(location, etag)


@lru_cache(maxsize=1)
def _requests() -> ThreadPoolExecutor:
    threads = min(MAX_REQUESTS, REQUESTS_PER_CORE * torch.get_num_threads())
    return ThreadPoolExecutor(threads, thread_name_prefix="ranges")


_fetching: set[str] = set()  # whole shards that this process has begun to fetch


def _fetch_beside(location: str, shard: Shard, limit: int) -> None:
    """Asks for a whole shard in the cache, unless this process has asked before."""
    if location not in _fetching:
        _fetching.add(location)
        _wanted().put((location, shard, limit))


@lru_cache(maxsize=1)
def _wanted() -> Queue[tuple[str, Shard, int]]:
    """Returns the queue of shards to fetch. Its threads are daemons, because no process waits for shards when
    it ends.
    """
    queue: Queue[tuple[str, Shard, int]] = Queue()
    for _ in range(SHARDS_AT_ONCE):
        Thread(target=_fetch_shards, args=[queue], name="shards", daemon=True).start()
    return queue


def _fetch_shards(queue: Queue[tuple[str, Shard, int]]) -> None:
    while True:
        location, shard, limit = queue.get()
        try:
            cached(shard.sha256, shard.bytes, partial(_download, location, shard), limit=limit).close()
        except (OSError, UsageError) as error:
            log.warning("%s is read by ranges alone: %s", location, reason_of(error))
        queue.task_done()


def _download(location: str, shard: Shard, to: BinaryIO) -> None:
    digest = hashlib.sha256()
    for piece in storage.pieces(location):
        digest.update(piece)
        to.write(piece)
    check_digest(location, shard, digest.hexdigest())


def _unpack(location: str, shard: Shard, to: BinaryIO) -> None:
    try:
        import orchestrator.data.parquet as parquet

        to.writelines(parquet.unpacked_images(location))
    except (OSError, ValueError):
        # Arrow raises either for a damaged file.
        with open(os.devnull, "wb") as nowhere:
            _download(location, shard, nowhere)
        raise
