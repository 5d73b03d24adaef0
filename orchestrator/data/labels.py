"""The one reader of labels: what a source says of an image's classes, in whatever way it is written.

A label is a class's number, a class's name, or None: the image has no label. Text is read without blanks and
marks around it and in Unicode's form NFC, so that one name is one class whoever wrote it.
"""

import ast
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from moe.config import did_you_mean
from orchestrator.errors import UsageError

Label = int | str | None

UNLABELLED = -1  # the number that data sets give to images without a label
MISSING = ("", "nan", "<na>")  # what pandas and numpy write where there is no value, in any case
MAX_CLASSES = 1_000_000
MAX_LABELS = 64  # of an image; a longer list is a number for every class
SHOWN = 5  # names in a message
MARKS = "\ufeff\u200b\u2060\0"  # of byte order, blanks of no width, and the end of a text in C
QUOTED = re.compile(r"b?(['\"])([^'\"]*)\1")
PRINTED = re.compile(r"(?:tensor|array|(?:np|numpy|torch)\.\w+)\((\[.*\]|[^\s,()]+)(?:,.*)?\)", re.DOTALL)
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
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


def listed_labels(value: Any, *, typed: bool = True) -> list[Any]:
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
        return [label for each in value for label in listed_labels(each)]
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
            return listed_labels(ast.literal_eval(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return [text]
    if not typed and NUMBERS.fullmatch(text):
        return [_number(each) for each in re.split(r"[\s,]+", text)]
    number = _number(text)
    if not typed or number == UNLABELLED:
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
    """Reads the labels of images, each a list by `listed_labels`. Lists of a 0 or 1 for every class are read
    as the classes that are 1; lists of classes never look so, because these name no class twice.

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
            f"{where}: every image has a number for each of {length} classes, such as {list(repeated)}:"
            " give 1 for a class that the image has and 0 for any other, or list the classes that it has"
        )
    return 0


def _distinct(labels: Sequence[Any], key: str, where: str) -> list[Label]:
    if len(labels) > MAX_LABELS:
        raise UsageError(
            f"{where}: {key} lists {len(labels)} labels, more than {MAX_LABELS}: list the classes that the"
            " image has, or a 0 or 1 for every class in every list"
        )
    checked = (_checked(label, key, where) for label in labels)
    return [label for label in dict.fromkeys(checked) if label is not None]


def _checked(label: Any, key: str, where: str) -> Label:
    if isinstance(label, str):
        return None if label.casefold() in MISSING else label
    if label is None or label == UNLABELLED or (isinstance(label, float) and math.isnan(label)):
        return None
    if label != (number := int(label) if math.isfinite(label) else UNLABELLED):
        raise UsageError(
            f"{where}: label {label} of {key} is not a whole number: a label is the number or name of a class"
        )
    return number


def sorted_names(names: Iterable[str]) -> list[str]:
    """Sorts names of classes, by number if all are numbers."""
    names = list(names)
    by_number = all(ONE_NUMBER.fullmatch(name) for name in names)
    return sorted(names, key=lambda name: (float(name) if by_number else 0, name))


def class_numbers(
    labels: Mapping[Any, str], names: Sequence[str] | None = None, hot: int = 0
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Returns the names of classes by number, and the number of each label: `names`, else the sorted labels,
    else ``"0"`` to the largest number.

    labels: each label -> the key of an image that has it.
    hot: the length of the lists that the labels come from, if they are a 0 or 1 for every class.

    Raises:
        UsageError: for numbers below 0 or without a name, and names beside numbers.
    """
    texts = [label for label in labels if isinstance(label, str)]
    numbers = {label: int(label) for label in labels if not isinstance(label, str) or WHOLE.fullmatch(label)}
    if len(texts) == len(labels):
        classes = sorted_names(texts)
        number_of = {name: number for number, name in enumerate(classes)}
        return tuple(classes), {label: number_of[label] for label in labels}
    if len(numbers) < len(labels):
        number = next(label for label in labels if not isinstance(label, str))
        text = next(label for label in texts if label not in numbers)
        raise UsageError(
            f"some labels are numbers ({number} of {labels[number]}),"
            f" some are names ({text!r} of {labels[text]})"
        )
    if names is not None and hot not in (0, len(names)):
        raise UsageError(
            f"lists have a 0 or 1 for each of {hot} classes, but {len(names)} classes have names"
        )
    count = len(names) if names is not None else hot or min(max(numbers.values()) + 1, MAX_CLASSES)
    for label, number in numbers.items():
        if not 0 <= number < count:
            raise UsageError(
                f"label {number} of {labels[label]}: classes are numbered 0 to {count - 1}, and -1 says that"
                " an image has none"
            )
    return tuple(names) if names is not None else tuple(map(str, range(count))), numbers


def notes_on_classes(classes: Sequence[str], hot: int) -> list[str]:
    """Returns what may not be meant so about names of classes, in words."""
    notes = []
    if hot:
        notes.append(f"every list has a 0 or 1 for each of {hot} classes: images have the classes that are 1")
    groups = defaultdict[str, list[str]](list)
    for name in classes:
        groups["".join(name.casefold().split())].append(name)
    if twins := [" and ".join(map(repr, group)) for group in groups.values() if len(group) > 1]:
        notes.append(f"classes differ in case or blanks alone: {', '.join(twins[:SHOWN])}")
    joined = [
        name
        for name in classes
        if len(parts := re.split(r"\s*[|;,]\s*", name)) > 1 and {*parts} <= {*classes}
    ]
    if joined:
        notes.append(f"{joined[0]!r} is one class, not the classes that it names: list them, one in a row")
    return notes


def refuse_unlearnt(alone: Sequence[str], trained: Sequence[str], validated: Sequence[str]) -> NoReturn:
    """Raises UsageError for the classes `alone`, of which validation has images and training has none."""
    near = did_you_mean(alone[0], trained)
    if len(validated) == 1:
        near = (
            "; if validation is not sorted into folders of classes, as in Tiny ImageNet, whose"
            " val_annotations.txt has the classes, sort it so, or list both splits in a csv file"
        )
    raise UsageError(
        f"validation has images of {len(alone)} classes without training images ({', '.join(alone[:SHOWN])}):"
        f" they could not be learned{near}"
    )
