"""The files that a source has, which of them validate, and reading many of them."""

import fnmatch
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.errors import UsageError

VALIDATION = ("val", "valid", "validation", "test")  # the first that a source has is used
SPLIT_WORD = re.compile(r"(?:^|[^a-z])(train|validation|valid|val|test)(?=$|[^a-z])")
SHARD_NAMES = re.compile(r"\.(tar|tgz|tbz2?|txz|parquet|pq)\b[^/]*$", re.IGNORECASE)
READERS = 16  # parallel requests: object storages answer slowly

log = logging.getLogger(__name__)


def splits_of(names: Iterable[str], where: str) -> dict[str, str | None]:
    """Maps files to ``train`` or ``val`` by a folder or a word in their names, as `resolve_splits` does."""
    hints = {}
    for name in names:
        *folders, file = name.lower().split("/")
        word = SPLIT_WORD.search(file)
        folder = next((folder for folder in folders if folder in ("train", *VALIDATION)), None)
        hints[name] = folder or (word[1] if word else None)
    return resolve_splits(hints, where)


def resolve_splits(hints: Mapping[str, str | None], where: str) -> dict[str, str | None]:
    """Maps the files that are used to ``train`` or ``val``; all to None if no file, or every file, is for
    training. `hints` maps each file to ``train``, a name in `VALIDATION`, or None.

    Raises:
        UsageError: if there are no training images, or only some files have a split.
    """
    splits = {split for split in hints.values() if split}
    if splits <= {"train"} and len({*hints.values()}) == 1:
        return dict.fromkeys(hints)
    if lost := next((name for name, split in hints.items() if split is None), None):
        raise UsageError(f"{where}: {lost} is neither for training nor for validation, but others are")
    if "train" not in splits:
        raise UsageError(f"{where} has images for {' and '.join(sorted(splits))}, none for train")
    val = next(name for name in VALIDATION if name in splits)
    if rest := sorted(splits - {"train", val}):
        log.warning("%s: validation is %s; left out: %s", where, val, ", ".join(rest))
    names = {"train": "train", val: "val"}
    return {name: names[split] for name, split in hints.items() if split in names}


def files_below(location: str) -> dict[str, int]:
    """Lists every file at any depth but hidden files: path below `location` -> bytes, sorted.

    Raises:
        UsageError: if there are no files, or a file name is not UTF-8.
    """
    visible = {path: size for path, size in storage.files(location).items() if not _is_hidden(path)}
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
        log.warning("%s: %d %s %s (unpack compressed tars): %s", folder, len(passed), what, ends, shown)
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


def _is_hidden(path: str) -> bool:
    *folders, name = path.split("/")
    return any(part.startswith(".") for part in (*folders, name)) or name in ("Thumbs.db", "desktop.ini")
