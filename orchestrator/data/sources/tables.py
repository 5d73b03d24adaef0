"""Images inside other files: tars as WebDataset writes them, and parquet files."""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from orchestrator import storage
from orchestrator.data import parquet
from orchestrator.data.decode import BadImage
from orchestrator.data.sources.arrange import Found, arrange
from orchestrator.data.sources.files import READERS
from orchestrator.data.sources.listing import by_split, shards_at, split_of
from orchestrator.data.sources.lists import listed
from orchestrator.data.sources.source import Execute, Source
from orchestrator.data.webdataset import members
from orchestrator.errors import UsageError

BUFFER_BYTES = 4 << 20  # of one request to S3 while a tar is listed


class Piece(NamedTuple):
    """Of a tar."""

    location: str
    offset: int
    size: int


class Row(NamedTuple):
    """Of a parquet file."""

    location: str
    group: int
    row: int  # of the group


class Index(NamedTuple):
    """What a file holds. Attributes:
    images: places, and bytes of each as far as known.
    names: of the labels, by number.
    problems: samples that are none, with the reason.
    """

    location: str
    images: list[tuple[Any, int]]
    labels: list[int | str]
    keys: list[str]
    names: list[str] | None = None
    paths: bool = False
    problems: Sequence[str] = ()


def webdataset(path: str, val_frac: float, execute: Execute) -> Source[Piece]:
    return _arranged(*_indexed(path, ".tar", index_tar, execute), read_pieces, val_frac)


def parquet_files(path: str, val_frac: float, execute: Execute) -> Source[Any]:
    files, splits = _indexed(path, ".parquet", index_parquet, execute)
    if any(file.paths for file in files):
        return _listed(path, files, splits, val_frac)
    return _arranged(files, splits, read_rows, val_frac)


def index_tar(location: str) -> Index:
    with storage.open_to_read(location) as file:
        found, problems = members(io.BufferedReader(file, BUFFER_BYTES), location)  # pyright: ignore[reportArgumentType]
    return Index(
        location,
        images=[(Piece(location, m.offset, m.size), m.size) for m in found],
        labels=[m.label for m in found],
        keys=[m.key for m in found],
        problems=problems,
    )


def index_parquet(location: str) -> Index:
    """Reads no images: their size is the mean of their row group."""
    with storage.open_to_read(location) as source, parquet.named_if_broken(location):
        file = pq.ParquetFile(source)
        found = parquet.columns(file.schema_arrow, location)
        paths = found.image if found.paths else None
        table = file.read(columns=parquet.selection(found.label, found.key, paths))
        groups = [file.metadata.row_group(g) for g in range(file.metadata.num_row_groups)]
        names = parquet.class_names(file.schema_arrow)
    if paths:
        images = [(image, 0) for image in parquet.read_leaf(table, paths).to_pylist()]
    else:
        images = [
            (Row(location, g, row), group.total_byte_size // group.num_rows)
            for g, group in enumerate(groups)
            for row in range(group.num_rows)
        ]
    return Index(
        location,
        images,
        labels=parquet.read_labels(table, found).to_pylist(),
        keys=parquet.read_keys(table, found, location.rpartition("/")[2]).to_pylist(),
        names=names,
        paths=found.paths,
    )


def read_pieces(pieces: Sequence[Piece]) -> Iterator[bytes]:
    with ThreadPoolExecutor(READERS) as pool:
        for location, mine in groupby(pieces, key=lambda piece: piece.location):
            with storage.open_to_read(location) as file:
                yield from pool.map(lambda piece: file.read_at(piece.size, piece.offset), mine)


def read_rows(rows: Sequence[Row]) -> Iterator[bytes | BadImage]:
    for location, of_file in groupby(rows, key=lambda row: row.location):
        with storage.open_to_read(location) as source, parquet.named_if_broken(location):
            file = pq.ParquetFile(source)
            leaf = parquet.columns(file.schema_arrow, location).image
            for group, mine in groupby(of_file, key=lambda row: row.group):
                images = parquet.read_leaf(file.read_row_group(group, parquet.selection(leaf)), leaf)
                for row in mine:
                    yield images[row.row].as_py() or BadImage("no bytes")


def _indexed(
    path: str, extension: str, index: Callable[[str], Index], execute: Execute
) -> tuple[list[Index], dict[str, str | None]]:
    """The files that are used, sorted, and their splits by location."""
    folder, names = shards_at(path, extension)
    used = by_split({name: split_of(name) for name in names}, folder)
    splits = {storage.join(folder, name): split for name, split in used.items()}
    return sorted(execute(index, list(splits)), key=lambda file: file.location), splits


def _arranged(
    files: Sequence[Index],
    splits: Mapping[str, str | None],
    fetch: Callable[[Sequence[Any]], Iterator[bytes | BadImage]],
    val_frac: float,
) -> Source[Any]:
    """In the order of the files: any other would read each of them many times."""
    seen: Counter[str] = Counter()
    found, skipped = [], []
    for file in files:
        skipped += file.problems
        for (image, size), label, key in zip(file.images, file.labels, file.keys, strict=True):
            if label is None:
                skipped.append(f"{file.location}: {key}: no label")
                continue
            seen[key] += 1
            unique = key if seen[key] == 1 else f"{key}#{seen[key]}"  # they may count from 0 in each file
            found.append(Found(image, label, unique, size, splits[file.location]))
    if not found:
        reason = "".join(f"; {line}" for line in skipped[:1])
        raise UsageError(f"no sample with an image and a label in {files[0].location}, ..{reason}")
    classes, arranged = arrange(found, val_frac=val_frac, order="listed", names=_names(files))
    return Source(classes=classes, splits=arranged, fetch=fetch, skipped=tuple(skipped))


def _listed(
    path: str, files: Sequence[Index], splits: Mapping[str, str | None], val_frac: float
) -> Source[str]:
    rows = [
        (file.location.rpartition("/")[0], image, label, splits[file.location])
        for file in files
        for (image, _), label in zip(file.images, file.labels, strict=True)
    ]
    return listed(rows, where=path, val_frac=val_frac, names=_names(files))


def _names(files: Sequence[Index]) -> list[str] | None:
    """Raises UsageError if they differ."""
    first, *others = files
    for file in others:
        if file.names != first.names:
            raise UsageError(f"{first.location} and {file.location} name their labels differently")
    return first.names
