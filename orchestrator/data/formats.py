"""The samples of a parquet file: each image's place, labels and key. `tars.py` does the same for tars.

A file is read from front to back, and not kept in memory.
"""

import json
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import types

from orchestrator import storage
from orchestrator.data.labels import listed_labels, read_labels
from orchestrator.data.offsets import image_places
from orchestrator.data.samples import Part
from orchestrator.data.splits import split_column, splits_of_rows, splits_of_samples
from orchestrator.data.tars import Forward, index_tar
from orchestrator.data.text import TEXT, captions_or_error
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


def index_file(location: str) -> Part:
    """Indexes a file by its extension. Raises as `index_tar` and `index_parquet` do."""
    is_tar = location.lower().endswith(".tar")
    return index_tar(location) if is_tar else index_parquet(BY_NAME, location)


def index_parquet(columns: Columns, location: str, *, captions: bool = False) -> Part:
    """Indexes the rows of a parquet file. If it does not hold the images verbatim, they are unpacked to be
    measured. Rows with `captions` need no labels. A file without images, such as the metadata beside tars,
    has no samples and says so.

    Raises:
        UsageError: naming the file, if it is cut short or no column fits.
    """
    with named_if_broken(location), storage.open_to_read(location) as source:
        file = pq.ParquetFile(source)
        try:
            image, label, key = find_columns(file.schema_arrow, location, columns)
        except NoImagesError as error:
            if columns.image:
                raise
            return Part(location, [], [], [], skipped=[f"{error}: it is passed over"])
        if label is None and not captions:
            raise no_column(location, "label", columns.label, LABEL_COLUMNS, _listed(file.schema_arrow))
        texts = _captions(file, location, columns) if captions else []
        caption = first_column(columns.caption, CAPTION_COLUMNS, file.schema_arrow.names)
        taken = [image.partition(".")[0], label, key, caption if captions else None]
        split, notes = split_column(file.schema_arrow.names, taken, location)
        split = split if split and _is_text(file.schema_arrow.field(split).type) else None
        table = _read(file, [leaf for leaf in (label, key, split) if leaf])
        # Names that are not UTF-8 are refused.
        table.validate(full=True)
        forward = Forward(location)
        places, unpacked = image_places(forward.read_at, file.metadata, image), None
        if places is None:
            measured = [(len(each), zlib.crc32(each)) for each in unpacked_images(location, columns)]
            lengths, checks = np.array(measured, np.int64).reshape(-1, 2).T
            places, unpacked = (np.cumsum(lengths) - lengths, lengths, checks), int(lengths.sum())
        paths = _paths(file, image, np.flatnonzero(places[1] == 0))
    sets = _labels(table, label, location) if label else [[]] * table.num_rows
    name = location.rpartition("/")[2]
    keys = pa.array([f"{name}:{row}" for row in range(table.num_rows)], pa.string())
    if key:
        keys = pc.fill_null(read_column(table, key).cast(pa.string()).combine_chunks(), keys)
    labels = read_labels(sets, keys.to_pylist(), location)
    has_label = np.array([captions or first is not None for first in labels.first], bool)
    has_image, has_text = places[1] > 0, np.array([isinstance(text, bytes) for text in texts], bool)
    bare = np.flatnonzero(~has_image).tolist()
    problems = [f"{location}: {keys[row]}: no image{paths.get(row, '')}" for row in bare]
    problems += [f"{location}: {keys[row]}: no label" for row in np.flatnonzero(~has_label)]
    problems += [f"{location}: {keys[row]}: {texts[row]}" for row in np.flatnonzero(~has_text)]
    rows = np.flatnonzero(has_label & has_image & (has_text if captions else True))
    kept = keys.take(rows).to_pylist()
    offsets, sizes, crcs = (column[rows].tolist() for column in places)
    words = read_column(table, split).take(rows).to_pylist() if split else []
    by_column, doubt = splits_of_rows(split, words) if split else ([], "")
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
        splits=by_column or splits_of_samples(kept),
        doubt=doubt,
        unlabelled=int((~has_label).sum()),
        notes=notes,
    )


def _labels(table: pa.Table, label: str, location: str) -> list[list[Any]]:
    """Returns the labels of each row, as `read_labels` takes them."""
    column = _with_text(read_column(table, label))
    kind = column.type.value_type if _is_list(column.type) else column.type
    numbers = types.is_integer(kind) or types.is_boolean(kind) or types.is_floating(kind)
    if not (numbers or _is_text(kind) or types.is_null(kind)):
        raise UsageError(
            f"{location}: column {label} is {column.type}: labels are numbers or names, or lists of either"
        )
    return [listed_labels(each) for each in column.to_pylist()]


def _read(file: pq.ParquetFile, columns: list[str]) -> pa.Table:
    try:
        return file.read(columns)
    except pa.ArrowNotImplementedError:  # lists of dictionaries in several row groups
        return pa.concat_tables(file.read_row_group(n, columns) for n in range(file.num_row_groups))


def _with_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column, or lists, of bytes as text."""
    if _is_list(column.type):
        return column.cast(pa.list_(pa.string())) if _is_bytes(column.type.value_type) else column
    return column.cast(pa.string()) if _is_bytes(column.type) else column


def _paths(file: pq.ParquetFile, image: str, rows: NDArray[np.intp]) -> dict[int, str]:
    """Returns what to say of rows without bytes: Hugging Face's structs may have a path alone."""
    column, _, field = image.partition(".")
    if not (field and len(rows) and PATH in [f.name for f in file.schema_arrow.field(column).type]):
        return {}
    paths = read_column(_read(file, [f"{column}.{PATH}"]), f"{column}.{PATH}")
    there = ((row, paths[row].as_py()) for row in rows.tolist())
    return {row: f", only a path, which is not read: {path}" for row, path in there if path}


def _captions(file: pq.ParquetFile, location: str, columns: Columns) -> list[bytes | ValueError]:
    """Returns the field of captions of each row, or why it has none."""
    schema = file.schema_arrow
    column = first_column(columns.caption, CAPTION_COLUMNS, schema.names)
    if column is None:
        raise no_column(location, "caption", columns.caption, CAPTION_COLUMNS, _listed(schema))
    values = read_column(_read(file, [column]), column)
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
    return UsageError(f"{location} has no {what} column ({names}); it has {there}: name the one to take")


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
            if _is_list(field.type) and _bytes_leaf(field.with_type(field.type.value_type)):
                raise UsageError(
                    f"{name}: column {field.name} is {field.type}, which may hold several images: give each"
                    " image a row of its own"
                )
        raise NoImagesError(
            f"{name} has no column of encoded images ({', '.join(images)}); it has {_listed(schema)}"
        )
    label = first_column(columns.label, LABEL_COLUMNS, schema.names)
    column, _, field = image.partition(".")
    there = filter(None, (first_column(name, (), schema.names) for name in KEY_COLUMNS))
    keys = [name for name in there if name not in (column, label)]
    keys = [n for n in keys if _is_text(schema.field(n).type) or types.is_integer(schema.field(n).type)]
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
    if _is_list(kind):
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
    if _is_bytes(field.type):
        return field.name
    if types.is_struct(field.type):
        for inner in field.type:
            if inner.name == "bytes" and (_is_bytes(inner.type) or types.is_null(inner.type)):
                return f"{field.name}.bytes"
    return None


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(plain := _plain(kind)) or types.is_large_binary(plain)


def _is_list(kind: pa.DataType) -> bool:
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return views or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(plain := _plain(kind)) or types.is_large_string(plain)
