"""Columns of parquet files: which one has images, labels and keys, and reading images row by row."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from orchestrator import storage
from orchestrator.errors import UsageError, reason_of

# Names of columns of parquet and csv files; the first name that a file has is taken.
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "fine_label")
CAPTION_COLUMNS = ("caption", "captions", "text", "title")
KEY_COLUMNS = ("key", "__key__", "id", "path", "filename")


class NoImagesError(UsageError):
    """Raised for a parquet file without a column of images."""


class Columns(NamedTuple):
    """The columns of files that hold images (csv: their paths), labels and captions. None: the first known
    name is taken.
    """

    image: str | None = None
    label: str | None = None
    caption: str | None = None


BY_NAME = Columns()
PATH = "path"  # Hugging Face stores images as structs of bytes and path
BATCH = 64  # images that are unpacked at a time

_last = threading.local()  # the file whose images a thread unpacks


def first_column(named: str | None, known: Sequence[str], there: Sequence[str]) -> str | None:
    """Returns the column that the user names, else the first known name that is there, in any case."""
    folded = {name.casefold(): name for name in reversed(there)} | {name: name for name in there}
    return next((folded[name] for name in ((named,) if named else known) if name in folded), None)


class ImageColumn:
    """The images of a parquet file by row, unpacked in batches, whatever the size of its row groups.

    Rows of a group can only be reached from its front, so they should be read in rising order.
    """

    def __init__(self, location: str, columns: Columns) -> None:
        with named_if_broken(location):
            # A column chunk is not read as a whole.
            self._file = pq.ParquetFile(storage.open_to_read(location), pre_buffer=False, buffer_size=1 << 20)
            self._image, _, _ = find_columns(self._file.schema_arrow, location, columns)
        groups = range(self._file.num_row_groups)
        sizes = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._location, self._first = location, np.cumsum([0, *sizes])
        self._rest = self.batches()
        self._rows, self._batch = range(0), pa.chunked_array([], pa.binary())

    def batches(self, group: int = 0) -> Iterator[tuple[range, pa.ChunkedArray]]:
        """Yields row numbers with their images, from the first row of a group on."""
        row, groups = int(self._first[group]), range(group, self._file.num_row_groups)
        with named_if_broken(self._location):
            # Arrow's threads would read ahead.
            of_file = self._file.iter_batches(BATCH, groups, [self._image], use_threads=False)
            for batch in of_file if groups else ():
                yield range(row, row := row + len(batch)), read_column(pa.table(batch), self._image)

    def read(self, row: int) -> bytes:
        """Returns an image, empty where there is none."""
        group = int(np.searchsorted(self._first, row, side="right")) - 1
        if row < self._rows.start or self._first[group] > self._rows.stop:
            self._rest, self._rows = self.batches(group), range(0)
        while row not in self._rows:
            self._rows, self._batch = next(self._rest)
        return self._batch[row - self._rows.start].as_py() or b""


def unpacked_images(location: str, columns: Columns = BY_NAME) -> Iterator[bytes]:
    """Yields the image of every row, empty where there is none."""
    for _, batch in ImageColumn(location, columns).batches():
        yield from (value.as_py() or b"" for value in batch)


def image_column(location: str, columns: Columns, source: str) -> ImageColumn:
    """Returns the images of a file, as this thread has opened them for this source: who reads the rows that
    follow goes on where it stopped.
    """
    wanted = location, columns, source
    if getattr(_last, "opened", None) != wanted:
        _last.column, _last.opened = ImageColumn(location, columns), wanted
    return _last.column


def find_columns(
    schema: pa.Schema, name: str, columns: Columns = BY_NAME
) -> tuple[str, str | None, str | None]:
    """Returns the columns of the image and, if there are, the label and the key."""
    images = (columns.image,) if columns.image else IMAGE_COLUMNS
    there = filter(None, (first_column(name, (), schema.names) for name in images))
    image = next((leaf for name in there if (leaf := _bytes_leaf(schema.field(name)))), None)
    if image is None:
        for field in (schema.field(n) for n in images if n in schema.names):
            if is_list(field.type) and _bytes_leaf(field.with_type(field.type.value_type)):
                raise UsageError(
                    f"{name}: column {field.name} is {field.type}, which may hold several images: give each"
                    " image a row of its own"
                )
        raise NoImagesError(
            f"{name} has no column of encoded images ({', '.join(images)}); it has {columns_in(schema)}"
        )
    label = first_column(columns.label, LABEL_COLUMNS, schema.names)
    column, _, field = image.partition(".")
    there = filter(None, (first_column(name, (), schema.names) for name in KEY_COLUMNS))
    keys = [name for name in there if name not in (column, label)]
    keys = [n for n in keys if is_text(schema.field(n).type) or types.is_integer(schema.field(n).type)]
    if field and PATH in [f.name for f in schema.field(column).type]:
        keys.append(f"{column}.{PATH}")
    return image, label, next(iter(keys), None)


def read_column(table: pa.Table, leaf: str) -> pa.ChunkedArray:
    """Returns a column, or a field of a struct, of a plain type: without dictionaries and views."""
    name, _, field = leaf.partition(".")
    column = table.select([name]).flatten()[leaf] if field else table[name]
    return column.cast(_plain(column.type))


def _plain(kind: pa.DataType) -> pa.DataType:
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.large_binary()
    return pa.large_string() if types.is_string_view(kind) else kind


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
    """Returns the column's name, or its field ``bytes``, if it holds bytes, or could if any row had them."""
    if is_bytes(field.type):
        return field.name
    if types.is_struct(field.type):
        for inner in field.type:
            if inner.name == "bytes" and (is_bytes(inner.type) or types.is_null(inner.type)):
                return f"{field.name}.bytes"
    return None


def columns_in(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(plain := _plain(kind)) or types.is_large_binary(plain)


def is_list(kind: pa.DataType) -> bool:
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return views or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    return types.is_string(plain := _plain(kind)) or types.is_large_string(plain)
