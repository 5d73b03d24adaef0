"""Where images come from when they are packed: bundled digits, a folder of class folders, torchvision."""

import hashlib
import inspect
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_digits

from orchestrator.config import UsageError
from orchestrator.data.packing import Sample
from orchestrator.data.transforms import decode

VAL_FRAC = 0.2  # where the source itself has no split
KEPT_FORMATS = {"JPEG", "PNG"}  # stored as they are; others are stored as PNG
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what PIL raises for broken files


@dataclass(frozen=True, kw_only=True)
class Source:
    """Attributes:
    splits: ``train`` and ``val`` -> samples, read once.
    skipped: filled while reading: files that are no images, with the reason.
    """

    classes: list[str]
    splits: dict[str, Iterator[Sample]]
    skipped: list[str]


def open_source(name: str, *, root: str = "data") -> Source:
    """Raises UsageError for a source that is unknown or not there."""
    kind, _, rest = name.partition(":")
    if name == "digits":
        return _digits()
    if kind == "folder" and rest:
        return _folder(Path(rest))
    if kind == "torchvision" and rest:
        return _torchvision(rest, root)
    raise UsageError(f"unknown source {name!r}; known: digits, folder:PATH, torchvision:NAME")


def _digits() -> Source:
    """The 1,797 8x8 images that ship inside scikit-learn."""
    digits: Any = load_digits()
    images = (digits.images * (255 / 16)).round().astype("uint8")

    def samples() -> Iterator[Sample]:
        for i, (image, label) in enumerate(zip(images, digits.target, strict=True)):
            yield Sample(_png(Image.fromarray(image)), int(label), f"digit-{i:04d}")

    return Source(classes=[str(n) for n in range(10)], splits=_split_by_key(samples), skipped=[])


def _folder(folder: Path) -> Source:
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}")
    parts = {split: folder / split for split in ("train", "val")}
    has_splits = any(part.is_dir() for part in parts.values())
    if missing := [str(part) for part in parts.values() if has_splits and not part.is_dir()]:
        raise UsageError(
            f"no folder {missing[0]}: a folder has one folder per class, or train and val of them"
        )
    roots = list(parts.values()) if has_splits else [folder]
    classes = sorted({path.name for root in roots for path in root.iterdir() if path.is_dir()})
    if not classes:
        raise UsageError(f"{folder} has no class folders")
    skipped: list[str] = []

    def samples(root: Path) -> Iterator[Sample]:
        for label, name in enumerate(classes):
            for path in sorted(path for path in (root / name).rglob("*") if path.is_file()):
                try:
                    encoded = _encoded(path)
                except BROKEN as error:
                    if (line := f"{path}: {error}") not in skipped:
                        skipped.append(line)
                    continue
                yield Sample(encoded, label, str(path.relative_to(folder)))

    if has_splits:
        splits = {split: samples(root) for split, root in parts.items()}
    else:
        splits = _split_by_key(lambda: samples(folder))
    return Source(classes=classes, splits=splits, skipped=skipped)


def _torchvision(name: str, root: str) -> Source:
    """Any image classification set of `torchvision.datasets`, downloaded where it can be."""
    if name not in torchvision.datasets.__all__:
        raise UsageError(f"torchvision.datasets has no {name!r}")
    factory: Any = getattr(torchvision.datasets, name)
    accepts = inspect.signature(factory).parameters
    common = {k: v for k, v in {"root": root, "download": True}.items() if k in accepts}
    try:
        if "train" in accepts:
            parts = {"train": factory(**common, train=True), "val": factory(**common, train=False)}
        elif "split" in accepts:
            parts = {"train": factory(**common, split="train"), "val": factory(**common, split="test")}
        else:
            parts = {"": factory(**common)}
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"torchvision:{name} below {root!r}: {error}") from None

    def samples(split: str) -> Iterator[Sample]:
        for i, (image, label) in enumerate(parts[split]):
            yield Sample(_png(image), int(label), f"{split}{i:07d}")

    first = next(iter(parts.values()))
    if hasattr(first, "classes"):
        classes = [str(c) for c in first.classes]
    else:
        classes = [str(n) for n in range(1 + max(int(label) for part in parts.values() for _, label in part))]
    splits = {s: samples(s) for s in parts} if len(parts) == 2 else _split_by_key(lambda: samples(""))
    return Source(classes=classes, splits=splits, skipped=[])


def _split_by_key(samples: Callable[[], Iterator[Sample]]) -> dict[str, Iterator[Sample]]:
    return {
        "train": (sample for sample in samples() if not _in_validation(sample.key)),
        "val": (sample for sample in samples() if _in_validation(sample.key)),
    }


def _in_validation(key: str) -> bool:
    """A fifth of all keys, by hash: a sample never changes sides when others come or go."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < VAL_FRAC * 2**64


def _encoded(path: Path) -> bytes:
    """The file's own bytes where training can decode them, else as PNG; raises if it is no whole image."""
    with Image.open(path) as image:
        image.load()
        content = path.read_bytes()
        if image.format in KEPT_FORMATS and image.mode in ("RGB", "L") and _decodes(content):
            return content
        if image.mode.startswith("I;16"):  # `convert` would clip it to white
            return _png(Image.fromarray((np.asarray(image) >> 8).astype("uint8")))
        return _png(image.convert("RGB"))


def _decodes(content: bytes) -> bool:
    """PIL reads some damaged files that torchvision refuses, and torchvision keeps 16 bits as they are."""
    try:
        return decode(content).dtype == torch.uint8
    except RuntimeError:
        return False


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
