"""Images in folders: a folder for each class, or folders of splits with such folders."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from orchestrator import storage
from orchestrator.data.images import may_be_image
from orchestrator.data.text import TEXT, captions_in_file
from orchestrator.errors import UsageError
from orchestrator.packing.base import SourceConfig
from orchestrator.packing.csv_files import LISTS
from orchestrator.packing.labels import name_of
from orchestrator.packing.listing import files_below, is_hidden, read_files
from orchestrator.packing.report import NOT_AN_IMAGE
from orchestrator.packing.samples import Execute, Part, Source, tabulated
from orchestrator.packing.splits import resolve, split_named, splits_of_samples

SHOWN = 20  # names in a message
CAPTION_FILE = ".txt"  # beside an image, with its captions
WAY = "`ignore_split_names` takes such names for those of classes"

Paths = Mapping[str, Sequence[str]]  # the name of an image -> its folders, from the uppermost


@dataclass(frozen=True, kw_only=True)
class FolderConfig(SourceConfig):
    """A folder per class, or train and val of them."""

    kind: Literal["folder"] = "folder"

    def samples(self, execute: Execute) -> Source:
        return class_folders(self.place, self.val_frac, self.captions, self.ignore_split_names)


def class_folders(path: str, val_frac: float, captions: bool, ignore_split_names: bool) -> Source:
    """Lists a folder per class, or folders of splits with them; a class may hold deeper folders. Images with
    captions may be in no class folder.

    ignore_split_names: whether words for splits in names of folders and files say nothing.

    Raises:
        UsageError: if there are no such folders, and where it is in doubt which of them are splits.
    """
    root = storage.absolute(path).rstrip("/")
    notes: list[str] = []
    listed = files_below(root, notes)
    skipped: list[str] = []
    texts = _captions_beside(root, filter(may_be_image, listed), listed) if captions else {}
    images: dict[str, list[str]] = {}
    for name in listed:
        *folders, _ = name.split("/")
        if not may_be_image(name):
            if not captions or not name.endswith(CAPTION_FILE):
                skipped.append(f"{root}/{name}{NOT_AN_IMAGE}")
        elif captions and isinstance(problem := texts[name], ValueError):
            skipped.append(f"{root}/{name}: {problem}")
        else:
            images[name] = folders
    while len({tuple(folders[:1]) for folders in images.values()}) == 1 and all(
        len(folders) > 1 for folders in images.values()
    ):
        # One folder for all is no class.
        images = {name: folders[1:] for name, folders in images.items()}
    hints, classes = ({}, images) if ignore_split_names else _by_split(images, root)
    notes += _notes_on_folders(classes)
    for name in images:
        if name not in classes:
            skipped.append(f"{root}/{name}: neither in train nor in a folder of validation images")
        elif not classes[name] and not captions:
            skipped.append(f"{root}/{name}: in no class folder")
    chosen = {name: hints.get(name) for name in images if name in classes and (captions or classes[name])}
    if not chosen:
        raise _without_classes(root, listed, skipped, captions)
    _refuse_unsorted(root, hints, chosen)
    splits, said = resolve(chosen, root)
    notes += said
    parts = []
    for split in sorted({*splits.values()}, key=str):
        names = [name for name in splits if splits[name] == split]
        try:
            labels = [name_of(classes[name][0]) if classes[name] else None for name in names]
        except ValueError as error:
            raise UsageError(f"{root}: {error}") from None
        fields = {TEXT: [texts[name] for name in names]} if captions else {}
        places = [(0, listed[name]) for name in names]
        parts.append(Part(str(split), labels, names, places, [f"{root}/{n}" for n in names], fields=fields))
    if barren := _without_images(root, listed, images):
        notes.append(f"no image of the folders {', '.join(barren[:SHOWN])}{' ..' * (len(barren) > SHOWN)}")
    own = {str(split): split for split in splits.values()}
    return tabulated(parts, own, val_frac, read_files, skipped=skipped, notes=notes)


def _by_split(images: Paths, root: str) -> tuple[dict[str, str | None], Paths]:
    """Returns the split of each image, if folders or files are named for splits, and the folders of its
    class, for the images that are used.

    Raises:
        UsageError: where it is in doubt which folders are splits.
    """
    tops = Counter(folders[0] for folders in images.values() if folders)
    word = {top: split_named(top) for top in tops}
    words = {split for split in word.values() if split}
    if "train" in words and (len(words) > 1 or None not in word.values()):
        hints = {name: word[folders[0]] for name, folders in images.items() if folders and word[folders[0]]}
        inside = _without_nested({name: images[name][1:] for name in hints}, hints)
        others = [top for top, split in word.items() if not split]
        if others and not any(inside.values()):
            raise UsageError(
                f"{root}: are {' and '.join(sorted(t for t in tops if word[t]))} splits, or classes beside"
                f" {', '.join(others[:5])}? {WAY}; for splits, put the images into folders of classes"
            )
        return hints, inside
    below = {folders[1] for folders in images.values() if len(folders) > 1 and word[folders[0]] == "train"}
    if len(below) > 1 and len(tops) > 1:
        train = next(top for top, split in word.items() if split == "train")
        raise UsageError(
            f"{root}: is {train} a class, or does it hold the training images of the classes"
            f" {_some(below)}? {WAY}; else pack {root}/{train} alone, or name the folder of validation images"
            " val"
        )
    # The first level below the classes at which every folder names a split.
    depth = min((len(folders) for folders in images.values()), default=0)
    for level in range(1, depth) if len(tops) > 1 else ():
        hints = {name: split_named(folders[level]) for name, folders in images.items()}
        if {"train"} < {*hints.values()} and None not in hints.values():
            if any(len(folders) > level + 1 for folders in images.values()):
                raise UsageError(
                    f"{root}: each of the folders {', '.join([*tops][:5])} has folders of splits with further"
                    f" folders: name the one to take; {WAY}"
                )
            return hints, {name: folders[:level] for name, folders in images.items()}
    names = [*images]
    found = splits_of_samples([name.rpartition("/")[2] for name in names])
    if {"train"} < {*found} and len({*found}) > 1:
        return dict(zip(names, found, strict=True)), images
    return {}, images


def _notes_on_folders(classes: Paths) -> list[str]:
    """Returns what may not be meant so about folders below those of classes, in words."""
    notes = []
    inside: dict[str, set[str]] = {}
    for folders in filter(None, classes.values()):
        inside.setdefault(folders[0], set()).update(folders[1:2])
    shared = set.intersection(*inside.values()) if len(inside) > 1 else set()
    if len(shared) > 1:
        notes.append(
            f"the classes {_some(inside)} have the same folders, {_some(shared)}: if these are the classes,"
            " or some hold no images to learn from, name the right ones"
        )
    for name, below in inside.items():
        if len(sisters := below & inside.keys() - {name}) > 1:
            notes.append(f"the class {name} has folders that are called as other classes: {_some(sisters)}")
    words = sorted({f for folders in classes.values() for f in folders[1:] if split_named(f)})
    if words:
        notes.append(f"folders inside of classes, {_some(words)}, say nothing about splits")
    return notes


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + " .." * (len(names) > 5)


def _without_images(root: str, listed: Iterable[str], images: Iterable[str]) -> list[str]:
    """Returns the folders that have no image in them or below, which may have been meant as classes."""
    filled = {parent for name in images for parent in PurePosixPath(name).parents}
    folders = {parent for name in listed for parent in PurePosixPath(name).parents}
    if storage.is_local(root):
        for parent in filled:
            folders |= {parent / entry.name for entry in os.scandir(Path(root, parent)) if entry.is_dir()}
    missing = folders - filled
    names = [str(folder) for folder in missing if folder.parent not in missing]
    return sorted(name for name in names if not is_hidden(f"{name}/x"))


def _without_nested(inside: Paths, hints: Mapping[str, str | None]) -> Paths:
    """Leaves out the one folder in each split that is named for it again, as in ``seg_train/seg_train``."""
    for split in {*hints.values()}:
        names = [name for name in inside if hints[name] == split]
        tops = {inside[name][0] if inside[name] else None for name in names}
        only = tops.pop() if len(tops) == 1 else None
        if only and split_named(only) == split:
            inside = {**inside, **{name: inside[name][1:] for name in names}}
    return inside


def _refuse_unsorted(root: str, hints: Mapping[str, str | None], chosen: Mapping[str, str | None]) -> None:
    """Raises UsageError if no image for training or validation is in a class folder."""
    for split in ("train", "val"):
        if split in hints.values() and split not in chosen.values():
            raise UsageError(
                f"{root}: the images for {split} are in no class folder: sort them into folders of their"
                " classes, list them in a csv file, or, for validation on a part of the training images,"
                " leave them out"
            )


def _without_classes(root: str, listed: Iterable[str], skipped: Sequence[str], captions: bool) -> UsageError:
    reasons = f"; {len(skipped)} files, the first: {skipped[0]}" if skipped else ""
    found = "images with captions" if captions else "class folders with images"
    lists = [name for name in listed if name.lower().endswith(LISTS)]
    way = f"; if {lists[0]} lists the images, the source is csv:{root}/{lists[0]}" if lists else ""
    return UsageError(f"{root} has no {found}{reasons}{way}")


def _captions_beside(
    root: str, images: Iterable[str], there: Collection[str]
) -> dict[str, bytes | ValueError]:
    """Returns the captions of each image as a field, or why it has none: those of the text file of the same
    name, one in each line.
    """
    of = {image: f"{image.rpartition('.')[0]}{CAPTION_FILE}" for image in images}
    found: dict[str, bytes | ValueError] = {
        image: ValueError(f"no caption ({text.rpartition('/')[2]})")
        for image, text in of.items()
        if text not in there
    }
    images = [image for image in of if image not in found]
    contents = read_files([storage.join(root, of[image]) for image in images])
    for image, content in zip(images, contents, strict=True):
        try:
            if isinstance(content, ValueError):
                raise content
            found[image] = captions_in_file(content)
        except ValueError as error:
            found[image] = error
    return found
