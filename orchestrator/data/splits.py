"""Which images are for training, which for validation, by the words in names of files and folders.

There is one list of words, that of Hugging Face's `datasets`, and they count in any case, beside numbers and
other words: ``Training``, ``seg_train``, ``train2017``, ``trainset``, ``val-000.tar``, ``Dev``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from orchestrator.errors import UsageError

Split = Literal["train", "val", "test"]

SPLIT_COLUMNS = ("split", "subset", "partition", "usage", "phase", "data set", "dataset", "data_set", "set")
WORDS: Mapping[Split, str] = {
    "train": "train|training|trainval",
    "val": "val|valid|validation|dev",
    "test": "test|testing|eval|evaluation",
}
WHOLE = {split: re.compile(rf"(?:{words})(?:set|split|data)?") for split, words in WORDS.items()}
CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")  # TrainSet, imagesTrain
NO_WORD = re.compile(r"[^a-z]+")


def split_named(name: str) -> Split | None:
    """Returns the split that a name has a word for; None if it has none, or words for several."""
    words = NO_WORD.split(CAPITAL.sub(" ", name).lower())
    found = {split for split, pattern in WHOLE.items() if any(map(pattern.fullmatch, words))}
    return found.pop() if len(found) == 1 else None


def splits_in(names: Sequence[str]) -> list[Split | None]:
    """Returns what the path of each file says: its uppermost folder that names a split, else its own name.
    What all paths begin with says nothing.
    """
    paths = [name.split("/") for name in names]
    folders = [path[:-1] for path in paths]
    shared = 0
    while len({*(tuple(each[: shared + 1]) for each in folders)}) == 1 and len(folders[0]) > shared:
        shared += 1
    named = ([split_named(part) for part in path[shared:]] for path in paths)
    return [next((split for split in splits if split), None) for splits in named]


def resolve(hints: Mapping[str, Split | None], where: str) -> tuple[dict[str, str | None], list[str]]:
    """Maps the files, or images, that are used to ``train`` or ``val``, all to None if no name, or every name,
    is for training; and says in words what else there is.

    Raises:
        UsageError: if there are none for training, or only some have a split.
    """
    splits = {split for split in hints.values() if split}
    if splits <= {"train"} and len({*hints.values()}) <= 1:
        return dict.fromkeys(hints), []
    if lost := next((name for name, split in hints.items() if split is None), None):
        raise UsageError(
            f"{where}: {lost} is neither for training nor for validation by its name, but others are: rename"
            " it, leave it out, or let names say nothing about splits (--ignore-split-names)"
        )
    if "train" not in splits:
        raise UsageError(
            f"{where} has images for {' and '.join(sorted(splits))}, none for train; if these words are no"
            " splits, let names say nothing about them (--ignore-split-names)"
        )
    notes = []
    if splits == {"train", "test"}:
        notes.append("validation is the test split, because there is no other: choose no model by it")
        return {n: "val" if split == "test" else split for n, split in hints.items()}, notes
    if left_out := sum(split == "test" for split in hints.values()):
        notes.append(f"the test split is left out ({left_out})")
    return {name: split for name, split in hints.items() if split != "test"}, notes


def of_column(values: Iterable[str | None]) -> list[Split | None] | None:
    """Returns the split of each row of a column of splits, None unless every value names one."""
    found = [split_named(value) if value else None for value in values]
    return found if found and all(found) else None
