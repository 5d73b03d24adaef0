"""Parquet files: each image's place, labels and key. `tars.py` does the same for tars.

A file is read from front to back, and not kept in memory.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Literal
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import types

from orchestrator import storage
from orchestrator.data.parquet import (
    BY_NAME,
    CAPTION_COLUMNS,
    LABEL_COLUMNS,
    PATH,
    Columns,
    NoImagesError,
    class_names,
    columns_in,
    find_columns,
    first_column,
    image_column,
    is_bytes,
    is_list,
    is_text,
    named_if_broken,
    read_column,
    unpacked_images,
)
from orchestrator.data.text import TEXT, captions_or_error
from orchestrator.errors import UsageError
from orchestrator.packing.base import FilesConfig, read_ranges
from orchestrator.packing.labels import listed_labels, read_labels
from orchestrator.packing.listing import PARQUET
from orchestrator.packing.offsets import image_places
from orchestrator.packing.samples import Execute, Part, Source
from orchestrator.packing.splits import split_column, splits_of_rows, splits_of_samples
from orchestrator.packing.tars import Forward


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(FilesConfig):
    """Parquet files: a column of encoded images and one of labels, or of lists of them."""

    kind: Literal["parquet"] = "parquet"
    extensions: ClassVar[tuple[str, ...]] = (".parquet",)
    in_place: ClassVar[bool] = True

    columns: Columns = BY_NAME

    @classmethod
    def recognises(cls, location: str) -> bool:
        return PARQUET.search(location) is not None

    def index(self, location: str) -> Part:
        return index_parquet(self.columns, location, captions=self.captions)

    def samples(self, execute: Execute) -> Source:
        found = super().samples(execute)
        return replace(found, fetch=partial(read_places, self.columns, uuid4().hex))


def read_places(columns: Columns, source: str, places: Sequence[tuple[Any, ...]]) -> Iterator[bytes]:
    """Reads images by (location, offset, size) or, of compressed files, (location, row).

    source: another text for each source, because files may have changed since another was opened.
    """
    for by_row, group in groupby(places, key=lambda place: len(place) == 2):
        if by_row:
            yield from (image_column(path, columns, source).read(row) for path, row in group)
        else:
            yield from read_ranges([*group])


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
            raise no_column(location, "label", columns.label, LABEL_COLUMNS, columns_in(file.schema_arrow))
        texts = _captions(file, location, columns) if captions else []
        caption = first_column(columns.caption, CAPTION_COLUMNS, file.schema_arrow.names)
        taken = [image.partition(".")[0], label, key, caption if captions else None]
        split, notes = split_column(file.schema_arrow.names, taken, location)
        split = split if split and is_text(file.schema_arrow.field(split).type) else None
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
    kind = column.type.value_type if is_list(column.type) else column.type
    numbers = types.is_integer(kind) or types.is_boolean(kind) or types.is_floating(kind)
    if not (numbers or is_text(kind) or types.is_null(kind)):
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
    if is_list(column.type):
        return column.cast(pa.list_(pa.string())) if is_bytes(column.type.value_type) else column
    return column.cast(pa.string()) if is_bytes(column.type) else column


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
        raise no_column(location, "caption", columns.caption, CAPTION_COLUMNS, columns_in(schema))
    values = read_column(_read(file, [column]), column)
    several = is_list(values.type)
    kind = values.type.value_type if several else values.type
    if not (is_text(kind) or types.is_null(kind)):
        raise UsageError(f"{location}: column {column} is {values.type}: captions are text, or lists of text")
    # Arrow would refuse the whole file for a caption that is not UTF-8.
    rows = values.cast(pa.list_(pa.large_binary()) if several else pa.large_binary()).to_pylist()
    return [captions_or_error(row) for row in rows]


def no_column(location: str, what: str, named: str | None, known: Sequence[str], there: str) -> UsageError:
    names = ", ".join((named,) if named else known)
    return UsageError(f"{location} has no {what} column ({names}); it has {there}: name the one to take")
