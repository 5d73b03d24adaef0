"""Any image classification set of `torchvision.datasets`, with its own split where it has one."""

import difflib
import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

import torchvision
from PIL import Image

from orchestrator import storage
from orchestrator.data.decode import BadImage
from orchestrator.data.sources.arrange import Found, arrange
from orchestrator.data.sources.files import read_files
from orchestrator.data.sources.source import Source
from orchestrator.errors import UsageError

TRAIN = ("train", "trainval", "train-standard", "2021_train")
VAL = ("val", "valid", "test", "2021_valid")  # the first that a set knows: its test images are for later
PARAMETERS = {  # that say which part is meant -> for training, for validation
    "train": ((True,), (False,)),
    "split": (TRAIN, VAL),
    "image_set": (TRAIN, VAL),
    "version": (TRAIN, VAL),
}
FILES = ("samples", "_samples", "imgs", "_image_files", "_images")  # attributes with the paths of images
LABELS = ("targets", "labels", "_labels", "y")

Arguments = tuple[tuple[str, Any], ...]  # of a set's constructor


@dataclass(frozen=True)
class Decoded:
    """Images that the set decodes, by split and number; stored as PNG. Every node needs the files."""

    name: str
    parts: Mapping[str, Arguments]

    def __call__(self, places: Sequence[tuple[str, int]]) -> Iterator[bytes | BadImage]:
        for split, number in places:
            try:
                yield _encoded(_open(self.name, self.parts[split])[number][0])
            except (OSError, SyntaxError) as error:
                yield BadImage(str(error))


def torchvision_set(text: str, root: str, download: bool, val_frac: float) -> Source[Any]:
    """`text`: name of a class, then other arguments of it if it needs some: ``EMNIST?split=letters``.

    Raises:
        UsageError: for a set that is unknown, not below `root`, or whose labels are no class numbers.
    """
    name, _, query = text.partition("?")
    accepts = _parameters(_class(name))
    common: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in parse_qsl(query)}
    common |= {
        k: v for k, v in {"root": storage.absolute(root), "download": download}.items() if k in accepts
    }
    try:
        parts = _parts(name, accepts, common)
        sets = {split: _open(name, arguments) for split, arguments in parts.items()}
        labels = {split: _labels(part) for split, part in sets.items()}
        found, names = _found(sets, labels), _names(sets, labels)
    except (RuntimeError, OSError, TypeError, ValueError, ImportError, NotImplementedError) as error:
        fetchable = "not found" in str(error) and "download" in accepts and not download
        hint = "; --download fetches it" if fetchable else ""
        raise UsageError(f"torchvision:{name} below {root!r}: {error}{hint}") from None
    classes, splits = arrange(found, val_frac=val_frac, order="hash", names=names)
    in_files = isinstance(found[0].image, str)
    kept = {
        split: tuple((k, v) for k, v in arguments if k != "download") for split, arguments in parts.items()
    }
    return Source(classes=classes, splits=splits, fetch=read_files if in_files else Decoded(name, kept))


def _class(name: str) -> Any:
    found = getattr(torchvision.datasets, name, None)
    if not inspect.isclass(found):
        names = {n.lower(): n for n in torchvision.datasets.__all__}
        near = [names[n] for n in difflib.get_close_matches(name.lower(), names, n=3)]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"torchvision.datasets has no {name!r}{hint}")
    return found


def _parameters(kind: Any) -> set[str]:
    """Of its constructor, and of those that it hands the rest to."""
    found: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters
            found |= {*parameters}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break
    return found


def _parts(name: str, accepts: set[str], common: Mapping[str, Any]) -> dict[str, Arguments]:
    """``train`` and ``val`` -> arguments; ``all`` -> arguments of a set without a split."""
    parameter = next((p for p in PARAMETERS if p in accepts and p not in common), None)
    if parameter is None:
        return {"all": tuple(common.items())}
    parts = {}
    for split, values in zip(("train", "val"), PARAMETERS[parameter], strict=True):
        for value in values:
            arguments = (*common.items(), (parameter, value))
            try:
                _open(name, arguments)
            except ValueError as error:
                if value == values[-1] or "Unknown value" not in str(error):
                    raise
            else:
                parts[split] = arguments
                break
    return parts


@lru_cache(maxsize=2)
def _open(name: str, arguments: Arguments) -> Any:
    return _class(name)(**dict(arguments))


def _found(sets: Mapping[str, Any], labels: Mapping[str, Sequence[int | str]]) -> list[Found[Any]]:
    """Paths where a set keeps its images in files, which are packed as they are; else split and number."""
    files = {split: _files(part) for split, part in sets.items()}
    in_files = all(len(paths) == len(labels[split]) for split, paths in files.items())
    found = []
    for split, part in labels.items():
        if not part:
            raise ValueError("it has no images")
        for number, label in enumerate(part):
            if type(label) not in (int, str):
                raise ValueError(f"label {label!r} of image {number} is no class number")
            image = files[split][number] if in_files else (split, number)
            key = f"{split if split != 'all' else ''}{number:07d}"
            found.append(Found(image, label, key, 0, split if split != "all" else None))
    return found


def _files(part: Any) -> list[str]:
    for attribute in FILES:
        listed = getattr(part, attribute, None)
        if isinstance(listed, list) and listed:
            paths = [one[0] if isinstance(one, tuple) else one for one in listed]
            if all(isinstance(path, str | Path) for path in paths):
                return [storage.absolute(str(path)) for path in paths]
    return []


def _labels(part: Any) -> list[Any]:
    for attribute in LABELS:
        found = getattr(part, attribute, None)
        if found is not None and len(found) == len(part):
            return [one.item() if hasattr(one, "item") else one for one in found]
    samples = getattr(part, "_samples", None)
    decoding_all = (part[i] for i in range(len(part)))
    pairs = cast(Any, samples if isinstance(samples, list) else decoding_all)
    return [one.item() if hasattr(one, "item") else one for _, one in pairs]


def _names(sets: Mapping[str, Any], labels: Mapping[str, Sequence[Any]]) -> list[str] | None:
    names = [[_text(c) for c in getattr(part, "classes", None) or []] for part in sets.values()]
    if any(one != names[0] for one in names):
        raise ValueError("training and validation images have other classes: pack them with folder:PATH")
    return names[0] if len(names[0]) > max(max(part) for part in labels.values()) else None


def _text(name: Any) -> str:
    return ", ".join(map(str, name)) if isinstance(name, tuple | list) else str(name)


def _encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    kept = image if image.mode in ("1", "L", "RGB", "P", "I;16") else image.convert("RGB")
    kept.save(buffer, format="PNG")
    return buffer.getvalue()
