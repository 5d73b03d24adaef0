"""Where the images of an uncompressed parquet file lie in it.

pyarrow says where a column's chunk begins, not where its values do. An uncompressed chunk of byte arrays in
PLAIN encoding is a sequence of pages: a header in Thrift's compact protocol, definition levels, then for each
value its length in 4 bytes and its bytes. Source: the Apache Parquet format, "Data Pages" and "Encodings".
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

PLAIN = 0
DATA_PAGE, DATA_PAGE_V2 = 0, 3  # page types; dictionary and index pages are not read
HEADER = 1 << 16  # bytes that are read at first of a page


def image_places(
    read_at: Callable[[int, int], bytes | memoryview], metadata: pq.FileMetaData, column: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns the offset, size and CRC-32 of each row's value in a parquet file, (rows,) each.

    ``read_at(offset, size)`` reads a page of the file at a time. `column` is the path of a leaf (``image`` or
    ``image.bytes``). Returns None if the file does not hold every value verbatim: for compression, a
    dictionary, lists, other encodings, nulls, chunks in another order and damage.
    """
    leaf = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
    schema = metadata.schema.column(leaf)
    if schema.physical_type not in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
        return None
    fixed = schema.length if schema.physical_type == "FIXED_LEN_BYTE_ARRAY" else None
    places: list[tuple[int, int, int]] = []
    last = 0
    for number in range(metadata.num_row_groups):
        chunk = metadata.row_group(number).column(leaf)
        begin = chunk.data_page_offset
        verbatim = chunk.compression == "UNCOMPRESSED" and not chunk.has_dictionary_page
        if not verbatim or schema.max_repetition_level or begin < last:
            return None
        last = begin + chunk.total_compressed_size
        rest, end = _Rest(read_at, begin, last), len(places) + chunk.num_values
        while len(places) < end:
            try:
                found = _page_values(rest, optional=schema.max_definition_level > 0, fixed=fixed)
            except (IndexError, KeyError, TypeError, ValueError):
                return None
            if found is None:
                return None
            values, page = found
            places += [(rest.begin + v, size, zlib.crc32(rest.view[v : v + size])) for v, size in values]
            rest.drop(page)
    offsets, sizes, crcs = np.array(places, np.int64).reshape(-1, 3).T
    return offsets, sizes, crcs


class _Rest:
    """The rest of a column chunk: `view` has its bytes from `begin` on, as far as they were asked for."""

    def __init__(self, read_at: Callable[[int, int], bytes | memoryview], begin: int, end: int) -> None:
        self._read_at, self.begin, self._end = read_at, begin, end
        self.view = memoryview(b"")

    def ask(self, size: int) -> bool:
        """Returns whether `view` has `size` bytes."""
        there, wanted = self.begin + len(self.view), min(self.begin + size, self._end)
        if wanted > there:
            self.view = memoryview(b"".join((self.view, self._read_at(there, wanted - there))))
        return len(self.view) >= size

    def drop(self, size: int) -> None:
        self.begin, self.view = self.begin + size, self.view[size:]


def _page_values(
    rest: _Rest, *, optional: bool, fixed: int | None
) -> tuple[list[tuple[int, int]], int] | None:
    """Returns (offset, size) of the values of the next page in `rest`, and the size of the page.

    fixed: the size of every value, if values have no lengths of their own.
    """
    header, at = _header(rest)
    end = at + header[3]
    if end < at or not rest.ask(end):
        return None
    view = rest.view
    if header[1] == DATA_PAGE:
        count, encoding = header[5][1], header[5][2]
        at += 4 + _uint32(view, at) if optional else 0
    elif header[1] == DATA_PAGE_V2:
        count, encoding = header[8][1], header[8][4]
        at += header[8][5] + header[8][6]
    else:
        return None
    values, prefix = [], 4 if fixed is None else 0
    while encoding == PLAIN and at + (fixed or prefix) <= end and len(values) < count:
        size = _uint32(view, at) if fixed is None else fixed
        values.append((at + prefix, size))
        at += prefix + size
    # A null has a definition level and no value.
    return (values, end) if len(values) == count and at == end else None


def _header(rest: _Rest) -> tuple[dict[int, Any], int]:
    """Reads the header of the next page. Statistics in it may be as large as two values."""
    size = HEADER
    while True:
        is_whole = rest.ask(size)
        try:
            return _struct(rest.view, 0)
        except IndexError:
            if not is_whole:
                raise
        size *= 4


def _uint32(view: memoryview, at: int) -> int:
    return int.from_bytes(view[at : at + 4], "little")


def _struct(view: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """Reads a struct of Thrift's compact protocol: field number -> value, and where it ends.

    Page headers hold booleans, integers, binary statistics and further structs.
    """
    fields: dict[int, Any] = {}
    number = 0
    while head := view[at]:
        kind, step = head & 15, head >> 4
        at += 1
        if step:
            number += step
        else:
            number, at = _zigzag(view, at)
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (4, 5, 6):
            fields[number], at = _zigzag(view, at)
        elif kind == 8:
            size, at = _varint(view, at)
            at += size
        elif kind == 12:
            fields[number], at = _struct(view, at)
        else:
            raise ValueError(f"a page header holds a field of Thrift type {kind}")
    return fields, at + 1


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _zigzag(view: memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(view, at)
    return (value >> 1) ^ -(value & 1), at
