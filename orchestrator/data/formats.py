"""The samples of a parquet file: each image's place, labels and key. `tars.py` does the same for tars.

A file is read once, from front to back, and not kept in memory.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from orchestrator import storage
from orchestrator.data.labels import listed_labels, read_labels
from orchestrator.data.offsets import image_places
from orchestrator.data.samples import Part
from orchestrator.data.splits import SPLIT_COLUMNS, splits_of_samples
from orchestrator.data.tars import Forward, index_tar
from orchestrator.data.text import TEXT, captions_or_error
from orchestrator.errors import UsageError, reason_of

# Names of columns of parquet and csv files; the first name that a file has is taken.
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "fine_label")
CAPTION_COLUMNS = ("caption", "captions", "text", "title")
KEY_COLUMNS = ("key", "__key__", "id", "path", "filename")


class Columns(NamedTuple):
    """The columns of files that hold images (csv: their paths), labels and captions. None: the first known
    name is taken.
    """

    image: str | None = None
    label: str | None = None
    caption: str | None = None


BY_NAME = Columns()


def index_file(location: str) -> Part:
    """Indexes a file by its extension. Raises as `index_tar` and `index_parquet` do."""
    is_tar = location.lower().endswith(".tar")
    return index_tar(location) if is_tar else index_parquet(BY_NAME, location)


def index_parquet(columns: Columns, location: str, *, captions: bool = False) -> Part:
    """Indexes the rows of a parquet file. If it does not hold the images verbatim, they are read to be
    measured, a row group at a time. Rows with `captions` need no labels. A file without images, such as the
    metadata beside tars, has no samples and says so.

    Raises:
        UsageError: naming the file, if it is cut short or no column fits.
    """
    with named_if_broken(location), storage.open_to_read(location) as source:
        file = pq.ParquetFile(source)
        try:
            image, label, key = find_columns(file.schema_arrow, location, columns)
        except UsageError as error:
            if columns.image:
                raise
            return Part(location, [], [], [], skipped=[f"{error}: it is passed over"])
        if label is None and not captions:
            raise no_column(location, "label", columns.label, LABEL_COLUMNS, _listed(file.schema_arrow))
        texts = _captions(file, location, columns) if captions else []
        split = first_column(None, SPLIT_COLUMNS, file.schema_arrow.names)
        split = split if split and _is_text(file.schema_arrow.field(split).type) else None
        table = file.read(columns=[leaf for leaf in (label, key, split) if leaf])
        # Names that are not UTF-8 are refused.
        table.validate(full=True)
        forward = Forward(location)
        places, unpacked = image_places(forward.read_at, file.metadata, image), None
        if places is None:
            measured = [(len(each), zlib.crc32(each)) for each in unpacked_images(file, location, columns)]
            lengths, checks = np.array(measured, np.int64).reshape(-1, 2).T
            places, unpacked = (np.cumsum(lengths) - lengths, lengths, checks), int(lengths.sum())
    sets = _labels(table, label, location) if label else [[]] * table.num_rows
    name = location.rpartition("/")[2]
    keys = pa.array([f"{name}:{row}" for row in range(table.num_rows)], pa.string())
    if key:
        keys = pc.fill_null(read_column(table, key).cast(pa.string()).combine_chunks(), keys)
    labels = read_labels(sets, keys.to_pylist(), location)
    has_label = np.array([captions or first is not None for first in labels.first], bool)
    has_image, has_text = places[1] > 0, np.array([isinstance(text, bytes) for text in texts], bool)
    problems = [
        f"{location}: {keys[row]}: no {part}"
        for part, there in (("image", has_image), ("label", has_label))
        for row in np.flatnonzero(~there)
    ]
    problems += [f"{location}: {keys[row]}: {texts[row]}" for row in np.flatnonzero(~has_text)]
    rows = np.flatnonzero(has_label & has_image & (has_text if captions else True))
    kept = keys.take(rows).to_pylist()
    offsets, sizes, crcs = (column[rows].tolist() for column in places)
    words = [str(word) for word in read_column(table, split).take(rows).to_pylist()] if split else []
    return Part(
        location,
        [labels.first[row] for row in rows],
        kept,
        list(zip(offsets, sizes, strict=True)),
        # Packing reads a compressed file by rows.
        images=[] if unpacked is None else [(location, row) for row in rows.tolist()],
        others=[labels.others[row] for row in rows] if labels.others else [],
        names=class_names(file.schema_arrow, columns),
        skipped=problems,
        shard=forward.shard(len(rows), unpacked),
        crcs=crcs,
        fields={TEXT: [texts[row] for row in rows]} if captions else {},
        hot=labels.hot,
        splits=splits_of_samples(words) or splits_of_samples(kept),
        unlabelled=int((~has_label).sum()),
    )


def _labels(table: pa.Table, label: str, location: str) -> list[list[Any]]:
    """Returns the labels of each row, as `read_labels` takes them."""
    column = read_column(table, label)
    kind = column.type.value_type if _is_list(column.type) else column.type
    numbers = types.is_integer(kind) or types.is_boolean(kind) or types.is_floating(kind)
    if not (numbers or _is_text(kind) or types.is_null(kind)):
        raise UsageError(
            f"{location}: column {label} is {column.type}: labels are numbers or names, or lists of either"
        )
    return [listed_labels(each) for each in column.to_pylist()]


def _captions(file: pq.ParquetFile, location: str, columns: Columns) -> list[bytes | ValueError]:
    """Returns the field of captions of each row, or why it has none."""
    schema = file.schema_arrow
    column = first_column(columns.caption, CAPTION_COLUMNS, schema.names)
    if column is None:
        raise no_column(location, "caption", columns.caption, CAPTION_COLUMNS, _listed(schema))
    values = read_column(file.read(columns=[column]), column)
    several = _is_list(values.type)
    kind = values.type.value_type if several else values.type
    if not (_is_text(kind) or types.is_null(kind)):
        raise UsageError(f"{location}: column {column} is {values.type}: captions are text, or lists of text")
    # Arrow would refuse the whole file for a caption that is not UTF-8.
    rows = values.cast(pa.list_(pa.large_binary()) if several else pa.large_binary()).to_pylist()
    return [captions_or_error(row) for row in rows]


def first_column(named: str | None, known: Sequence[str], there: Sequence[str]) -> str | None:
    """Returns the column that the user names, else the first known name that is there, in any case."""
    folded = {name.casefold(): name for name in reversed(there)} | {name: name for name in there}
    return next((folded[name] for name in ((named,) if named else known) if name in folded), None)


def no_column(location: str, what: str, named: str | None, known: Sequence[str], there: str) -> UsageError:
    names = ", ".join((named,) if named else known)
    return UsageError(f"{location} has no {what} column ({names}); it has {there}")


def unpacked_images(file: pq.ParquetFile, name: str, columns: Columns = BY_NAME) -> Iterator[bytes]:
    """Yields the image of every row, empty where there is none."""
    image, _, _ = find_columns(file.schema_arrow, name, columns)
    for group in range(file.num_row_groups):
        for value in read_column(file.read_row_group(group, [image]), image):
            yield value.as_py() or b""


def find_columns(
    schema: pa.Schema, name: str, columns: Columns = BY_NAME
) -> tuple[str, str | None, str | None]:
    """Returns the columns of the image and, if there are, the label and the key."""
    images = (columns.image,) if columns.image else IMAGE_COLUMNS
    there = filter(None, (first_column(name, (), schema.names) for name in images))
    image = next((leaf for name in there if (leaf := _bytes_leaf(schema.field(name)))), None)
    if image is None:
        raise UsageError(
            f"{name} has no column of encoded images ({', '.join(images)}); it has {_listed(schema)}"
        )
    label = first_column(columns.label, LABEL_COLUMNS, schema.names)
    column, _, field = image.partition(".")
    there = filter(None, (first_column(name, (), schema.names) for name in KEY_COLUMNS))
    keys = [name for name in there if name not in (column, label)]
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
    label = first_column(columns.label, LABEL_COLUMNS, schema.names)
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


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)
