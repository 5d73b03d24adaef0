"""Which columns of records hold images, labels, captions and keys."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.data.parquet import CAPTION_COLUMNS, IMAGE_COLUMNS, KEY_COLUMNS, LABEL_COLUMNS, Columns
from orchestrator.errors import UsageError

# Kinds of encodings of MDSWriter and LitData.
ENCODED = ("jpeg", "png", "image", "tiff", "tifffile", "file")
ARRAYS = ("ndarray", "numpy", "tensor")
IMAGES = (*ENCODED, "pil", "bytes", *ARRAYS)
WHOLE = ("int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "str_int")
NAMES = (*WHOLE, "str")
PICKLES = ("pkl", "pickle")
NO_PICKLES = "; pickled values are never read, because they can run any code: write int, str or lists"


class Roles(NamedTuple):
    """The columns of the image, the label, the caption and the key. A label or caption may have several, as
    ``labels.0`` and ``labels.1``, or none.
    """

    image: str
    label: list[str]
    caption: list[str]
    key: str | None


def encoding_kind(encoding: str) -> str:
    """Returns an encoding without its parameters: ``ndarray`` of ``ndarray:uint8:32,32,3``."""
    return encoding.partition(":")[0]


def unread(location: str, column: str, encoding: str, what: str = "") -> UsageError:
    hint = NO_PICKLES if encoding_kind(encoding) in PICKLES else ""
    return UsageError(f"{location}: column {column} is {encoding}, which is not read{what}{hint}")


def roles_of(encodings: Mapping[str, str], columns: Columns, location: str, captions: bool) -> Roles:
    """Returns what the columns hold: by the user's names, else by known names, else the only column that is
    an image, and the only one of numbers or names. With `captions`, a label is optional, and none is guessed.

    Raises:
        UsageError: if a column is missing, or the encoding of the image is not read.
    """

    def missing(what: str, named: str | None, known: Sequence[str]) -> UsageError:
        names = ", ".join((named,) if named else known)
        there = ", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())
        hint = (
            NO_PICKLES if any(encoding_kind(encoding) in PICKLES for encoding in encodings.values()) else ""
        )
        return UsageError(f"{location} has no {what} column ({names}); it has {there}{hint}")

    def by_name(named: str | None, known: Sequence[str]) -> list[str]:
        for name in (named,) if named else known:
            if found := [each for each in encodings if f"{each}.".startswith(f"{name}.")]:
                return found
        return []

    def only(*groups: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
        for kinds in groups:
            found = [
                n for n, encoding in encodings.items() if encoding_kind(encoding) in kinds and n not in taken
            ]
            if found:
                return found if len(found) == 1 else []
        return []

    images = by_name(columns.image, IMAGE_COLUMNS)
    image = [name for name in images if encoding_kind(encodings[name]) in IMAGES]
    if not image and not columns.image:
        image = only((*ENCODED, "pil"), ("bytes",), ARRAYS)
    if images and not image:
        raise unread(location, images[0], encodings[images[0]], " as an image")
    if not image:
        raise missing("image", columns.image, IMAGE_COLUMNS)
    keys = [name for known in KEY_COLUMNS for name in encodings if name.rpartition(".")[2] == known]
    keys = [name for name in keys if encoding_kind(encodings[name]) in NAMES]
    label = by_name(columns.label, LABEL_COLUMNS)
    if not label and not captions and not columns.label:
        label = only(NAMES, taken=[*keys, *CAPTION_COLUMNS])
    if not label and not captions:
        raise missing("label", columns.label, LABEL_COLUMNS)
    caption = by_name(columns.caption, CAPTION_COLUMNS) if captions else []
    if not caption and captions and not columns.caption:
        caption = only(("str",), taken=[*label, *keys])
    if not caption and captions:
        raise missing("caption", columns.caption, CAPTION_COLUMNS)
    return Roles(image[0], label, caption, next((name for name in keys if name not in label), None))
