"""The one reader of labels: what a source says of an image's classes, in whatever way it is written.

A label is a class's number, a class's name, or None: the image has no label. Text is read without blanks and
marks around it and in Unicode's form NFC, so that one name is one class whoever wrote it.
"""

import ast
import json
import math
import re
import unicodedata
from collections import Counter, defaultdict
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
NUMBER = r"[+-]?(?:\d+(?:e[+-]?\d+)?|\d+\.\d*(?:e[+-]?\d+)?|\.\d+)"
ONE_NUMBER = re.compile(NUMBER, re.IGNORECASE | re.ASCII)
BETWEEN = re.compile(r"[\s,;|]+")
NUMBERS = re.compile(rf"{NUMBER}(?:{BETWEEN.pattern}{NUMBER})+", re.IGNORECASE | re.ASCII)
BOOLEANS = re.compile(rf"(?:true|false)(?:{BETWEEN.pattern}(?:true|false))+", re.IGNORECASE)
THOUSANDS = re.compile(r"\d,0\d")  # 1,000 is no list of 1 and 0


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
    """Returns a class's name without blanks and marks around it, in NFC. Raises ValueError if it has several
    lines, or characters that are no text.
    """
    name = unicodedata.normalize("NFC", text).replace("\t", " ").strip().strip(MARKS).strip()
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise ValueError(f"label {name!r} has several lines, or is no text")
    return name


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
    if text[:1] + text[-1:] in ("[]", "()", "{}") and (text[0] != "(" or text[1:2].isdecimal()):
        return _listed(text)
    if (several := _several(text)) is not None:
        return several
    number = _number(text)
    if not typed or number == UNLABELLED:
        return [number]
    is_whole = isinstance(number, float) and number.is_integer()
    return [str(int(number)) if is_whole else text]


def _listed(text: str) -> list[Any]:
    """Reads a list as JSON, Python or numpy prints it."""
    inner = text[1:-1].strip()
    if (several := _several(inner)) is not None:
        return several
    for read in (json.loads, ast.literal_eval):
        try:
            return listed_labels(read(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise ValueError(f"label {text!r} is a list, or more, that cannot be read")


def _several(text: str) -> list[Any] | None:
    """Reads numbers, or True and False, with blanks or signs between them; None for any other text."""
    if BOOLEANS.fullmatch(text):
        return [word.lower() == "true" for word in BETWEEN.split(text)]
    if not NUMBERS.fullmatch(text):
        return None
    if THOUSANDS.search(text):
        raise ValueError(f"label {text!r} is a list of numbers, or one with a sign between its thousands")
    return [_number(each) for each in BETWEEN.split(text)]


def _unwrapped(text: str) -> str:
    # Lists may go over several lines.
    flat = " ".join(text.split())
    text = name_of(flat if NUMBERS.fullmatch(flat) or flat[:1] in ("[", "(") else text)
    if quoted := QUOTED.fullmatch(text):
        return _unwrapped(quoted[2])
    printed = PRINTED.fullmatch(text)
    return _unwrapped(printed[1]) if printed else text


def _number(text: str) -> int | float | str:
    if text.isdecimal():  # the digits of any script
        return int(text)
    if not ONE_NUMBER.fullmatch(text):
        return text
    return int(text) if WHOLE.fullmatch(text) else float(text)


def read_labels(sets: Sequence[Sequence[Any]], keys: Sequence[str], where: str) -> Labels:
    """Reads the labels of images, each a list by `listed_labels`. Lists of a 0 or 1 for every class are read
    as the classes that are 1; lists of classes never look so, because these name no class twice.

    Raises:
        UsageError: for numbers that are not whole, lists of a number for every class which are not all 0 or
            1, and more than `MAX_LABELS` classes of an image.
    """
    known = [labels for labels in sets if any(map(_is_known, labels))]
    if hot := _length_of_hot(known, where):
        found = [[n for n, each in enumerate(labels) if _is_known(each) and int(each)] for labels in sets]
    else:
        found = [_distinct(labels, key, where) for labels, key in zip(sets, keys, strict=True)]
    others = [tuple(labels[1:]) for labels in found]
    return Labels([labels[0] if labels else None for labels in found], others if any(others) else [], hot)


def _is_known(label: Any) -> bool:
    return not (label is None or label != label or (isinstance(label, str) and label.casefold() in MISSING))


def _length_of_hot(sets: Sequence[Sequence[Any]], where: str) -> int:
    """Returns the length of the lists if they hold a 0 or 1 for every class, else 0."""
    length = len(sets[0]) if sets else 0
    alike = length > 1 and all(len(labels) == length for labels in sets)
    values = {label for labels in sets for label in labels} if alike else set()
    repeated = next((labels for labels in sets if len({*labels}) < len(labels)), None)
    if alike and (values <= {0, 1} or values <= {"0", "1"}):
        return length if repeated or all(isinstance(label, bool) for label in sets[0]) else 0
    numbers = all(label is None or isinstance(label, int | float) for label in values)
    others = any(isinstance(value, float) or value in (None, UNLABELLED) for value in values)
    if alike and length > 2 and repeated and numbers and others:
        raise UsageError(
            f"{where}: every image has a number for each of {length} classes, such as {_shown(repeated)}:"
            " give 1 for a class that the image has and 0 for any other, or list the classes that it has"
        )
    # A list of classes names none twice.
    odd = (labels for labels in sets if len(labels) > 2 and {*labels} <= {0, 1})
    if (first := next(odd, None)) is not None:
        raise UsageError(
            f"{where}: {_shown(first)} has a 0 or 1 for every class, but not all lists are so, or as"
            " long: list the classes that each image has, or a 0 or 1 for every class in every list"
        )
    return 0


def _shown(labels: Sequence[Any]) -> str:
    return f"[{', '.join(map(repr, labels[:SHOWN]))}{', ..' * (len(labels) > SHOWN)}]"


def _distinct(labels: Sequence[Any], key: str, where: str) -> list[Label]:
    if len(labels) > MAX_LABELS:
        raise UsageError(
            f"{where}: {key} lists {len(labels)} labels, more than {MAX_LABELS}: list the classes that the"
            " image has, or a 0 or 1 for every class in every list"
        )
    checked = (_checked(label, key, where) for label in labels)
    return [label for label in dict.fromkeys(checked) if label is not None]


def _checked(label: Any, key: str, where: str) -> Label:
    if not _is_known(label) or label == UNLABELLED:
        return None
    if isinstance(label, str):
        return label
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
        plain = "".join(name.casefold().replace("\u00ad", "").split())
        groups[str(float(plain)) if ONE_NUMBER.fullmatch(plain) else plain].append(name)
    if twins := [" and ".join(map(repr, group)) for group in groups.values() if len(group) > 1]:
        notes.append(f"classes differ in case, blanks or zeros alone: {', '.join(twins[:SHOWN])}")
    signs = {sign: [name for name in classes if sign in name.strip(sign)] for sign in "|;"}
    for sign, joined in signs.items():
        parts = Counter(part for name in joined for part in {*name.split(sign)})
        if any(count > 1 or part in classes for part, count in parts.items()):
            notes.append(
                f"{joined[0]!r} is one class, not the classes that it names: list them, one in a row"
            )
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
