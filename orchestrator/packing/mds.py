"""Shards that MDSWriter of mosaicml-streaming wrote, as samples to be packed.

Source: `streaming/base/format/mds` of https://github.com/mosaicml/streaming at 0.13. `index.json` lists the
shards with their columns; behind a shard's offsets stands its configuration in JSON, which is not read.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.packing.record_shards import (
    PlainRecords,
    RecordColumn,
    RecordsConfig,
    RecordShard,
    ValueReader,
    codec_of,
    decompress,
    scalar,
)

NUMBERS = {"int": "i8", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8"}
NUMBERS |= {"uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8"}
NUMBERS |= {"float16": "f2", "float32": "f4", "float64": "f8"}
TEXTS: Mapping[str, ValueReader] = {
    "bytes": bytes,
    "str": bytes.decode,
    "str_int": int,
    "str_float": float,
    "str_decimal": float,
    "json": json.loads,
}
DECODERS = TEXTS | {name: partial(scalar, f"<{dtype}") for name, dtype in NUMBERS.items()}
SHAPES = ("<u1", "<u2", "<u4", "<u8")  # types of an array's shape, by the two low bits before it
DTYPES = {
    8: "u1",
    9: "i1",
    16: "u2",
    17: "i2",
    18: "f2",
    32: "u4",
    33: "i4",
    34: "f4",
    64: "u8",
    65: "i8",
    66: "f8",
}


class MDSShard(NamedTuple):
    """A shard of `rows` samples. `size` is that without compression, `hashes` are those of the file."""

    location: str
    name: str
    rows: int
    size: int
    columns: tuple[RecordColumn, ...]
    codec: str
    hashes: tuple[tuple[str, str], ...]

    def unpack(self, content: bytes) -> bytes:
        for name, digest in self.hashes:
            # Hashes that Python lacks, as xxh64, are not compared.
            if name in hashlib.algorithms_available and hashlib.new(name, content).hexdigest() != digest:
                raise ValueError(f"its {name} differs from that in index.json")
        plain = decompress(content, self.codec, self.size) if self.codec else content
        if len(plain) != self.size:
            raise ValueError(f"it has {len(plain)} bytes without compression, not {self.size}")
        return plain

    def records(self, plain: bytes) -> PlainRecords:
        return PlainRecords(plain, self.columns, self.decoder)

    def decoder(self, encoding: str) -> ValueReader | None:
        kind, _, form = encoding.partition(":")
        return partial(_array, form) if kind == "ndarray" else DECODERS.get(encoding)


@dataclass(frozen=True, kw_only=True)
class MDSConfig(RecordsConfig):
    """A folder that mosaicml-streaming's MDSWriter wrote, or train and val of them."""

    kind: Literal["mds"] = "mds"
    writer: ClassVar = "MDSWriter"

    def shards(
        self, tree: Any, folder: str, files: Mapping[str, int]
    ) -> Iterator[tuple[str, int | None, RecordShard]]:
        if "chunks" in tree:
            raise UsageError("LitData wrote it: give litdata:PATH as the source")
        for shard in tree["shards"]:
            form = shard["format"], shard["version"]
            if form != ("mds", 2):
                raise UsageError(
                    f"shards of format {form[0]!r}, version {form[1]}, are not read, but 'mds', 2 is"
                )
            raw, packed = shard["raw_data"], shard["zip_data"]
            # Streaming's reader keeps unpacked shards beside or instead of the compressed ones.
            is_packed = bool(packed) and raw["basename"] not in files
            file = packed if is_packed else raw
            of_columns = (shard[f"column_{each}"] for each in ("names", "encodings", "sizes"))
            columns = (
                RecordColumn(name, kind, size or 0) for name, kind, size in zip(*of_columns, strict=True)
            )
            yield (
                file["basename"],
                file["bytes"],
                MDSShard(
                    location=storage.join(folder, file["basename"]),
                    name=raw["basename"].rpartition("/")[2],
                    rows=shard["samples"],
                    size=raw["bytes"],
                    columns=tuple(columns),
                    codec=codec_of(shard["compression"]) if is_packed else "",
                    hashes=tuple(file["hashes"].items()),
                ),
            )


def _array(form: str, content: bytes) -> np.ndarray:
    """Reads ``ndarray``: type and shape stand in `form`, ``uint8:32,32,3``, or before the values."""
    dtype, _, text = form.partition(":")
    at = 0
    if not dtype:
        dtype, at = DTYPES[content[0]], 1
    if text:
        shape = [int(axis) for axis in text.split(",")]
    else:
        axes, width = content[at] >> 2, SHAPES[content[at] & 3]
        shape = np.frombuffer(content, width, axes, at + 1).tolist()
        at += 1 + axes * np.dtype(width).itemsize
    return np.frombuffer(content, np.dtype(dtype).newbyteorder("<"), offset=at).reshape(shape)
