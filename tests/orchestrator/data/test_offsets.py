"""Places of images in parquet files, against the bytes that were written."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.packing.offsets import image_places
from tests.orchestrator.data.images import parquet

# Values that repeat, hold each other, look like lengths, and are empty.
VALUES = [
    b"aaaa",
    b"aa",
    b"",
    b"\4\0\0\0aaaa",
    b"aaaa" * 300,
    *(bytes([n]) * (n * 7 % 300) for n in range(200)),
]
STRUCTS = pa.array([{"bytes": value, "path": f"{n}"} for n, value in enumerate(VALUES)])
VERBATIM: dict[str, Any] = {"compression": "none", "use_dictionary": False}


def places(path: Path, column: str = "image", content: bytes | None = None) -> list[tuple[int, int]] | None:
    """Returns offset and size of each value, after a look at its checksum."""
    view = memoryview(content or path.read_bytes())
    found = image_places(lambda at, size: view[at : at + size], pq.read_metadata(path), column)
    if found is None:
        return None
    offsets, sizes, crcs = (array.tolist() for array in found)
    places = list(zip(offsets, sizes, strict=True))
    assert crcs == [zlib.crc32(view[at : at + size]) for at, size in places]
    return places


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize(
    ("image", "column"),
    [
        (VALUES, "image"),
        (STRUCTS, "image.bytes"),
        (pa.array(VALUES, pa.large_binary()), "image"),
        (pa.array(VALUES, pa.binary_view()), "image"),
        (pa.array(VALUES).dictionary_encode(), "image"),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"row_group_size": 64}, {"data_page_size": 500, "write_batch_size": 5}]
)
def test_every_value(image: Any, column: str, options: dict[str, Any], version: str, tmp_path: Path) -> None:
    """Pages of both versions, many pages per row group, and columns before and after the images."""
    columns = {"key": [f"k{n}" for n in range(len(VALUES))], "image": image, "label": [*range(len(VALUES))]}
    path = parquet(tmp_path / "x", columns, data_page_version=version, **VERBATIM, **options)
    found = places(path, column)
    assert found
    content = path.read_bytes()
    assert [content[offset : offset + size] for offset, size in found] == VALUES


def test_a_required_column(tmp_path: Path) -> None:
    """Its pages have no definition levels."""
    schema = pa.schema([pa.field("image", pa.binary(), nullable=False)])
    pq.write_table(pa.table([VALUES], schema=schema), tmp_path / "x", **VERBATIM)
    content = (tmp_path / "x").read_bytes()
    assert [content[at : at + size] for at, size in places(tmp_path / "x") or []] == VALUES


@pytest.mark.parametrize("size", [1, 4, 300])
@pytest.mark.parametrize(
    "options", [{}, {"row_group_size": 7}, {"data_page_size": 50, "write_batch_size": 5}]
)
def test_values_of_one_size(options: dict[str, Any], size: int, tmp_path: Path) -> None:
    """They have no lengths in the file."""
    values = [bytes([n]) * size for n in range(50)]
    path = parquet(tmp_path / "x", {"image": pa.array(values, pa.binary(size))}, **VERBATIM, **options)
    content = path.read_bytes()
    assert [content[at : at + found] for at, found in places(path) or []] == values


def test_statistics_larger_than_what_is_read_of_a_page_at_first(tmp_path: Path) -> None:
    values = [bytes([n]) * 100_000 for n in range(3)]
    path = parquet(tmp_path / "x", {"image": values}, write_page_index=False, **VERBATIM)
    content = path.read_bytes()
    assert [content[at : at + size] for at, size in places(path) or []] == values


def test_no_rows(tmp_path: Path) -> None:
    assert places(parquet(tmp_path / "x", {"image": pa.array([], pa.binary())}, **VERBATIM)) == []


@pytest.mark.parametrize(
    ("values", "column", "options"),
    [
        (VALUES, "image", {"compression": "snappy"}),
        (VALUES, "image", {"use_dictionary": True}),
        ([b"a", None, b"b"], "image", {}),
        (VALUES, "image", {"column_encoding": "DELTA_BYTE_ARRAY"}),
        ([[b"a"], [b"b", b"c"]], "image.list.element", {}),
        (pa.nulls(3), "image", {}),
        ([1, 2, 3], "image", {}),
    ],
)
def test_values_that_are_not_verbatim(
    values: Any, column: str, options: dict[str, Any], tmp_path: Path
) -> None:
    assert places(parquet(tmp_path / "x", {"image": values}, **VERBATIM | options), column) is None


def test_damaged_headers(tmp_path: Path) -> None:
    """A flipped byte of the page's header or lengths gives None or places within the chunk."""
    path = parquet(tmp_path / "x", {"image": VALUES}, **VERBATIM)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    begin = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    for at in range(begin, begin + 60):
        content = bytearray(whole)
        content[at] ^= int(rng.integers(1, 256))
        found = places(path, content=bytes(content))
        assert found is None or all(offset + size <= len(whole) for offset, size in found)
