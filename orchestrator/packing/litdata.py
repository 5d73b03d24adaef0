"""Chunks that LitData's `optimize` wrote, as samples to be packed.

Source: `src/litdata/streaming/{writer,serializers,item_loader,framed_zstd}.py` of
https://github.com/Lightning-AI/litdata, 0.2.17 to 0.2.76. A chunk is, by the version and by what samples are:

- records, of the leaves of each sample,
- a whole file of zstd, whose content is any of these,
- records whose samples were compressed one by one,
- ``LDFZ01``: records whose samples were compressed many together, or
- records, or only their offsets, and behind them an Arrow file of the samples, ``LDARW01``: samples without
  images of Pillow, as ``{"image": b"..", "label": 3}``.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.packing.record_shards import (
    PlainRecords,
    RecordColumn,
    RecordsConfig,
    RecordShard,
    RecordTable,
    ValueReader,
    codec_of,
    decompress,
    scalar,
)

FRAMED, ARROW, ZSTD = b"LDFZ01\0\0", b"LDARW01\0", b"\x28\xb5\x2f\xfd"
LOADERS = {  # of chunks that hold no samples of images -> why not
    "TokensLoader": "they hold tokens of text",
    "ParquetLoader": "give parquet:PATH as the source",
    "TemporalArrayLoader": "they hold arrays over time",
}
NUMPY = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")  # by number
TORCH = ("f4", "f4", "f8", "f8", "c8", "c8", "c16", "c16", "f2", "f2", "V2", "u1", "i1", "i2", "i2")
TORCH += ("i4", "i4", "i8", "i8", "?", "u2")  # V2 for bfloat16, which numpy lacks


class LitDataShard(NamedTuple):
    """A chunk of `rows` samples. `is_zstd`: whether the whole file is compressed."""

    location: str
    name: str
    rows: int
    columns: tuple[RecordColumn, ...]
    is_zstd: bool

    def unpack(self, content: bytes) -> bytes:
        plain = decompress(content, "zstd", 0) if self.is_zstd else content
        if plain.startswith(FRAMED):
            return _without_frames(plain)
        return _uncompressed_rows(plain) if plain.endswith(ARROW) else _uncompressed_samples(plain)

    def records(self, plain: bytes) -> RecordTable:
        if plain.endswith(ARROW):
            return ArrowRecords(plain)
        return PlainRecords(plain, self.columns, self.decoder)

    def decoder(self, encoding: str) -> ValueReader | None:
        kind, _, form = encoding.partition(":")
        if kind == "no_header_numpy":
            return partial(np.frombuffer, dtype=_dtype(NUMPY[int(form)]))
        if kind == "no_header_tensor":
            return partial(np.frombuffer, dtype=_dtype(TORCH[int(form)]))
        return DECODERS.get(encoding)


class ArrowRecords:
    """The samples of the Arrow file at the end of a chunk."""

    def __init__(self, plain: bytes) -> None:
        self._buffer = pa.py_buffer(plain)
        self._rows = _arrow_rows(self._buffer).flatten()
        self.encodings = {field.name: _kind_of(field.type) for field in self._rows.schema}

    def spans(self, column: str) -> list[tuple[int, int]]:
        return [*chain.from_iterable(map(self._spans, self._rows[column].chunks))]

    def values(self, column: str) -> list[Any] | None:
        return self._rows[column].to_pylist()

    def _spans(self, values: pa.Array) -> Iterator[tuple[int, int]]:
        _, offsets, content = values.buffers()
        assert offsets
        at = content.address - self._buffer.address if content and content.size else 0
        ends = np.frombuffer(offsets, np.int32)[values.offset :][: len(values) + 1].astype(np.int64)
        return zip((at + ends[:-1]).tolist(), np.diff(ends).tolist(), strict=True)


@dataclass(frozen=True, kw_only=True)
class LitDataConfig(RecordsConfig):
    """A folder that LitData's `optimize` wrote, or train and val of them. Columns are the leaves of samples,
    by their keys or positions: ``image``, ``0``, ``labels.1``.
    """

    kind: Literal["litdata"] = "litdata"
    writer: ClassVar = "LitData"

    def shards(
        self, tree: Any, folder: str, files: Mapping[str, int]
    ) -> Iterator[tuple[str, int | None, RecordShard]]:
        if "shards" in tree:
            raise UsageError("MDSWriter of mosaicml-streaming wrote it: give mds:PATH as the source")
        config = tree["config"]
        if encryption := config.get("encryption"):
            raise UsageError(
                f"its chunks are encrypted ({encryption['algorithm']}): write them without encryption"
            )
        if (loader := config.get("item_loader")) in LOADERS:
            raise UsageError(f"its chunks are those of a {loader}: {LOADERS[loader]}")
        compression = config.get("compression")
        if codec_of(compression) not in ("", "zstd"):
            raise UsageError(f"compression {compression!r} is not read; known: zstd")
        _, spec = json.loads(config["data_spec"])
        columns = tuple(map(RecordColumn, _leaves(spec), config["data_format"]))
        for chunk in tree["chunks"]:
            # LitData's reader unpacks whole files in place, and deletes them.
            plain = chunk["filename"].replace(f".{compression}", "")
            name = plain if plain in files else chunk["filename"]
            shard = LitDataShard(
                storage.join(folder, name), plain, chunk["chunk_size"], columns, name != plain
            )
            # Old versions gave `chunk_bytes` without the offsets, so that it tells nothing about the file.
            yield name, None, shard


def _leaves(spec: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the name of each leaf of a sample, as torch's pytrees list them."""
    if spec["type"] is None:
        yield ".".join(path)
        return
    context = json.loads(spec["context"])
    context = context.get("dict_context") if isinstance(context, dict) else context
    children = spec["children_spec"]
    names = context if isinstance(context, list) and len(context) == len(children) else range(len(children))
    for name, child in zip(names, children, strict=True):
        yield from _leaves(child, (*path, str(name)))


def _joined(items: list[bytes]) -> bytes:
    """Returns records with their number and offsets."""
    offsets = np.cumsum([4 * (len(items) + 2), *map(len, items)])
    return b"".join([struct.pack("<I", len(items)), offsets.astype("<u4").tobytes(), *items])


def _without_frames(content: bytes) -> bytes:
    """Returns the records of ``LDFZ01``: a header, offsets of records without compression, frames of them."""
    _, _, count, _, frames = struct.unpack_from("<HHIII", content, 8)
    offsets = np.frombuffer(content, "<u4", count + 1, 24).tolist()
    parts = []
    for frame in range(frames):
        place = 24 + 4 * (count + 1) + 24 * frame
        _, _, begin, packed, size = struct.unpack_from("<IIQII", content, place)
        parts.append(decompress(content[begin : begin + packed], "zstd", size))
    plain = b"".join(parts)
    if len(plain) != offsets[-1]:
        raise ValueError(f"it is cut short or damaged: its frames have {len(plain)} bytes, not {offsets[-1]}")
    return _joined([plain[begin:end] for begin, end in pairwise(offsets)])


def _uncompressed_samples(content: bytes) -> bytes:
    """Returns the records of a chunk whose samples were compressed one by one, others as they are: `config`
    may name a compression that was not used.
    """
    count = int.from_bytes(content[:4], "little")
    begin = 4 * (count + 2)
    if not count or content[begin : begin + 4] != ZSTD:
        return content
    offsets = np.frombuffer(content, "<u4", count + 1, 4).tolist()
    items = (content[begin:end] for begin, end in pairwise(offsets))
    return _joined([decompress(item, "zstd", 0) for item in items])


def _arrow_rows(content: pa.Buffer) -> pa.Table:
    """Reads the Arrow file, or the stream of older versions, without copying it unless it is compressed."""
    size = int.from_bytes(content[-12:-8].to_pybytes(), "little")
    file = content.slice(len(content) - 12 - size, size)
    is_file = file.slice(0, 6).to_pybytes() == b"ARROW1"
    rows = (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all()
    # Arrow crashes on offsets that are damaged.
    rows.validate(full=True)
    return rows


def _uncompressed_rows(content: bytes) -> bytes:
    """Returns a chunk whose Arrow file is not compressed, so that images have places in it."""
    whole = pa.py_buffer(content)
    rows = _arrow_rows(whole)
    buffers = (
        b for column in rows.columns for piece in column.chunks for b in piece.buffers() if b and b.size
    )
    if all(0 <= b.address - whole.address <= whole.size - b.size for b in buffers):
        return content
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    file = sink.getvalue().to_pybytes()
    return b"".join([file, struct.pack("<I", len(file)), ARROW])


def _kind_of(kind: pa.DataType) -> str:
    if types.is_binary(kind):
        return "bytes"
    return "str" if types.is_string(kind) else "int" if types.is_integer(kind) else f"Arrow {kind}"


def _dtype(name: str) -> np.dtype:
    return np.dtype(name).newbyteorder("<")


def _numpy(content: bytes) -> np.ndarray:
    kind, axes = struct.unpack_from("<II", content)
    shape = struct.unpack_from(f"<{axes}I", content, 8)
    return np.frombuffer(content, _dtype(NUMPY[kind]), offset=8 + 4 * axes).reshape(shape)


def _tensor(content: bytes) -> np.ndarray:
    # Later versions write the header, but not the values, in big endian. Types and axes are small numbers.
    order = "<" if max(struct.unpack_from("<II", content)) < 2**16 else ">"
    kind, axes = struct.unpack_from(f"{order}II", content)
    shape = struct.unpack_from(f"{order}{axes}I", content, 8)
    return np.frombuffer(content, _dtype(TORCH[kind]), offset=8 + 4 * axes).reshape(shape)


def _list(content: bytes) -> Any:
    """Reads lists and None in LitData's own encoding, or JSON; other values are not labels or captions."""
    kind, begin = content[0], 5
    if kind > 0x20:
        return json.loads(content)
    if kind == 11:
        return None
    count = int.from_bytes(content[1:begin], "little")
    match kind:
        case 0:
            return json.loads(content[begin : begin + count])
        case 1:
            found = []
            for _ in range(count):
                end = begin + 4 + int.from_bytes(content[begin : begin + 4], "little")
                found.append(content[begin + 4 : end].decode())
                begin = end
            return found
        case 2 | 3:
            return np.frombuffer(content, "<i8" if kind == 2 else "<f8", count, begin).tolist()
        case 4:
            return [bool(each) for each in content[begin : begin + count]]
    raise ValueError("it is not a list of numbers or names")


DECODERS: Mapping[str, ValueReader] = {
    "bytes": bytes,
    "str": bytes.decode,
    "text": bytes.decode,
    "int": partial(scalar, "<i8"),
    "float": partial(scalar, "<f8"),
    "bool": partial(scalar, "?"),
    "json": _list,
    "numpy": _numpy,
    "tensor": _tensor,
}
