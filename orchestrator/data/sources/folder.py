"""A folder with a folder per class, or with ``train`` and ``val`` of them; classes may hold deeper ones."""

import logging
from collections.abc import Iterable
from pathlib import Path

from orchestrator import storage
from orchestrator.data.sources.arrange import Found, arrange
from orchestrator.data.sources.files import may_be_image, read_files
from orchestrator.data.sources.listing import VALIDATION, by_split, files_below
from orchestrator.data.sources.source import Source
from orchestrator.errors import UsageError

NOT_AN_IMAGE = ": is not an image by its name"  # the end of such lines in `Source.skipped`

log = logging.getLogger(__name__)


def folder(path: str, val_frac: float) -> Source[str]:
    root = storage.absolute(path).rstrip("/")
    listed = files_below(root)
    parts = {name.split("/")[0] for name in listed if "/" in name}
    has_splits = "train" in parts and (not parts.isdisjoint(VALIDATION) or parts == {"train"})
    depth = 1 if has_splits else 0
    found, skipped, told = [], [], {}
    for name, size in listed.items():
        *folders, _ = name.split("/")
        if has_splits and (not folders or folders[0] not in ("train", *VALIDATION)):
            skipped.append(f"{root}/{name}: neither in train nor in a folder of validation images")
        elif not may_be_image(name):
            skipped.append(f"{root}/{name}{NOT_AN_IMAGE}")
        elif len(folders) <= depth:
            skipped.append(f"{root}/{name}: in no class folder")
        else:
            found.append(Found(storage.join(root, name), folders[depth], name, size))
            told[name] = folders[0] if has_splits else None
    _warn_of_empty_classes(root, listed, depth)
    if not found:
        reasons = f"; {len(skipped)} files, the first: {skipped[0]}" if skipped else ""
        raise UsageError(f"{root} has no class folders with images{reasons}")
    used = by_split(told, root)
    samples = [one._replace(split=used[one.key]) for one in found if one.key in used]
    classes, splits = arrange(samples, val_frac=val_frac, order="hash")
    return Source(classes=classes, splits=splits, fetch=read_files, skipped=tuple(skipped))


def _warn_of_empty_classes(root: str, listed: Iterable[str], depth: int) -> None:
    """They are no classes; S3 has no empty folders."""
    if storage.is_local(root):
        used = {tuple(name.split("/")[: depth + 1]) for name in listed}
        for folder in sorted(Path(root).glob("/".join("*" * (depth + 1)))):
            if folder.is_dir() and folder.relative_to(root).parts not in used and folder.name[0] != ".":
                log.warning("%s has no files: it is no class", folder)
