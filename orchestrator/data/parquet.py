"""Which columns of somebody's parquet file are its images, labels and keys."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from orchestrator.errors import UsageError

IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes", "content")
PATHS = (*IMAGES, "path", "file", "filename", "file_name", "image_path")
LABELS = ("label", "labels", "cls", "class", "target", "class_id", "fine_label", "class_name", "category")
KEYS = ("key", "__key__", "id", "filename", "path")

Leaf = tuple[str] | tuple[str, str]  # a column, or a field of a column that is a struct


class Columns(NamedTuple):
    """Attributes:
    image: encoded bytes, or where `paths`, the names of files.
    """

    image: Leaf
    label: Leaf
    key: Leaf | None
    paths: bool


def columns(schema: pa.Schema, name: str) -> Columns:
    """Raises UsageError, naming the columns that there are, if none fits."""
    image, paths = _image(schema, name)
    label = next((n for n in LABELS if n in schema.names), None)
    if label is None:
        raise UsageError(f"{name} has no label column ({', '.join(LABELS)}); it has {_listed(schema)}")
    kind = _plain(schema.field(label).type)
    if not (types.is_integer(kind) or types.is_boolean(kind) or _is_text(kind)):
        raise UsageError(f"{name}: column {label} is {kind}: labels are whole numbers or names")
    taken = {image[0], label}
    keys = [
        n
        for n in KEYS
        if n in schema.names and n not in taken and _names_things(_plain(schema.field(n).type))
    ]
    key: Leaf | None = (keys[0],) if keys else None
    if key is None and len(image) == 2 and "path" in [f.name for f in schema.field(image[0]).type]:
        key = (image[0], "path")
    return Columns(image, (label,), key, paths)


def read_leaf(table: pa.Table, leaf: Leaf) -> pa.ChunkedArray:
    """Without dictionaries."""
    column = table.select([leaf[0]]).flatten()[".".join(leaf)] if len(leaf) > 1 else table[leaf[0]]
    return column.cast(_plain(column.type))


def read_labels(table: pa.Table, found: Columns) -> pa.ChunkedArray:
    """int64, or string."""
    column = read_leaf(table, found.label)
    return column.cast(pa.string() if _is_text(column.type) else pa.int64())


def read_keys(table: pa.Table, found: Columns, name: str) -> pa.Array:
    """The column of keys; where it says nothing, the file's name and the number of the row."""
    rows = pa.array([f"{name}:{row}" for row in range(table.num_rows)], pa.string())
    if found.key is None:
        return rows
    return pc.fill_null(read_leaf(table, found.key).cast(pa.string()).combine_chunks(), rows)


def selection(*leaves: Leaf | None) -> list[str]:
    """The leaves as parquet readers name them."""
    return [".".join(leaf) for leaf in leaves if leaf is not None]


def class_names(schema: pa.Schema) -> list[str] | None:
    """Of the labels, where the `datasets` library (Hugging Face) wrote them into the file."""
    label = next((n for n in LABELS if n in schema.names), None)
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names]


@contextmanager
def named_if_broken(name: str) -> Iterator[None]:
    """What Arrow says about a file that is none of its kind, or cut short, as a UsageError."""
    try:
        yield
    except pa.ArrowException as error:
        raise UsageError(f"{name} is not a whole parquet file: {str(error).splitlines()[0]}") from None


def _image(schema: pa.Schema, name: str) -> tuple[Leaf, bool]:
    named = [n for n in IMAGES if n in schema.names and _bytes_leaf(schema.field(n))]
    if not named:
        named = [field.name for field in schema if _bytes_leaf(field)]
        if len(named) > 1:
            raise UsageError(f"{name} has several binary columns ({', '.join(named)}): call one `image`")
    if named and (leaf := _bytes_leaf(schema.field(named[0]))):
        return leaf, False
    for n in PATHS:
        if n in schema.names and _is_text(_plain(schema.field(n).type)):
            return (n,), True
    raise UsageError(f"{name} has no column of encoded images or of their paths; it has {_listed(schema)}")


def _bytes_leaf(field: pa.Field) -> Leaf | None:
    if _is_bytes(field.type):
        return (field.name,)
    if types.is_struct(field.type) and any(f.name == "bytes" and _is_bytes(f.type) for f in field.type):
        return (field.name, "bytes")
    return None


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema) or "no columns"


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if types.is_dictionary(kind) else kind


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)


def _names_things(kind: pa.DataType) -> bool:
    return _is_text(kind) or types.is_integer(kind)
