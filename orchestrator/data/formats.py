"""Samples of parquet files and of WebDataset's tars: encoded image, label (number or name) and key.

Training reads such files of other projects in place: they are indexed once, in a manifest kept elsewhere.
"""

import hashlib
import io
import json
import logging
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from orchestrator import storage
from orchestrator.data.manifest import Manifest, Shard, has_manifest, save_manifest
from orchestrator.data.samples import Sample, classes_of, digest, shards_at, splits_of
from orchestrator.errors import UsageError

# Names of columns of parquet files; the first name that a file has is taken.
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "fine_label")
KEY_COLUMNS = ("key", "__key__", "id", "path", "filename")

# Members of tars, by extension, and fields of .json members.
TAR_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
TAR_LABELS = ("cls", "cls.txt", "json")
JSON_LABELS = ("label", "cls", "class", "class_id", "target")
MEMBER = re.compile(r"((?:.*/|)[^./]+)\.([^/]+)")  # WebDataset's rule: key, extension; no hidden files

Format = Literal["parquet", "webdataset"]
FORMATS: dict[str, Format] = {".parquet": "parquet", ".tar": "webdataset"}
INDEXED_AT_ONCE = 4  # files, each whole in memory
VAL_FRAC = 0.1  # of the files, if none is for validation
SHOWN = 5  # samples left out, per file

log = logging.getLogger(__name__)


class Columns(NamedTuple):
    """The columns of a parquet file that hold images and labels. None: the first known name is taken."""

    image: str | None = None
    label: str | None = None


BY_NAME = Columns()


class ShardIndex(NamedTuple):
    """A shard, a key for each of its labels, the number of samples per label, and the labels' names."""

    shard: Shard
    labels: dict[int | str, str]
    counts: Counter[int | str]
    names: list[str] | None


def index_external_shards(path: str, root: str) -> str:
    """Returns the data set, below `root`, of the tars or parquet files in the folder `path`, local or on S3.

    ``train`` and ``val`` are folders in it, or words in the files' names. A listing that changed gives
    another data set.

    Raises:
        UsageError: if there are no such files, a file is damaged, or their labels do not fit together.
    """
    path = storage.absolute(path).rstrip("/")
    if storage.size(path) is not None:
        raise UsageError(f"no data set at {path}: it is a file; name the folder of the shards")
    try:
        folder, sizes = shards_at(path, *FORMATS)
    except UsageError as error:
        raise UsageError(
            f"no data set at {path}: no manifest.json, and {error}; pack one with jobs/pack_shards.py"
        ) from None
    listing = json.dumps([folder, sizes], sort_keys=True)
    name = f"{folder.rpartition('/')[2]}-{hashlib.sha256(listing.encode()).hexdigest()[:12]}"
    data_set = storage.join(root, "data", "adopted", name)
    if not has_manifest(data_set):
        save_manifest(data_set, _index_all(folder, sorted(sizes)))
        log.info("the shards of %s are indexed in %s", path, data_set)
    return data_set


def _index_all(folder: str, names: Sequence[str]) -> Manifest:
    """Assigns whole files to the splits; if no file is for validation, a tenth of them becomes it."""
    splits = splits_of(names, folder)
    if None in splits.values():
        if len(names) < 2:
            raise UsageError(
                f"{folder} has one shard, none for validation: pack it with jobs/pack_shards.py, which"
                " splits it"
            )
        val = sorted(names, key=digest)[: max(1, round(VAL_FRAC * len(names)))]
        splits = {name: "val" if name in val else "train" for name in names}
    used = sorted(splits)
    if len({os.path.splitext(name)[1] for name in used}) > 1:
        raise UsageError(f"{folder} holds tars and parquet files: only one kind can be indexed")
    log.info("reading %d shards of %s once", len(used), folder)
    with ThreadPoolExecutor(min(INDEXED_AT_ONCE, os.cpu_count() or 1)) as pool:
        found = list(pool.map(_index, (storage.join(folder, name) for name in used)))
    check_names({index.shard.path: index.names for index in found})
    labels = {label: key for index in found for label, key in index.labels.items()}
    by_split: dict[str, list[ShardIndex]] = {"train": [], "val": []}
    for name, index in zip(used, found, strict=True):
        by_split[splits[name] or "train"].append(index)
    shards = {s: tuple(i.shard for i in indexes if i.shard.rows) for s, indexes in by_split.items()}
    for split in shards:
        if not shards[split]:
            raise UsageError(f"{folder} has no {split} sample with an image and a label")
    counts = sum((index.counts for index in by_split["val"]), Counter[int | str]())
    return Manifest(
        classes=classes_of(labels, found[0].names), splits=shards, val_majority=max(counts.values())
    )


def _index(location: str) -> ShardIndex:
    content = pa.py_buffer(storage.read_bytes(location))
    format = FORMATS[os.path.splitext(location)[1]]
    samples, problems = read_samples(content, format, location)
    if problems:
        shown = "; ".join(problems[:SHOWN])
        log.warning("%s: %d samples left out: %s", location, len(problems), shown)
    log.info("%s: %d samples", location, samples.num_rows)
    labels = samples["label"].to_pylist()
    return ShardIndex(
        shard=Shard(
            path=location,
            rows=samples.num_rows,
            bytes=content.size,
            sha256=hashlib.sha256(content).hexdigest(),
            format=format,
        ),
        labels=dict(zip(labels, samples["key"].to_pylist(), strict=True)),
        counts=Counter(labels),
        names=class_names(pq.read_schema(pa.BufferReader(content))) if format == "parquet" else None,
    )


def check_names(names: Mapping[str, list[str] | None]) -> None:
    """Raises UsageError if files, by location, name their labels differently."""
    first = next(iter(names))
    for location, theirs in names.items():
        if theirs != names[first]:
            raise UsageError(f"{first} and {location} name their labels differently")


def read_samples(content: pa.Buffer, format: Format, name: str) -> tuple[pa.Table, list[str]]:
    """Reads columns image (encoded), label (int64 or string) and key (string) from a file's content.

    Samples without an image or a label are left out; a line for each says why.

    Raises:
        UsageError: naming the file, if it is cut short or no column fits.
    """
    if format == "parquet":
        with named_if_broken(name):
            samples = read_parquet(pq.ParquetFile(pa.BufferReader(content)), name)
        problems = [
            f"{name}: {key}: no {column}"
            for column in ("image", "label")
            for key in samples.filter(samples[column].is_null())["key"].to_pylist()
        ]
        return samples.drop_null(), problems
    found, problems = read_members(pa.BufferReader(content), name)
    view, labels = memoryview(content), [sample.label for sample in found]
    if len({type(label) for label in labels}) > 1:
        raise UsageError(f"{name}: some labels are numbers, some are names")
    images = [view[offset : offset + size] for _, offset, size in (sample.image for sample in found)]
    kind = pa.string() if labels and isinstance(labels[0], str) else pa.int64()
    columns = {
        "image": pa.array(images, pa.large_binary()),
        "label": pa.array(labels, kind),
        "key": pa.array([sample.key for sample in found], pa.string()),
    }
    return pa.table(columns), problems


def read_parquet(
    file: pq.ParquetFile, name: str, columns: Columns = BY_NAME, *, images: bool = True
) -> pa.Table:
    """Reads label, key and, unless `images` is False, image of every row; only the key is never null.

    Raises:
        UsageError: if no column fits, with the columns that the file has.
    """
    image, label, key = find_columns(file.schema_arrow, name, columns)
    table = file.read(columns=[leaf for leaf in (image if images else None, label, key) if leaf])
    labels = read_column(table, label)
    if not (types.is_integer(labels.type) or types.is_boolean(labels.type) or _is_text(labels.type)):
        raise UsageError(f"{name}: column {label} is {labels.type}: labels are whole numbers or names")
    keys = pa.array([f"{name}:{row}" for row in range(table.num_rows)], pa.string())
    if key:
        keys = pc.fill_null(read_column(table, key).cast(pa.string()).combine_chunks(), keys)
    found = {"label": labels.cast(pa.string() if _is_text(labels.type) else pa.int64()), "key": keys}
    return pa.table(({"image": read_column(table, image)} if images else {}) | found)


def unpacked_images(file: pq.ParquetFile, name: str) -> Iterator[bytes]:
    """Yields the image of every row, empty where there is none."""
    image, _, _ = find_columns(file.schema_arrow, name)
    for group in range(file.num_row_groups):
        for value in read_column(file.read_row_group(group, [image]), image):
            yield value.as_py() or b""


def find_columns(schema: pa.Schema, name: str, columns: Columns = BY_NAME) -> tuple[str, str, str | None]:
    """Returns the columns of the image, the label and, if there is one, the key."""
    there = ", ".join(f"{field.name} ({field.type})" for field in schema)
    images = (columns.image,) if columns.image else IMAGE_COLUMNS
    image = next((leaf for n in images if n in schema.names and (leaf := _bytes_leaf(schema.field(n)))), None)
    if image is None:
        raise UsageError(f"{name} has no column of encoded images ({', '.join(images)}); it has {there}")
    labels = (columns.label,) if columns.label else LABEL_COLUMNS
    label = next((n for n in labels if n in schema.names), None)
    if label is None:
        raise UsageError(f"{name} has no label column ({', '.join(labels)}); it has {there}")
    column, _, field = image.partition(".")
    keys = [n for n in KEY_COLUMNS if n in schema.names and n not in (column, label)]
    keys = [n for n in keys if _is_text(schema.field(n).type) or types.is_integer(schema.field(n).type)]
    if field and "path" in [f.name for f in schema.field(column).type]:
        keys.append(f"{column}.path")  # Hugging Face stores images as structs of bytes and path
    return image, label, next(iter(keys), None)


def read_column(table: pa.Table, leaf: str) -> pa.ChunkedArray:
    """Returns a column, or a field of a struct, without dictionary encoding."""
    name, _, field = leaf.partition(".")
    column = table.select([name]).flatten()[leaf] if field else table[name]
    return column.cast(column.type.value_type) if types.is_dictionary(column.type) else column


def class_names(schema: pa.Schema, columns: Columns = BY_NAME) -> list[str] | None:
    """Returns the names of the labels, if Hugging Face's `datasets` wrote them into the parquet file."""
    label = columns.label or next((n for n in LABEL_COLUMNS if n in schema.names), None)
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (KeyError, TypeError, ValueError):
        return None


@contextmanager
def named_if_broken(name: str) -> Iterator[None]:
    """Turns Arrow's errors about damaged or incomplete files into a UsageError that names the file."""
    try:
        yield
    except pa.ArrowException as error:
        raise UsageError(f"{name} is not a whole parquet file: {str(error).splitlines()[0]}") from None


def read_members(file: IO[bytes], name: str) -> tuple[list[Sample], list[str]]:
    """Returns the samples of a tar that have an image and a label, in file order, and lines that name the
    other samples. The image of a sample is (name, offset, size).

    Members whose names differ only in the extension are one sample. Nothing is extracted.

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
                if tar.offset > size:  # the next member's offset
                    raise tarfile.ReadError("it is cut short")
                match = MEMBER.fullmatch(info.name)
                if not match or not info.isreg():
                    continue
                key, extension = match[1], match[2].lower()
                parts = samples.setdefault(key, {})
                if extension in parts:
                    problems.append(f"{name}: {key}: two members .{extension}, the first is taken")
                elif extension in TAR_IMAGES:
                    parts[extension] = (name, info.offset_data, info.size)
                elif extension in TAR_LABELS:
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
            image = next((parts[extension] for extension in TAR_IMAGES if extension in parts), None)
            if image is None:
                raise ValueError(f"no image (.{', .'.join(TAR_IMAGES)})")
            found.append(Sample(image, _tar_label(parts), key, size=image[2]))
        except ValueError as error:
            problems.append(f"{name}: {key}: {error}")
    return found, problems


def _tar_label(parts: Mapping[str, bytes]) -> int | str:
    """Returns the sample's label. Raises ValueError if it has none."""
    for extension in ("cls", "cls.txt"):
        if extension in parts:
            text = parts[extension].decode().strip()
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else _checked_name(text)
    tree = json.loads(parts.get("json", b"{}"))
    for field in JSON_LABELS:
        if isinstance(tree, dict) and (label := tree.get(field)) is not None:
            return label if type(label) is int else _checked_name(label)
    raise ValueError(f"no label (.cls, .cls.txt, or one of {', '.join(JSON_LABELS)} in .json)")


def _checked_name(label: Any) -> str:
    if not isinstance(label, str) or not label:
        raise ValueError(f"label {label!r} is neither a number nor a name")
    return label


def _bytes_leaf(field: pa.Field) -> str | None:
    """Returns the column's name, or its field ``bytes``, if it holds bytes."""
    if _is_bytes(field.type):
        return field.name
    if types.is_struct(field.type) and any(f.name == "bytes" and _is_bytes(f.type) for f in field.type):
        return f"{field.name}.bytes"
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)
