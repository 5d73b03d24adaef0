"""Which files there are below a place, and the splits that their names tell."""

import fnmatch
import logging
import os
import re
from collections.abc import Iterator, Mapping

from orchestrator import storage
from orchestrator.errors import UsageError

VALIDATION = ("val", "valid", "validation", "test")  # of several, the first that is there is taken
WORD = re.compile(r"(?:^|[^a-z])(train|validation|valid|val|test)(?=$|[^a-z])")

log = logging.getLogger(__name__)


def files_below(location: str) -> dict[str, int]:
    """Every file at any depth, but hidden ones: path below `location` -> bytes, sorted. Links are followed.

    Raises:
        UsageError: if there is none, or a file name is not UTF-8.
    """
    found = dict(_walk(location)) if storage.is_local(location) else storage.files(location)
    shown = {path: size for path, size in sorted(found.items()) if not is_hidden(path)}
    if not shown:
        there = not storage.is_local(location) or os.path.isdir(location)
        if storage.size(location) is not None:
            raise UsageError(f"{location} is a file, not a folder")
        raise UsageError(f"no files below {location}" if there else f"no folder {location}")
    return shown


def is_hidden(path: str) -> bool:
    names = path.split("/")
    return any(name.startswith(".") for name in names) or names[-1] in ("Thumbs.db", "desktop.ini")


def shards_at(path: str, *extensions: str) -> tuple[str, dict[str, int]]:
    """A folder, and name below it -> bytes: a file, those in a folder, or those that a pattern matches.

    Raises:
        UsageError: if there is none.
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
    return folder, matching


def split_of(path: str) -> str | None:
    """The split that a folder, or a word of the file's name, tells: train, val, valid, validation or test."""
    *folders, name = path.lower().split("/")
    for folder in folders:
        if folder in ("train", *VALIDATION):
            return folder
    word = WORD.search(name)
    return word[1] if word else None


def by_split(told: Mapping[str, str | None], where: str) -> dict[str, str | None]:
    """What is used -> ``train`` or ``val``; all of it -> None where no split is told, or ``train`` alone.

    Raises:
        UsageError: if training images are missing, or something is of no split while others are of one.
    """
    splits = {split for split in told.values() if split}
    if splits <= {"train"} and len({*told.values()}) == 1:
        return dict.fromkeys(told)
    if lost := next((name for name, split in told.items() if split is None), None):
        raise UsageError(f"{where}: {lost} is neither for training nor for validation, but others are")
    if unknown := sorted(splits - {"train", *VALIDATION}):
        raise UsageError(f"{where}: split {unknown[0]!r} is none of train, {', '.join(VALIDATION)}")
    if "train" not in splits:
        raise UsageError(f"{where} has images for {' and '.join(sorted(splits))}, none for train")
    val = next(name for name in VALIDATION if name in splits)
    if rest := sorted(splits - {"train", val}):
        log.warning("%s: validation is %s; left out: %s", where, val, ", ".join(rest))
    names = {"train": "train", val: "val"}
    return {name: names[split] for name, split in told.items() if split in names}


def _walk(location: str) -> Iterator[tuple[str, int]]:
    """Unlike `storage.files`, with links to nothing, and none of those that lead back to their parents."""
    for folder, below, names in os.walk(location, followlinks=True):
        parents = f"{os.path.realpath(folder)}/"
        below[:] = [
            name
            for name in below
            if not parents.startswith(f"{os.path.realpath(os.path.join(folder, name))}/")
        ]
        for name in names:
            path = os.path.join(folder, name)
            try:
                path.encode()
            except UnicodeEncodeError:
                raise UsageError(f"file name {path!r} is not UTF-8: rename it") from None
            yield (
                os.path.relpath(path, location),
                os.path.getsize(path) if os.path.exists(path) else 0,
            )
