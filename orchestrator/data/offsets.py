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


def image_places(
    read_at: Callable[[int, int], bytes | memoryview], metadata: pq.FileMetaData, column: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns the offset, size and CRC-32 of each row's value in a parquet file, (rows,) each.

    ``read_at(offset, size)`` reads a column chunk of the file at a time. `column` is the path of a leaf
    (``image`` or ``image.bytes``). Returns None if the file does not hold every value verbatim: for
    compression, a dictionary, lists, other encodings, nulls, chunks in another order and damage.
    """
    leaf = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
    schema = metadata.schema.column(leaf)
    places: list[tuple[int, int, int]] = []
    last = 0
    for number in range(metadata.num_row_groups):
        chunk = metadata.row_group(number).column(leaf)
        begin = chunk.data_page_offset
        verbatim = chunk.compression == "UNCOMPRESSED" and not chunk.has_dictionary_page
        if not verbatim or schema.max_repetition_level or begin < last:
            return None
        last = begin + chunk.total_compressed_size
        view = memoryview(read_at(begin, chunk.total_compressed_size))
        at, end = 0, len(places) + chunk.num_values
        while len(places) < end:
            try:
                found = _page_values(view, at, optional=schema.max_definition_level > 0)
            except (IndexError, KeyError, TypeError, ValueError):
                return None
            if found is None:
                return None
            values, at = found
            places += [(begin + v, size, zlib.crc32(view[v : v + size])) for v, size in values]
    offsets, sizes, crcs = np.array(places, np.int64).reshape(-1, 3).T
    return offsets, sizes, crcs


def _page_values(view: memoryview, at: int, *, optional: bool) -> tuple[list[tuple[int, int]], int] | None:
    """Returns (offset, size) of the values of the page at `at`, and where the next page begins."""
    header, at = _struct(view, at)
    end = at + header[3]
    if header[1] == DATA_PAGE:
        count, encoding = header[5][1], header[5][2]
        at += 4 + _uint32(view, at) if optional else 0
    elif header[1] == DATA_PAGE_V2:
        count, encoding = header[8][1], header[8][4]
        at += header[8][5] + header[8][6]
    else:
        return None
    values = []
    while encoding == PLAIN and at + 4 <= end and len(values) < count:
        size = _uint32(view, at)
        values.append((at + 4, size))
        at += 4 + size
    # A null has a definition level and no value.
    return (values, end) if len(values) == count and at == end else None


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
