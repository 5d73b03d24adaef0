"""The one reader of labels: what a source says of an image's classes, in whatever way it is written.

A label is a class's number, a class's name, or None: the image has no label. Text is read without blanks and
marks around it and in Unicode's form NFC, so that one name is one class whoever wrote it.
"""

import ast
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from orchestrator.errors import UsageError

Label = int | str | None

NO_LABEL = -1  # the number that data sets give to images without a label
MISSING = ("", "nan", "<na>")  # what pandas and numpy write where there is no value, in any case
MAX_LABELS = 64  # of an image; a longer list is a number for every class
SHOWN = 5  # names in a message
MARKS = "\ufeff\u200b\u2060\0"  # of byte order, blanks of no width, and the end of a text in C
QUOTED = re.compile(r"b?(['\"])([^'\"]*)\1")
PRINTED = re.compile(r"(?:tensor|array|(?:np|numpy|torch)\.\w+)\((\[.*\]|[^\s,()]+)(?:,.*)?\)", re.DOTALL)
NUMBER = r"[+-]?(?:\d+|\d+\.\d*(?:e[+-]?\d+)?|\.\d+)"
ONE_NUMBER = re.compile(NUMBER, re.IGNORECASE | re.ASCII)
NUMBERS = re.compile(rf"{NUMBER}(?:[\s,]+{NUMBER})+", re.IGNORECASE | re.ASCII)


class Labels(NamedTuple):
    """The labels of images that are listed together.

    first: the first label of each image, None if it has none.
    others: the further labels of each image; none if every image has at most one.
    hot: the length of all lists, if they hold a 0 or 1 for every class; else 0.
    """

    first: list[Label]
    others: list[tuple[Label, ...]]
    hot: int = 0


def name_of(text: str) -> str:
    """Returns a class's name without blanks and marks around it, in NFC."""
    return unicodedata.normalize("NFC", text).strip().strip(MARKS).strip()


def labels_of(value: Any, *, typed: bool = True) -> list[Any]:
    """Returns the numbers, names and Nones that a value lists, for `read_labels`.

    typed: whether the value has a type, as in a column or in JSON, where a text is a name also if it is that
    of a number. Else it is a text in a file: ``3``, ``3.0``, ``"3"``, ``cat``, ``0 3``.

    Raises:
        ValueError: for what is neither a number nor text nor a list of either.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, list | tuple):
        return [label for each in value for label in labels_of(each)]
    if value is None or isinstance(value, int | float):
        return [value]
    if not isinstance(value, str):
        raise ValueError(f"label {value!r} is neither a number nor a name")
    value.encode()  # JSON can name half a character
    text = _unwrapped(value)
    if text.startswith("[") and text.endswith("]"):
        if NUMBERS.fullmatch(inner := text[1:-1].strip()):
            return [_number(each) for each in re.split(r"[\s,]+", inner)]
        try:
            return labels_of(ast.literal_eval(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return [text]
    if not typed and NUMBERS.fullmatch(text):
        return [_number(each) for each in re.split(r"[\s,]+", text)]
    number = _number(text)
    if not typed or number == NO_LABEL:
        return [number]
    is_whole = isinstance(number, float) and number.is_integer()
    return [str(int(number)) if is_whole else text]


def _unwrapped(text: str) -> str:
    text = name_of(text)
    if quoted := QUOTED.fullmatch(text):
        return _unwrapped(quoted[2])
    printed = PRINTED.fullmatch(text)
    return _unwrapped(printed[1]) if printed else text


def _number(text: str) -> int | float | str:
    if not ONE_NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)


def read_labels(sets: Sequence[Sequence[Any]], keys: Sequence[str], where: str) -> Labels:
    """Reads the labels of images, each a list by `labels_of`. Lists of a 0 or 1 for every class are read as
    the classes that are 1; lists of classes never look so, because these name no class twice.

    Raises:
        UsageError: for numbers that are not whole, lists of a number for every class which are not all 0 or
            1, and more than `MAX_LABELS` classes of an image.
    """
    if hot := _length_of_hot(sets, where):
        found = [[number for number, each in enumerate(labels) if int(each)] for labels in sets]
    else:
        found = [_distinct(labels, key, where) for labels, key in zip(sets, keys, strict=True)]
    others = [tuple(labels[1:]) for labels in found]
    return Labels([labels[0] if labels else None for labels in found], others if any(others) else [], hot)


def _length_of_hot(sets: Sequence[Sequence[Any]], where: str) -> int:
    """Returns the length of the lists if they hold a 0 or 1 for every class, else 0."""
    length = len(sets[0]) if sets else 0
    if length < 2 or any(len(labels) != length for labels in sets):
        return 0
    values = {label for labels in sets for label in labels}
    repeated = next((labels for labels in sets if len({*labels}) < length), None)
    if values <= {0, 1} or values <= {"0", "1"}:
        return length if repeated or all(isinstance(label, bool) for label in sets[0]) else 0
    numbers = all(label is None or isinstance(label, int | float) for label in values)
    if length > 2 and repeated and numbers and any(isinstance(v, float) or v in (None, -1) for v in values):
        raise UsageError(
            f"{where}: every image has a number for each of {length} classes, such as {list(repeated)}: give 1"
            " for a class that the image has and 0 for any other class, or list the classes that it has"
        )
    return 0


def _distinct(labels: Sequence[Any], key: str, where: str) -> list[Label]:
    if len(labels) > MAX_LABELS:
        raise UsageError(
            f"{where}: {key} lists {len(labels)} labels, more than {MAX_LABELS}: list the classes that the image"
            " has, or a 0 or 1 for every class in every list"
        )
    checked = (_checked(label, key, where) for label in labels)
    return [label for label in dict.fromkeys(checked) if label is not None]


def _checked(label: Any, key: str, where: str) -> Label:
    if isinstance(label, str):
        return None if label.casefold() in MISSING else label
    if label is None or label == NO_LABEL or (isinstance(label, float) and math.isnan(label)):
        return None
    if label != (number := int(label) if math.isfinite(label) else NO_LABEL):
        raise UsageError(
            f"{where}: label {label} of {key} is not a whole number: a label is the number or name of a class"
        )
    return number


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names of classes, by number if all are numbers."""
    names = list(names)
    by_number = all(ONE_NUMBER.fullmatch(name) for name in names)
    return sorted(names, key=lambda name: (float(name) if by_number else 0, name))


def alike(names: Iterable[str]) -> list[list[str]]:
    """Returns the names that differ in case or in blanks alone, as groups."""
    groups = defaultdict[str, list[str]](list)
    for name in names:
        groups["".join(name.casefold().split())].append(name)
    return [sorted(group) for group in groups.values() if len(group) > 1]
