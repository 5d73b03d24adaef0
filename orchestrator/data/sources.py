"""Sources of images to pack: digits, class folders, WebDataset's tars, parquet files, torchvision's sets."""

import inspect
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import pyarrow.parquet as pq
import torchvision
from PIL import Image
from sklearn.datasets import load_digits

from orchestrator import storage
from orchestrator.data import formats
from orchestrator.data.formats import BY_NAME, Columns
from orchestrator.data.images import BadImage, encode_png
from orchestrator.data.samples import (
    READERS,
    VALIDATION,
    Execute,
    Sample,
    Source,
    assign_splits,
    files_below,
    may_be_image,
    read_files,
    resolve_splits,
    shards_at,
    splits_of,
)
from orchestrator.errors import UsageError

KINDS = "digits, folder:PATH, webdataset:PATH, parquet:PATH, torchvision:NAME"
NOT_AN_IMAGE = ": is not an image by its name"  # the end of such lines in `Source.skipped`
BUFFER_BYTES = 4 << 20  # read from S3 by one request while a tar is listed

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


def open_source(
    name: str,
    *,
    root: str = "data",
    download: bool = False,
    val_frac: float = 0.2,
    columns: Columns = BY_NAME,
    execute: Execute = map,
) -> Source:
    """Lists the samples to be packed, without reading images.

    root, download: where torchvision keeps its files, and whether it may fetch them.
    columns: the columns of parquet files.
    execute: runs the listing of tars and parquet files.

    Raises:
        UsageError: for a source that is unknown, missing or malformed.
    """
    if not 0 < val_frac < 1:
        raise UsageError(f"--val-frac {val_frac}: must lie between 0 and 1, both excluded")
    kind, _, rest = name.partition(":")
    if name == "digits":
        return _digits(val_frac)
    if rest:
        match kind:
            case "folder":
                return _folder(rest, val_frac)
            case "webdataset":
                return _shards(rest, ".tar", index_tar, read_members, val_frac, execute)
            case "parquet":
                index, read = partial(index_parquet, columns), partial(read_rows, columns)
                return _shards(rest, ".parquet", index, read, val_frac, execute)
            case "torchvision":
                return _torchvision_set(rest, root, download, val_frac)
    raise UsageError(f"unknown source {name!r}; known: {KINDS}")


def _digits(val_frac: float) -> Source:
    """Returns the 1,797 images of 8x8 pixels that ship inside scikit-learn."""
    bundled: Any = load_digits()
    images = (bundled.images * (255 / 16)).round().astype("uint8")
    samples = [
        Sample(encode_png(image), int(label), f"digit-{i:04d}")
        for i, (image, label) in enumerate(zip(images, bundled.target, strict=True))
    ]
    classes, splits = assign_splits(samples, val_frac=val_frac, order="listed")
    return Source(classes=classes, splits=splits, fetch=iter)


def _folder(path: str, val_frac: float) -> Source:
    """Lists a folder per class, or ``train`` and ``val`` of them; a class may hold deeper folders."""
    root = storage.absolute(path).rstrip("/")
    listed = files_below(root)
    top = {name.split("/")[0] for name in listed if "/" in name}
    has_splits = "train" in top and (not top.isdisjoint(VALIDATION) or top == {"train"})
    depth = 1 if has_splits else 0
    samples, skipped, hints = [], [], {}
    for name, size in listed.items():
        *folders, _ = name.split("/")
        if has_splits and (not folders or folders[0] not in ("train", *VALIDATION)):
            skipped.append(f"{root}/{name}: neither in train nor in a folder of validation images")
        elif not may_be_image(name):
            skipped.append(f"{root}/{name}{NOT_AN_IMAGE}")
        elif len(folders) <= depth:
            skipped.append(f"{root}/{name}: in no class folder")
        else:
            samples.append(Sample(storage.join(root, name), folders[depth], name, size))
            hints[name] = folders[0] if has_splits else None
    if not samples:
        reasons = f"; {len(skipped)} files, the first: {skipped[0]}" if skipped else ""
        raise UsageError(f"{root} has no class folders with images{reasons}")
    used = resolve_splits(hints, root)
    samples = [sample._replace(split=used[sample.key]) for sample in samples if sample.key in used]
    classes, splits = assign_splits(samples, val_frac=val_frac, order="hash")
    return Source(classes=classes, splits=splits, fetch=read_files, skipped=tuple(skipped))


class Index(NamedTuple):
    """The samples of a tar or parquet file, lines about incomplete samples, and the labels' names."""

    location: str
    samples: list[Sample]
    problems: list[str]
    names: list[str] | None = None


def index_tar(location: str) -> Index:
    with storage.open_to_read(location) as file:
        buffered = io.BufferedReader(file, BUFFER_BYTES)  # pyright: ignore[reportArgumentType]
        return Index(location, *formats.read_members(buffered, location))


def index_parquet(columns: Columns, location: str) -> Index:
    """Reads no images: the size of each is the mean of its row group."""
    with storage.open_to_read(location) as source, formats.named_if_broken(location):
        file = pq.ParquetFile(source)
        rows = formats.read_parquet(file, location.rpartition("/")[2], columns, images=False).to_pylist()
        groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
        names = formats.class_names(file.schema_arrow, columns)
    places = [
        (location, number, row, group.total_byte_size // group.num_rows)
        for number, group in enumerate(groups)
        for row in range(group.num_rows)
    ]
    found = zip(places, rows, strict=True)
    samples = [Sample(tuple(place), row["label"], row["key"], size) for (*place, size), row in found]
    problems = [f"{location}: {sample.key}: no label" for sample in samples if sample.label is None]
    return Index(location, [sample for sample in samples if sample.label is not None], problems, names)


def read_members(places: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
    """Reads images of tars by (location, offset, size)."""
    with ThreadPoolExecutor(READERS) as pool:
        for location, members in groupby(places, key=lambda place: place[0]):
            with storage.open_to_read(location) as file:
                yield from pool.map(lambda place: file.read_at(place[2], place[1]), members)


def read_rows(columns: Columns, places: Sequence[tuple[str, int, int]]) -> Iterator[bytes | BadImage]:
    """Reads images of parquet files by (location, row group, row of the group)."""
    for location, of_file in groupby(places, key=lambda place: place[0]):
        with storage.open_to_read(location) as source, formats.named_if_broken(location):
            file = pq.ParquetFile(source)
            image, _, _ = formats.find_columns(file.schema_arrow, location, columns)
            for group, rows in groupby(of_file, key=lambda place: place[1]):
                images = formats.read_column(file.read_row_group(group, [image]), image)
                for _, _, row in rows:
                    yield images[row].as_py() or BadImage("no bytes")


def _shards(
    path: str,
    extension: str,
    index: Callable[[str], Index],
    fetch: Callable[[Sequence[Any]], Iterator[bytes | BadImage]],
    val_frac: float,
    execute: Execute,
) -> Source:
    """Lists samples in the order of the files, for any other order would read each file many times."""
    folder, names = shards_at(path, extension)
    splits = {storage.join(folder, name): split for name, split in splits_of(names, folder).items()}
    files = sorted(execute(index, list(splits)), key=lambda file: file.location)
    formats.check_names({file.location: file.names for file in files})
    seen: Counter[str] = Counter()
    samples = []
    for file in files:
        for sample in file.samples:
            seen[sample.key] += 1
            # Keys may count from 0 in each file.
            key = sample.key if seen[sample.key] == 1 else f"{sample.key}#{seen[sample.key]}"
            samples.append(sample._replace(key=key, split=splits[file.location]))
    skipped = tuple(problem for file in files for problem in file.problems)
    if not samples:
        reason = "".join(f"; {line}" for line in skipped[:1])
        raise UsageError(f"no sample with an image and a label in {files[0].location}, ..{reason}")
    classes, arranged = assign_splits(samples, val_frac=val_frac, order="listed", names=files[0].names)
    return Source(classes=classes, splits=arranged, fetch=fetch, skipped=skipped)


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
        samples, names = _set_samples(sets)
    except (RuntimeError, OSError, TypeError, ValueError, ImportError, NotImplementedError) as error:
        fetchable = "not found" in str(error) and "download" in accepts and not download
        hint = "; --download fetches it" if fetchable else ""
        raise UsageError(f"torchvision:{name} below {root!r}: {error}{hint}") from None
    classes, splits = assign_splits(samples, val_frac=val_frac, order="hash", names=names)
    if isinstance(samples[0].image, str):
        return Source(classes=classes, splits=splits, fetch=read_files)
    kept = {split: tuple((k, v) for k, v in part if k != "download") for split, part in parts.items()}
    return Source(classes=classes, splits=splits, fetch=partial(read_decoded, name, kept))


def _set_class(name: str) -> Any:
    found = getattr(torchvision.datasets, name, None)
    if not inspect.isclass(found):
        raise UsageError(
            f"torchvision.datasets has no {name!r}; it has {', '.join(torchvision.datasets.__all__)}"
        )
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


def _set_samples(sets: Mapping[str, Any]) -> tuple[list[Sample], list[str] | None]:
    """Returns the samples and class names. The image of a sample is its path if the set keeps images in
    files, which are packed verbatim, else its number.
    """
    labels = {split: _set_labels(part) for split, part in sets.items()}
    files = {split: _set_files(part) for split, part in sets.items()}
    in_files = all(len(paths) == len(labels[split]) for split, paths in files.items())
    samples = []
    for split, found in labels.items():
        if not found:
            raise ValueError("it has no images")
        prefix, own = ("", None) if split == "all" else (split, split)
        for number, label in enumerate(found):
            if type(label) not in (int, str):
                raise ValueError(f"label {label!r} of image {number} is not a class number")
            image = files[split][number] if in_files else (split, number)
            samples.append(Sample(image, label, f"{prefix}{number:07d}", 0, own))
    names, *others = (_class_names(part) for part in sets.values())
    if any(other != names for other in others):
        raise ValueError("training and validation images have different classes: pack them with folder:PATH")
    return samples, names if len(names) > max(map(max, labels.values())) else None


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
