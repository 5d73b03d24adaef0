"""The files that a source has, and reading many of them."""

import fnmatch
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.errors import UsageError

# Folders and files that systems and programs put beside images, in lower case.
SIDE_FOLDERS = (
    *(
        "@eadir",
        "#recycle",
        "$recycle.bin",
        "recycler",
        "system volume information",
        "lost+found",
        "__macosx",
    ),
    *("thumbnails", "_thumbnails"),
)
SIDE_FILES = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r")
PARQUET = re.compile(r"\.(parquet|pq)$", re.IGNORECASE)
SHARD_NAMES = re.compile(r"\.(tar|tgz|tbz2?|txz|parquet|pq)\b[^/]*$", re.IGNORECASE)
READERS = 16  # parallel requests: object storages answer slowly

log = logging.getLogger(__name__)


def files_below(location: str, notes: list[str] | None = None) -> dict[str, int]:
    """Lists every file at any depth but hidden files, and what systems and programs put beside images: path
    below `location` -> bytes, sorted. Folders of these are said in `notes`, once by name.

    Raises:
        UsageError: if there are no files, or a file name is not UTF-8.
    """
    there = storage.files(location)
    visible = {path: size for path, size in there.items() if not is_hidden(path)}
    side = Counter(
        part for path in there if path not in visible for part in path.split("/")[:-1] if _is_side(part)
    )
    if side and notes is not None:
        folders = ", ".join(f"{name} ({count})" for name, count in side.items())
        notes.append(f"what systems put beside images is passed over: the files in {folders}")
    for path in visible:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{location}: file name {path!r} is not UTF-8: rename it") from None
    if not visible:
        if storage.size(location) is not None:
            raise UsageError(f"{location} is a file, not a folder")
        is_there = not storage.is_local(location) or os.path.isdir(location)
        raise UsageError(f"no files below {location}" if is_there else f"no folder {location}")
    return visible


def shards_at(path: str, *extensions: str) -> tuple[str, dict[str, int]]:
    """Returns a folder, and the shards below it -> bytes: one file, all files of a folder with these
    extensions, or all files that match a pattern.

    Raises:
        UsageError: if there are no such files.
    """
    path = storage.absolute(path).rstrip("/")
    if (size := storage.size(path)) is not None:
        folder, _, name = path.rpartition("/")
        return folder, {name: size}
    is_pattern = any(c in path for c in "*?[") and not (storage.is_local(path) and os.path.isdir(path))
    folder = re.split(r"/[^/]*[*?\[]", path)[0] if is_pattern else path
    found = files_below(folder)
    matching = {
        name: size
        for name, size in found.items()
        if (fnmatch.fnmatchcase(f"{folder}/{name}", path) if is_pattern else name.endswith(extensions))
    }
    if not matching:
        raise UsageError(
            f"no {' or '.join(extensions)} files at {path}; there are {', '.join([*found][:3])} .."
        )
    passed = [name for name in found if SHARD_NAMES.search(name) and name not in matching]
    if passed and not is_pattern:
        what = "files are passed over, whose names do not end in"
        ends, shown = " or ".join(extensions), ", ".join(passed[:3])
        packed = " (unpack compressed tars)" if any(not PARQUET.search(name) for name in passed) else ""
        log.warning("%s: %d %s %s%s: %s", folder, len(passed), what, ends, packed, shown)
    return folder, matching


def read_files(locations: Sequence[str]) -> Iterator[bytes | BadImage]:
    """Reads several files at a time. A missing file is a BadImage; raises OSError if storage fails."""
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(_read_file, locations)


def _read_file(location: str) -> bytes | BadImage:
    try:
        return storage.read_bytes(location)
    except FileNotFoundError:
        return BadImage("no such file")
    except PermissionError as error:
        return BadImage(error.strerror or str(error))


def is_hidden(path: str) -> bool:
    """Returns whether a file is hidden, or is what a system or program put beside images."""
    *folders, name = path.split("/")
    hidden = any(part.startswith(".") for part in (*folders, name))
    return hidden or name.lower() in SIDE_FILES or any(map(_is_side, folders))


def _is_side(folder: str) -> bool:
    return folder.lower() in SIDE_FOLDERS
