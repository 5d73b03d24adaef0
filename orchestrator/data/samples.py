"""The table that packing starts from: samples with their labels, keys and splits.

Labels, splits and order depend on the names of files and samples, never on the order in which they were
listed.
"""

import fnmatch
import hashlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.errors import UsageError

VALIDATION = ("val", "valid", "validation", "test")  # the first that a source has is used
SPLIT_WORD = re.compile(r"(?:^|[^a-z])(train|validation|valid|val|test)(?=$|[^a-z])")
IMAGE_FILES = re.compile(r"jpe?g|jpe|jfif|png|webp|bmp|gif|tiff?|p[pgbn]m", re.IGNORECASE)
MAX_CLASSES = 1_000_000
READERS = 16  # parallel requests: S3 answers each slowly

# ``execute(work, tasks)`` yields the results of `work` for all tasks, in any order, here or on other
# machines.
Execute = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]

log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """An image to be packed.

    image: the encoded bytes, or their place, which the source's `fetch` reads.
    label: the class's number; before `assign_splits`, a number or a name.
    size: bytes of the image, 0 if the listing does not say.
    split: ``train`` or ``val``; None if the source has no splits.
    """

    image: Any
    label: Any
    key: str
    size: int = 0
    split: str | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Samples to be packed, in their order.

    classes: names by label.
    splits: ``train`` and ``val`` -> samples.
    fetch: yields the encoded bytes of images, in order, or why they cannot be read; runs on any node.
    skipped: files and samples that the listing left out, with the reason.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Sample]]
    fetch: Callable[[Sequence[Any]], Iterable[bytes | BadImage]]
    skipped: tuple[str, ...] = ()


def assign_splits(
    samples: Sequence[Sample],
    *,
    val_frac: float,
    order: Literal["hash", "listed"],
    names: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], dict[str, list[Sample]]]:
    """Returns the classes, and the samples of ``train`` and ``val`` with class numbers as labels.

    If the samples have no splits, a sample is for validation if the hash of its key is below `val_frac`,
    whatever other samples there are; but a class of two or more images has at least one image in each split.
    The order ``hash`` mixes the classes.

    Raises:
        UsageError: for labels that are not class numbers, a single class, or a split without images.
    """
    classes = classes_of({sample.label: sample.key for sample in samples}, names)
    if len(classes) < 2:
        raise UsageError(f"only one class ({', '.join(classes) or 'no images'}): there is nothing to learn")
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, list[Sample]] = {"train": [], "val": []}
    validation = _validation(samples, val_frac) if all(s.split is None for s in samples) else set()
    for sample in sorted(samples, key=lambda s: digest(s.key)[8:]) if order == "hash" else samples:
        label = sample.label if isinstance(sample.label, int) else numbers[sample.label]
        split = sample.split or ("val" if sample.key in validation else "train")
        splits[split].append(sample._replace(label=label, split=split))
    for split, found in splits.items():
        if not found:
            raise UsageError(
                f"none of the {len(samples)} images is for {split}: add images, or another --val-frac"
            )
    return classes, splits


def _validation(samples: Sequence[Sample], val_frac: float) -> set[str]:
    by_class: dict[int | str, list[str]] = defaultdict(list)
    for sample in samples:
        by_class[sample.label].append(sample.key)
    chosen: set[str] = set()
    for keys in by_class.values():
        val = [key for key in keys if int.from_bytes(digest(key)[:8], "big") < val_frac * 2**64]
        if len(keys) > 1 and not val:
            val = [min(keys, key=digest)]
        elif len(keys) > 1 and len(val) == len(keys):
            val.remove(max(keys, key=digest))
        chosen.update(val)
    return chosen


def classes_of(labels: Mapping[int | str, str], names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Returns class names by number: `names`, else the sorted labels, else ``"0"`` to the largest number.

    `labels` maps each label to the key of a sample that has it.

    Raises:
        UsageError: for numbers below 0 or without a name, and names beside numbers.
    """
    texts = [label for label in labels if isinstance(label, str)]
    numbers = [label for label in labels if isinstance(label, int)]
    if not numbers:
        return tuple(sorted(texts))
    if texts:
        raise UsageError(
            f"some labels are numbers ({numbers[0]} of {labels[numbers[0]]}),"
            f" some are names ({texts[0]!r} of {labels[texts[0]]})"
        )
    count = len(names) if names is not None else min(max(numbers) + 1, MAX_CLASSES)
    for number in numbers:
        if not 0 <= number < count:
            raise UsageError(f"label {number} of {labels[number]}: classes are numbered 0 to {count - 1}")
    return tuple(names) if names is not None else tuple(map(str, range(count)))


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


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
    return folder, matching


def may_be_image(name: str) -> bool:
    """Judges a file by its extension; a file without an extension may be an image."""
    _, dot, extension = name.rpartition("/")[2].rpartition(".")
    return not dot or IMAGE_FILES.fullmatch(extension) is not None


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
