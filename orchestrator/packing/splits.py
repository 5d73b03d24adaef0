"""Which images are for training, which for validation, by the words in names of files and folders.

There is one list of words, that of Hugging Face's `datasets`, and they count in any case, beside numbers and
other words: ``Training``, ``seg_train``, ``train2017``, ``trainset``, ``val-000.tar``, ``Dev``.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from orchestrator.errors import UsageError

# Columns of splits; the second are taken if all their texts are words for splits.
SPLIT_COLUMNS = ("split", "subset", "partition", "usage", "phase")
PERHAPS_SPLITS = (
    *("data set", "dataset", "data_set", "data_split", "split_name", "set", "set_name", "image_set", "type"),
    *("mode", "role", "purpose", "tvt", "group", "part", "fold"),
)
FLAG_COLUMN = re.compile(r"(is_?)?(train|test|val|valid)(ing|ation)?|in_?(train|test|val)", re.IGNORECASE)
WORDS: Mapping[str, str] = {
    "train": "train|training|trainval",
    "val": "val|valid|validation|dev",
    "test": "test|testing|eval|evaluation",
}
WHOLE = {split: re.compile(rf"(?:{words})(?:set|split|data)?") for split, words in WORDS.items()}
CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")  # TrainSet, imagesTrain
NO_WORD = re.compile(r"[^a-z]+")
TRAIN_VAL = re.compile(r"train[^a-z]val(?![a-z])")


def split_named(name: str) -> str | None:
    """Returns ``train``, ``val`` or ``test`` if a name has a word for it; None if it has none or several."""
    words = NO_WORD.split(TRAIN_VAL.sub("trainval", CAPITAL.sub(" ", name).lower()))
    found = {split for split, pattern in WHOLE.items() if any(map(pattern.fullmatch, words))}
    return found.pop() if len(found) == 1 else None


def splits_in(names: Sequence[str]) -> list[str | None]:
    """Returns what the path of each file says: its uppermost folder that names a split, else its own name.
    What all paths begin with says nothing.
    """
    paths = [name.split("/") for name in names]
    levels = zip(*(path[:-1] for path in paths), strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len({*level}) == 1, levels))
    named = ([split_named(part) for part in path[shared:]] for path in paths)
    return [next(filter(None, each), None) for each in named]


def splits_of_samples(names: Sequence[str]) -> list[str]:
    """Returns what the names of the samples of a file say, if every name says it: a key with its folders, or
    the text in a column of splits.
    """
    whole = [next(filter(None, map(split_named, name.split("/"))), None) for name in names]
    found = splits_in(names), whole
    return next(([split for split in each if split] for each in found if all(each)), [])


def split_column(
    there: Sequence[Any], taken: Sequence[str | None], where: str
) -> tuple[str | None, list[str]]:
    """Returns the column that may hold splits, among those that nothing else is read from, and a note on each
    column that looks like a flag for training.
    """
    free = {name.casefold(): name for name in reversed(there) if isinstance(name, str) and name not in taken}
    column = next((free[name] for name in (*SPLIT_COLUMNS, *PERHAPS_SPLITS) if name in free), None)
    says_nothing = "says nothing here: a column split has train, val, test"
    flags = [name for name in free.values() if FLAG_COLUMN.fullmatch(name)]
    return column, [f"{where}: column {name} {says_nothing}" for name in flags]


def splits_of_rows(column: str, values: Sequence[Any]) -> tuple[list[str], str]:
    """Returns the split of each row by a column of splits, and what is wrong if some values are words for
    splits and others are not; nothing if none is.
    """
    found = [split_named(value) if isinstance(value, str) else None for value in values]
    strange = sorted({str(value) for value, split in zip(values, found, strict=True) if not split})
    if not strange:
        return [split for split in found if split], ""
    if not any(found) or column.casefold() not in SPLIT_COLUMNS:
        return [], ""
    return [], (
        f"column {column} names splits, but {', '.join(map(repr, strange[:5]))} is none: write train, val or"
        " test for each row, leave these rows out, or `ignore_split_names`"
    )


def meaning_of(words: Mapping[str, int], unit: str) -> tuple[dict[str, str], list[str]]:
    """Maps words for splits, with the number of files or images that have each, to ``train`` and ``val``, and
    says in words what else is there. A test split validates only where there is no other.
    """
    if "val" in words:
        count = words.get("test", 0)
        left_out = [f"the test split is left out ({count:,} {unit}{'s' * (count > 1)})"] if count else []
        return {"train": "train", "val": "val"}, left_out
    return {"train": "train", "test": "val"}, ["validation is the test split, because there is no other"]


def resolve(hints: Mapping[str, str | None], where: str) -> tuple[dict[str, str | None], list[str]]:
    """Maps the files that are used to ``train`` or ``val``, all to None if no name, or every name, is for
    training; and says in words what else there is.

    Raises:
        UsageError: if there are none for training, or only some have a split.
    """
    words = Counter(hints.values())
    if len(hints) == 1:  # who names one file means that file
        return dict.fromkeys(hints), []
    if words.keys() <= {None} or words.keys() <= {"train"}:
        return dict.fromkeys(hints), []
    way = "rename the files, leave some out, or pack them with `ignore_split_names`"
    if lost := next((name for name, split in hints.items() if split is None), None):
        raise UsageError(f"{where}: {lost} is neither for training nor for validation, but others are: {way}")
    if "train" not in words:
        named = " and ".join(sorted(map(str, words)))
        raise UsageError(f"{where} has images for {named}, none for train: {way}")
    meaning, notes = meaning_of({split: count for split, count in words.items() if split}, "file")
    return {name: meaning[split] for name, split in hints.items() if split in meaning}, notes


def splits_of(names: Iterable[str], where: str) -> tuple[dict[str, str | None], list[str]]:
    """Resolves what the paths of files say about them. Returns and raises as `resolve` does."""
    names = [*names]
    return resolve(dict(zip(names, splits_in(names), strict=True)), where)
