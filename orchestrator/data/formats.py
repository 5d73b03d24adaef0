"""Samples of parquet files and of WebDataset's tars: encoded image, label (number or name) and key."""

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from orchestrator.data.manifest import Format
from orchestrator.errors import UsageError

# Columns of parquet files; the first that a file has is taken.
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "fine_label")
KEY_COLUMNS = ("key", "__key__", "id", "path", "filename")

# Members of tars, by extension, and fields of .json members.
TAR_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
TAR_LABELS = ("cls", "cls.txt", "json")
JSON_LABELS = ("label", "cls", "class", "class_id", "target")
MEMBER = re.compile(r"((?:.*/|)[^./]+)\.([^/]+)")  # WebDataset's rule: key, extension; no hidden files


class Columns(NamedTuple):
    """The columns of a parquet file that hold images and labels. None: the first of the known names."""

    image: str | None = None
    label: str | None = None


BY_NAME = Columns()


class Member(NamedTuple):
    """A sample of a tar, and the place of its image in the file."""

    key: str
    label: int | str
    offset: int
    size: int


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
    view, labels = memoryview(content), [member.label for member in found]
    if len({type(label) for label in labels}) > 1:
        raise UsageError(f"{name}: some labels are numbers, some are names")
    images = [view[m.offset : m.offset + m.size] for m in found]
    kind = pa.string() if labels and isinstance(labels[0], str) else pa.int64()
    columns = {
        "image": pa.array(images, pa.large_binary()),
        "label": pa.array(labels, kind),
        "key": pa.array([member.key for member in found], pa.string()),
    }
    return pa.table(columns), problems


def read_parquet(
    file: pq.ParquetFile, name: str, columns: Columns = BY_NAME, *, images: bool = True
) -> pa.Table:
    """Reads label, key and, unless `images` is False, image of every row; each may be null but the key.

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


def find_columns(schema: pa.Schema, name: str, columns: Columns = BY_NAME) -> tuple[str, str, str | None]:
    """Returns the columns of the image, the label and, if there is one, the key."""
    there = ", ".join(f"{field.name} ({field.type})" for field in schema) or "no columns"
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
        keys.append(f"{column}.path")  # of the struct in which Hugging Face stores images
    return image, label, next(iter(keys), None)


def read_column(table: pa.Table, leaf: str) -> pa.ChunkedArray:
    """Returns a column, or a field of a struct, without dictionary encoding."""
    name, _, field = leaf.partition(".")
    column = table.select([name]).flatten()[leaf] if field else table[name]
    return column.cast(column.type.value_type) if types.is_dictionary(column.type) else column


def class_names(schema: pa.Schema, columns: Columns = BY_NAME) -> list[str] | None:
    """The names of the labels, if Hugging Face's `datasets` wrote them into the parquet file."""
    label = columns.label or next((n for n in LABEL_COLUMNS if n in schema.names), None)
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (KeyError, TypeError, ValueError):
        return None


@contextmanager
def named_if_broken(name: str) -> Iterator[None]:
    """Raises UsageError, naming the file, for Arrow's errors about damaged or incomplete files."""
    try:
        yield
    except pa.ArrowException as error:
        raise UsageError(f"{name} is not a whole parquet file: {str(error).splitlines()[0]}") from None


def read_members(file: IO[bytes], name: str) -> tuple[list[Member], list[str]]:
    """The samples of a tar that have an image and a label, in file order, and lines that name the others.

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
                if tar.offset > size:  # the next member's
                    raise tarfile.ReadError("it is cut short")
                match = MEMBER.fullmatch(info.name)
                if not match or not info.isreg():
                    continue
                key, extension = match[1], match[2].lower()
                parts = samples.setdefault(key, {})
                if extension in parts:
                    problems.append(f"{name}: {key}: two members .{extension}, the first is taken")
                elif extension in TAR_IMAGES:
                    parts[extension] = (info.offset_data, info.size)
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
            found.append(Member(key, _tar_label(parts), *image))
        except ValueError as error:
            problems.append(f"{name}: {key}: {error}")
    return found, problems


def _tar_label(parts: Mapping[str, bytes]) -> int | str:
    """Raises ValueError if the sample has no label."""
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
    """The column, or its field ``bytes``, if it holds bytes."""
    if _is_bytes(field.type):
        return field.name
    if types.is_struct(field.type) and any(f.name == "bytes" and _is_bytes(f.type) for f in field.type):
        return f"{field.name}.bytes"
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)
