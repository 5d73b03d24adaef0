"""Samples of a tar as WebDataset writes it: members of one name but for the extension are one sample.

Only plain tars are read. Nothing is extracted: a sample says where in the file its image lies.
"""

import io
import json
import re
import tarfile
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

from orchestrator.errors import UsageError

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")  # of several, the first is taken
LABELS = ("cls", "cls.txt", "json")
JSON_LABELS = ("label", "cls", "class", "class_id", "target")
NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]+)")  # WebDataset's rule; what begins with a dot is no sample


class Member(NamedTuple):
    key: str
    label: int | str
    offset: int
    size: int


def members(file: IO[bytes], name: str) -> tuple[list[Member], list[str]]:
    """The samples that have an image and a label, in the order of the file; and why others are none.

    Raises:
        UsageError: if the tar is cut short, damaged, compressed or not a tar.
    """
    samples: dict[str, dict[str, Any]] = {}
    problems = []
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                if tar.offset > size:  # of the next member
                    raise tarfile.ReadError("it is cut short")
                match = NAME.fullmatch(info.name)
                if not match or not info.isreg():
                    continue
                key, extension = match[1], match[2].lower()
                parts = samples.setdefault(key, {})
                if extension in parts:
                    problems.append(f"{name}: {key}: two members .{extension}, the first is taken")
                elif extension in IMAGES:
                    parts[extension] = (info.offset_data, info.size)
                elif extension in LABELS:
                    content: Any = tar.extractfile(info)
                    parts[extension] = content.read()
            end = tar.offset
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end mark, it is cut short or damaged at byte {end}")
    except (tarfile.TarError, EOFError) as error:
        raise UsageError(f"{name} is not a whole uncompressed tar: {error}") from None
    found = []
    for key, parts in samples.items():
        try:
            offset, size = _image(parts)
            found.append(Member(key, _label(parts), offset, size))
        except ValueError as error:
            problems.append(f"{name}: {key}: {error}")
    return found, problems


def _image(parts: Mapping[str, Any]) -> tuple[int, int]:
    for extension in IMAGES:
        if extension in parts:
            return parts[extension]
    raise ValueError(f"no image (.{', .'.join(IMAGES)})")


def _label(parts: Mapping[str, bytes]) -> int | str:
    """Raises ValueError if there is none."""
    for extension in ("cls", "cls.txt"):
        if extension in parts:
            text = parts[extension].decode().strip()
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else _name(text)
    tree = json.loads(parts.get("json", b"{}"))
    for field in JSON_LABELS:
        if isinstance(tree, dict) and (label := tree.get(field)) is not None:
            return label if type(label) is int else _name(label)
    raise ValueError(f"no label (.cls, .cls.txt, or one of {', '.join(JSON_LABELS)} in .json)")


def _name(label: Any) -> str:
    if not isinstance(label, str) or not label:
        raise ValueError(f"label {label!r} is neither a number nor a name")
    return label
