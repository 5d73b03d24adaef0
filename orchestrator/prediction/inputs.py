"""Images to predict: files below a folder, or the rows of shards, in a fixed order."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.data.manifest import has_manifest, open_manifest
from orchestrator.data.samples import files_below, may_be_image, read_files
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError

FILES_AT_ONCE = 32  # encoded images in memory
SPLITS = ("train", "val")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Files:
    """Images below a folder; the key of each is its path there."""

    folder: str
    names: Sequence[str]

    def count(self) -> int:
        return len(self.names)

    def images(self) -> Iterator[tuple[str, bytes | BadImage]]:
        """Key and encoded image, or why it cannot be read."""
        for first in range(0, len(self.names), FILES_AT_ONCE):
            names = self.names[first : first + FILES_AT_ONCE]
            yield from zip(names, read_files([storage.join(self.folder, n) for n in names]), strict=True)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Images of shards, in their order from `first` of the split on; their keys are the shards'."""

    path: str
    split: str
    first: int
    stop: int
    cache_bytes: int

    def count(self) -> int:
        return self.stop - self.first

    def images(self) -> Iterator[tuple[str, bytes | BadImage]]:
        """As of `Files`. Raises UsageError if a shard is not what the manifest describes."""
        data = _data_set(self.path, self.cache_bytes)
        begin = 0
        for number, shard in enumerate(data.manifest.splits[self.split]):
            wanted = range(max(self.first - begin, 0), min(self.stop - begin, shard.rows))
            if wanted:
                rows = data.open(self.split, number)
                yield from ((rows.keys[row], rows.image(row)) for row in wanted)
            begin += shard.rows


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Attributes:
    location: of the folder or the shards.
    count: images.
    sha256: of their names and sizes, or of the shards'.
    """

    location: str
    count: int
    sha256: str
    names: Sequence[str] = ()  # of files
    splits: Sequence[tuple[str, int]] = ()  # of shards, with their images
    cache_bytes: int = 0

    def parts(self, size: int) -> list[Files | Rows]:
        """At most `size` images each; none of two splits."""
        if self.names:
            cuts = range(0, self.count, size)
            return [Files(folder=self.location, names=self.names[at : at + size]) for at in cuts]
        return [
            Rows(
                path=self.location,
                split=split,
                first=first,
                stop=min(first + size, rows),
                cache_bytes=self.cache_bytes,
            )
            for split, rows in self.splits
            for first in range(0, rows, size)
        ]


def open_inputs(location: str, split: str | None, *, cache_bytes: int) -> Inputs:
    """`split`: of shards; None: both.

    Raises:
        UsageError: if there is no image, or a folder of files is asked for a split.
    """
    location = storage.absolute(location).rstrip("/")
    if has_manifest(location):
        manifest = open_manifest(location)
        splits = [(name, manifest.rows(name)) for name in SPLITS if split in (None, name)]
        return Inputs(
            location=location,
            count=sum(rows for _, rows in splits),
            sha256=manifest.digest(),
            splits=splits,
            cache_bytes=cache_bytes,
        )
    if split:
        raise UsageError(f"--split {split}: {location} has no manifest.json and so no splits")
    found = files_below(location)
    images = {name: size for name, size in found.items() if may_be_image(name)}
    others = [name for name in found if name not in images]
    if not images:
        raise UsageError(
            f"no images below {location}, but {len(others)} other files, such as {others[0]}; shards need a"
            " manifest.json, as jobs/pack_shards.py writes it"
        )
    if others:
        log.info("left out %d files that are not images by their names: %s ..", len(others), others[0])
    digest = hashlib.sha256(json.dumps([*images.items()]).encode()).hexdigest()
    return Inputs(location=location, count=len(images), sha256=digest, names=tuple(images))


@lru_cache(maxsize=4)
def _data_set(path: str, cache_bytes: int) -> DataSet:
    return DataSet(path=path, manifest=open_manifest(path), cache_bytes=cache_bytes)
