"""Sources of what is packed: digits, folders, shards of other projects, csv, text, torchvision's sets."""

import inspect
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from uuid import uuid4

import torchvision
from PIL import Image

from moe.config import did_you_mean
from orchestrator import storage
from orchestrator.data import formats
from orchestrator.data.csv_files import LISTS, index_csv
from orchestrator.data.digits import cluttered_digits, plain_digits
from orchestrator.data.folders import class_folders
from orchestrator.data.formats import BY_NAME, Columns, image_column
from orchestrator.data.images import BadImage
from orchestrator.data.labels import listed_labels, read_labels
from orchestrator.data.listing import READERS, read_files, shards_at
from orchestrator.data.litdata import litdata_source
from orchestrator.data.mds import mds_source
from orchestrator.data.samples import Execute, Part, Sample, Source, tabulated
from orchestrator.data.sequences import python_topics, text_files
from orchestrator.data.splits import splits_of, splits_of_samples
from orchestrator.data.text import TEXT
from orchestrator.errors import UsageError
from orchestrator.plugins import error_in, function_of

KINDS = (
    "digits, digits-captions, cluttered-digits, folder:PATH, webdataset:PATH, parquet:PATH, csv:PATH,"
    " mds:PATH, litdata:PATH, python-topics, text:PATH, torchvision:NAME, or your own FILE.py:NAME"
)

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
    captions: bool = False,
    caption_lines: bool = False,
    ignore_split_names: bool = False,
    execute: Execute = map,
) -> Source:
    """Lists the samples to be packed, without reading images.

    root, download: where torchvision keeps its files, and whether it may fetch them.
    columns: the columns of parquet and csv files.
    captions: whether samples have captions, which become their field `text`. Labels are optional then.
    caption_lines: whether each line of a `.txt` member of tars is a caption.
    ignore_split_names: whether words such as train and test, in names of folders, files and samples or in a
        column, say nothing about what an image is for.
    execute: runs the listing of tars, parquet and csv files.

    Raises:
        UsageError: for a source that is unknown, missing or malformed, or has no captions.
    """
    if not 0 < val_frac < 1:
        raise UsageError(f"`val_frac` {val_frac}: must lie between 0 and 1, both excluded")
    kind, _, rest = name.partition(":")
    if kind.endswith(".py"):
        return _of_user(name, val_frac, captions, ignore_split_names)
    if captions and kind in ("digits", "cluttered-digits", "python-topics", "text", "torchvision"):
        raise UsageError(
            f"{name} has no captions; digits-captions has, and folder, webdataset, parquet, csv, mds and"
            " litdata may"
        )
    if name == "digits":
        return plain_digits(val_frac)
    if name == "digits-captions":
        return plain_digits(val_frac, captions=True)
    if name == "cluttered-digits":
        return cluttered_digits(val_frac)
    if name == "python-topics":
        return python_topics(val_frac)
    if rest:
        fetch = partial(read_places, columns, uuid4().hex)
        options = {"captions": captions, "ignore_split_names": ignore_split_names, "execute": execute}
        match kind:
            case "folder":
                return class_folders(rest, val_frac, captions, ignore_split_names)
            case "webdataset":
                index = partial(formats.index_tar, captions=captions, caption_lines=caption_lines)
                return _shards(rest, (".tar",), index, fetch, val_frac, ignore_split_names, execute)
            case "parquet":
                index = partial(formats.index_parquet, columns, captions=captions)
                return _shards(rest, (".parquet",), index, fetch, val_frac, ignore_split_names, execute)
            case "csv":
                index = partial(index_csv, columns, captions=captions)
                return _shards(rest, LISTS, index, read_files, val_frac, ignore_split_names, execute)
            case "mds":
                return mds_source(rest, columns, val_frac, **options)
            case "litdata":
                return litdata_source(rest, columns, val_frac, **options)
            case "text":
                return text_files(rest, val_frac, ignore_split_names)
            case "torchvision":
                return _torchvision_set(rest, root, download, val_frac)
    raise UsageError(f"unknown source {name!r}; known: {KINDS}")


def _of_user(name: str, val_frac: float, captions: bool, ignore_split_names: bool) -> Source:
    """Returns what a user's own function does: a `Source`, or samples with their bytes, which are split."""
    source = _called(name, val_frac, ignore_split_names)
    if captions and not all(TEXT in sample.fields for part in source.splits.values() for sample in part):
        raise UsageError(f"{name}: a sample has no captions; give each fields={{{TEXT!r}: b'a caption'}}")
    return source


def _called(name: str, val_frac: float, ignore_split_names: bool) -> Source:
    try:
        found = function_of(name)()
        samples = [] if isinstance(found, Source) else list(found)
    except UsageError:
        raise
    except Exception as error:  # the user's own code
        raise error_in(name, error) from error
    if isinstance(found, Source):
        return found
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise UsageError(f"{name} must return a Source, or samples: Sample(image=.., label=.., key=..)")
    for sample in samples:
        if not (isinstance(sample.key, str) and isinstance(sample.image, bytes)):
            kinds = f"key={sample.key!r} and an image of {type(sample.image).__name__}"
            raise UsageError(f"{name}: a sample has {kinds}: a key is text, an image its encoded bytes")
    try:
        sets = [listed_labels([sample.label, *sample.others]) for sample in samples]
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
    labels = read_labels(sets, [sample.key for sample in samples], name)
    # Samples with further fields need no labels.
    there = [first is not None or bool(s.fields) for first, s in zip(labels.first, samples, strict=True)]
    chosen = [row for row, has in enumerate(there) if has or not any(there)]
    images, _, keys, _, _, fields = zip(*(samples[row] for row in chosen), strict=True)
    further = {name: [each.get(name) for each in fields] for name in dict.fromkeys(chain(*fields))}
    part = Part(
        "all",
        [labels.first[row] for row in chosen],
        keys,
        [(0, len(image)) for image in images],
        images,
        others=[labels.others[row] for row in chosen] if labels.others else [],
        skipped=[f"{sample.key}: no label" for sample, has in zip(samples, there, strict=True) if not has],
        fields=further,
        hot=labels.hot,
        splits=[] if ignore_split_names else splits_of_samples(keys),
    )
    return tabulated([part], {"all": None}, val_frac, iter)


def _shards(
    path: str,
    extensions: tuple[str, ...],
    index: Callable[[str], Part],
    fetch: Callable[[Sequence[Any]], Iterable[bytes | BadImage]],
    val_frac: float,
    ignore_split_names: bool,
    execute: Execute,
) -> Source:
    folder, sizes = shards_at(path, *extensions)
    named, notes = (dict.fromkeys(sizes), []) if ignore_split_names else splits_of(sizes, folder)
    splits = {storage.join(folder, name): split for name, split in named.items()}
    parts = execute(index, list(splits))
    if ignore_split_names:
        parts = (part._replace(splits=(), doubt="") for part in parts)
    return tabulated(parts, splits, val_frac, fetch, notes=notes)


def read_places(columns: Columns, source: str, places: Sequence[tuple[Any, ...]]) -> Iterator[bytes]:
    """Reads images of tars and parquet files by (location, offset, size) or (location, row).

    source: another text for each source, because files may have changed since another was opened.
    """
    with ThreadPoolExecutor(READERS) as pool:
        for by_row, group in groupby(places, key=lambda place: len(place) == 2):
            if by_row:
                yield from (image_column(path, columns, source).read(row) for path, row in group)
            else:
                yield from pool.map(_range, group)


def _range(place: tuple[str, int, int]) -> bytes:
    return storage.read_range(*place).content


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
