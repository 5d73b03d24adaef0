"""The samples of a parquet file: each image's place, labels and key. `tars.py` does the same for tars.

A file is read once, from front to back, and not kept in memory.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from orchestrator import storage
from orchestrator.data.offsets import image_places
from orchestrator.data.samples import Part
from orchestrator.data.tars import Forward, distinct_labels, index_tar
from orchestrator.errors import UsageError, reason_of

# Names of columns of parquet files; the first name that a file has is taken.
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "fine_label")
KEY_COLUMNS = ("key", "__key__", "id", "path", "filename")


class Columns(NamedTuple):
    """The columns of a parquet file that hold images and labels. None: the first known name is taken."""

    image: str | None = None
    label: str | None = None


BY_NAME = Columns()


def index_file(location: str) -> Part:
    """Indexes a file by its extension. Raises as `index_tar` and `index_parquet` do."""
    return index_tar(location) if location.endswith(".tar") else index_parquet(BY_NAME, location)


def index_parquet(columns: Columns, location: str) -> Part:
    """Indexes the rows of a parquet file. If it does not hold the images verbatim, they are read to be
    measured, a row group at a time.

    Raises:
        UsageError: naming the file, if it is cut short or no column fits.
    """
    with named_if_broken(location), storage.open_to_read(location) as source:
        file = pq.ParquetFile(source)
        image, label, key = find_columns(file.schema_arrow, location, columns)
        table = file.read(columns=[leaf for leaf in (label, key) if leaf])
        # Names that are not UTF-8 are refused.
        table.validate(full=True)
        forward = Forward(location)
        places, unpacked = image_places(forward.read_at, file.metadata, image), None
        if places is None:
            measured = [(len(each), zlib.crc32(each)) for each in unpacked_images(file, location, columns)]
            lengths, checks = np.array(measured, np.int64).reshape(-1, 2).T
            places, unpacked = (np.cumsum(lengths) - lengths, lengths, checks), int(lengths.sum())
    labels = read_column(table, label)
    several = _is_list(labels.type)
    kind = labels.type.value_type if several else labels.type
    if not (types.is_integer(kind) or types.is_boolean(kind) or _is_text(kind)):
        raise UsageError(
            f"{location}: column {label} is {labels.type}: labels are whole numbers or names, or lists of"
            " either"
        )
    # Arrow's own numbers may exceed int64.
    kind = pa.string() if _is_text(kind) else pa.int8() if types.is_boolean(kind) else kind
    listed = labels.cast(pa.list_(kind) if several else kind).to_pylist()
    sets = listed if several else [[each] for each in listed]
    name = location.rpartition("/")[2]
    keys = pa.array([f"{name}:{row}" for row in range(table.num_rows)], pa.string())
    if key:
        keys = pc.fill_null(read_column(table, key).cast(pa.string()).combine_chunks(), keys)
    has_label = np.array([bool(each) and None not in each for each in sets], bool)
    has_image = places[1] > 0
    problems = [
        f"{location}: {keys[row]}: no {part}"
        for part, there in (("image", has_image), ("label", has_label))
        for row in np.flatnonzero(~there)
    ]
    rows = np.flatnonzero(has_label & has_image)
    kept = keys.take(rows).to_pylist()
    offsets, sizes, crcs = (column[rows].tolist() for column in places)
    firsts, others = distinct_labels([sets[row] for row in rows], kept, location)
    return Part(
        location,
        firsts,
        kept,
        list(zip(offsets, sizes, strict=True)),
        # Packing reads a compressed file by rows.
        images=[] if unpacked is None else [(location, row) for row in rows.tolist()],
        others=others,
        names=class_names(file.schema_arrow, columns),
        skipped=problems,
        shard=forward.shard(len(rows), unpacked),
        crcs=crcs,
    )


def unpacked_images(file: pq.ParquetFile, name: str, columns: Columns = BY_NAME) -> Iterator[bytes]:
    """Yields the image of every row, empty where there is none."""
    image, _, _ = find_columns(file.schema_arrow, name, columns)
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
        feature = features[label]
        return [str(name) for name in feature.get("feature", feature)["names"]]  # of a list, or of a label
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


@contextmanager
def named_if_broken(name: str) -> Iterator[None]:
    """Turns errors about damaged or incomplete files into a UsageError that names the file."""
    try:
        yield
    except (UsageError, FileNotFoundError):
        raise
    except (pa.ArrowException, ValueError, EOFError) as error:
        raise UsageError(f"{name} is not a whole parquet file: {reason_of(error)}") from None
    except OSError as error:
        # Arrow raises it for damage as well as where storage fails.
        raise UsageError(f"{name} cannot be read: {reason_of(error)}") from None


def _bytes_leaf(field: pa.Field) -> str | None:
    """Returns the column's name, or its field ``bytes``, if it holds bytes."""
    if _is_bytes(field.type):
        return field.name
    if types.is_struct(field.type) and any(f.name == "bytes" and _is_bytes(f.type) for f in field.type):
        return f"{field.name}.bytes"
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)
