"""The classification sets of torchvision."""

import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import parse_qsl

from PIL import Image

from moe.config import did_you_mean
from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.errors import UsageError
from orchestrator.packing.base import SourceConfig
from orchestrator.packing.listing import read_files
from orchestrator.packing.samples import Execute, Part, Source, tabulated

# Parameters of torchvision's data sets that select a part -> values for training, for validation. The first
# value that a set knows is taken, so that test images are used for validation only if there are no others.
TRAIN = ("train", "trainval", "train-standard", "2021_train")
VAL = ("val", "valid", "test", "2021_valid")
PARTS = {
    "train": ((True,), (False,)),
    "split": (TRAIN, VAL),
    "image_set": (TRAIN, VAL),
    "version": (TRAIN, VAL),
}
# Attributes of torchvision's data sets that may hold the paths of images, and labels.
PATHS = ("samples", "_samples", "imgs", "_image_files", "_images")
LABELS = ("targets", "labels", "_labels", "y")

Arguments = tuple[tuple[str, Any], ...]  # what a data set's constructor is called with


@dataclass(frozen=True, kw_only=True)
class TorchvisionConfig(SourceConfig):
    """A class of `torchvision.datasets`.

    Attributes:
        root, download: where torchvision keeps its files, and whether it may fetch them.
    """

    kind: Literal["torchvision"] = "torchvision"
    placed: ClassVar[str] = "NAME"
    captioned: ClassVar[Literal["none", "all", "asked"]] = "none"

    root: str = "data"
    download: bool = False

    def samples(self, execute: Execute) -> Source:
        return _torchvision_set(self.place, self.root, self.download, self.val_frac)


def read_decoded(
    name: str, parts: Mapping[str, Arguments], places: Sequence[tuple[str, int]]
) -> Iterator[bytes | BadImage]:
    """Reads images that a torchvision set decodes, by part and number. Every node needs the files."""
    for part, number in places:
        try:
            image: Image.Image = _open_part(name, parts[part])[number][0]
            buffer = io.BytesIO()
            kept = image if image.mode in ("1", "L", "RGB", "P", "I;16") else image.convert("RGB")
            kept.save(buffer, format="PNG")
            yield buffer.getvalue()
        except (OSError, SyntaxError) as error:
            yield BadImage(str(error))


def _torchvision_set(text: str, root: str, download: bool, val_frac: float) -> Source:
    """Lists a classification set, with its own split if it has one.

    `text` is the name of a class, followed by the arguments that it needs: ``EMNIST?split=letters``.
    """
    name, _, query = text.partition("?")
    accepts = _parameters(_set_class(name))
    common: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in parse_qsl(query)}
    places = {"root": storage.absolute(root), "download": download}
    common |= {k: v for k, v in places.items() if k in accepts}
    try:
        parts = _parts(name, accepts, common)
        sets = {split: _open_part(name, arguments) for split, arguments in parts.items()}
        listed = _set_parts(sets)
    except (RuntimeError, OSError, TypeError, ValueError, ImportError, NotImplementedError) as error:
        reason = str(error)
        if "not found" in reason and "download" in accepts and not download:
            # torchvision itself would name an argument of its own.
            packed = sorted(map(str, [*Path(root).glob("*.gz"), *Path(root, name).rglob("*.gz")]))
            unpack = f"unpack {packed[0]} and its like, or " if packed else ""
            reason = f"its files are not there: {unpack}let `download` fetch them"
        raise UsageError(f"torchvision:{name} below {root!r}: {reason}") from None
    own = {part.name: None if part.name == "all" else part.name for part in listed}
    if isinstance(listed[0].images[0], str):
        return tabulated(listed, own, val_frac, read_files)
    kept = {split: tuple((k, v) for k, v in part if k != "download") for split, part in parts.items()}
    return tabulated(listed, own, val_frac, partial(read_decoded, name, kept))


def _set_class(name: str) -> Any:
    import torchvision  # which takes a second

    found = getattr(torchvision.datasets, name, None)
    if not inspect.isclass(found):
        known = torchvision.datasets.__all__
        near = did_you_mean(name, known)
        raise UsageError(f"torchvision.datasets has no {name!r}; it has {', '.join(known)}{near}")
    return found


def _parameters(kind: Any) -> set[str]:
    """Returns the parameters of the constructor, and of the constructors that its keywords are passed to."""
    found: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters
            found |= {*parameters}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break
    return found


def _parts(name: str, accepts: set[str], common: Mapping[str, Any]) -> dict[str, Arguments]:
    """Returns the arguments for ``train`` and ``val``, or for ``all`` of a set without a split."""
    parameter = next((p for p in PARTS if p in accepts and p not in common), None)
    if parameter is None:
        return {"all": tuple(common.items())}
    parts = {}
    for split, values in zip(("train", "val"), PARTS[parameter], strict=True):
        for value in values:
            arguments = (*common.items(), (parameter, value))
            try:
                _open_part(name, arguments)
            except ValueError as error:
                if value == values[-1] or "Unknown value" not in str(error):
                    raise
            else:
                parts[split] = arguments
                break
    return parts


@lru_cache(maxsize=2)
def _open_part(name: str, arguments: Arguments) -> Any:
    return _set_class(name)(**dict(arguments))


def _set_parts(sets: Mapping[str, Any]) -> list[Part]:
    """Returns a part per split. The image of a sample is its path if the set keeps images in files, which are
    packed verbatim, else its number.
    """
    labels = {split: _set_labels(part) for split, part in sets.items()}
    files = {split: _set_files(part) for split, part in sets.items()}
    in_files = all(len(paths) == len(labels[split]) for split, paths in files.items())
    names, *others = (_class_names(part) for part in sets.values())
    if any(other != names for other in others):
        raise ValueError("training and validation images have different classes: pack them with folder:PATH")
    parts = []
    for split, found in labels.items():
        if not found:
            raise ValueError("it has no images")
        for number, label in enumerate(found):
            if type(label) not in (int, str):
                raise ValueError(f"label {label!r} of image {number} is not a class number")
        keys = [f"{'' if split == 'all' else split}{number:07d}" for number in range(len(found))]
        images = files[split] if in_files else [(split, number) for number in range(len(found))]
        parts.append(Part(split, found, keys, [(0, 0)] * len(found), images))
    known = names if len(names) > max(map(max, labels.values())) else None
    return [part._replace(names=known) for part in parts]


def _set_files(part: Any) -> list[str]:
    for attribute in PATHS:
        listed = getattr(part, attribute, None)
        if isinstance(listed, list) and listed:
            paths = [entry[0] if isinstance(entry, tuple) else entry for entry in listed]
            if all(isinstance(path, str | Path) for path in paths):
                return [storage.absolute(str(path)) for path in paths]
    return []


def _set_labels(part: Any) -> list[Any]:
    listed = (getattr(part, attribute, None) for attribute in LABELS)
    found = next((labels for labels in listed if labels is not None and len(labels) == len(part)), None)
    if found is None:
        pairs = getattr(part, "_samples", None)
        # Without a list of labels, every image is decoded.
        pairs = pairs if isinstance(pairs, list) else (part[i] for i in range(len(part)))
        found = [label for _, label in pairs]
    return [label.item() if hasattr(label, "item") else label for label in found]


def _class_names(part: Any) -> list[str]:
    names = getattr(part, "classes", None) or []
    return [", ".join(name) if isinstance(name, tuple) else str(name) for name in names]
