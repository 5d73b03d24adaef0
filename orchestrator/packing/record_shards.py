"""Shards of records: samples of named columns, one after another, as MDSWriter and LitData write them.

A shard that is not compressed has the number of records, the offset of each and of the end, and the
records. A record has the sizes of those of its columns whose size varies, then the columns. Numbers are
uint32 in little endian. `mds.py` and `litdata.py` say what an index and an encoding mean.

A shard is read as a whole to index it (both projects write 64 MB by default). Then its images are read by
their ranges of bytes, or, if it is compressed, with the whole shard.
"""

import hashlib
import io
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from PIL import Image

from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.data.manifest import Shard
from orchestrator.data.parquet import BY_NAME, Columns
from orchestrator.data.text import TEXT, captions_as_field
from orchestrator.errors import UsageError, reason_of
from orchestrator.packing.base import SourceConfig
from orchestrator.packing.labels import listed_labels, read_labels
from orchestrator.packing.listing import READERS, files_below
from orchestrator.packing.record_columns import ARRAYS, encoding_kind, roles_of, unread
from orchestrator.packing.samples import Execute, Part, Source, tabulated
from orchestrator.packing.splits import splits_of, splits_of_samples

INDEX = "index.json"
# Pillow's modes that PNG has too, and modes that become RGB.
KEPT_MODES, CONVERTED_MODES = ("1", "L", "LA", "RGB", "RGBA", "I;16"), ("CMYK", "YCbCr", "HSV", "LAB")
CHANNELS = (1, 3, 4)  # of arrays

# Names of compressions of both projects -> Arrow's.
CODECS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "bz2": "bz2", "snappy": "snappy"}

ValueReader = Callable[[bytes], Any]


class RecordTable(Protocol):
    """The records of a shard, by columns.

    encodings: column -> its encoding.
    """

    @property
    def encodings(self) -> Mapping[str, str]: ...
    def spans(self, column: str) -> list[tuple[int, int]]:
        """Returns the offset and size of the column in each record."""
        ...

    def values(self, column: str) -> list[Any] | None:
        """Returns the value of the column in each record, a ValueError if it is damaged; None for encodings
        that are not read.
        """
        ...


class RecordShard(Protocol):
    """A shard that an index names: `rows` records in a file. Keys of samples begin with `name`."""

    @property
    def location(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    def unpack(self, content: bytes) -> bytes:
        """Returns the shard without compression, `content` itself if it has none. Raises ValueError."""
        ...

    def records(self, plain: bytes) -> RecordTable: ...
    def decoder(self, encoding: str) -> ValueReader | None: ...


class RecordColumn(NamedTuple):
    """A column of records. A size of 0 varies."""

    name: str
    encoding: str
    size: int = 0


class ImagePlace(NamedTuple):
    """An image in a shard: its range, of the unpacked shard if that is compressed."""

    shard: RecordShard
    packed: bool
    offset: int
    size: int
    encoding: str


class PlainRecords:
    """The records of a shard without compression. Raises ValueError if it is cut short or damaged."""

    def __init__(
        self, plain: bytes, columns: Sequence[RecordColumn], decoder: Callable[[str], ValueReader | None]
    ) -> None:
        self.encodings = {column.name: column.encoding for column in columns}
        self._plain, self._decoder, self._names = plain, decoder, [*self.encodings]
        count = int.from_bytes(plain[:4], "little")
        if len(plain) < 4 * (count + 2):
            raise ValueError("it is cut short or damaged in its table of offsets")
        offsets = np.frombuffer(plain, "<u4", count + 1, 4).astype(np.int64)
        fixed = np.array([column.size for column in columns])
        varies = fixed == 0
        head = 4 * int(varies.sum())
        if offsets[-1] != len(plain) or (np.diff(offsets) < head).any():
            raise ValueError(f"it is cut short or damaged: it has {len(plain)} bytes, not {offsets[-1]}")
        # Row by row the bytes of all heads, (count, head), then the sizes of all columns, (count, columns).
        heads = np.frombuffer(plain, np.uint8)[offsets[:-1, None] + np.arange(head)]
        sizes = np.repeat(fixed[None], count, axis=0)
        sizes[:, varies] = heads.reshape(-1).view("<u4").reshape(count, varies.sum())
        ends = offsets[:-1, None] + head + np.cumsum(sizes, axis=1)
        if len(damaged := np.flatnonzero(ends[:, -1] != offsets[1:])):
            raise ValueError(f"it is damaged: the columns of sample {damaged[0]} do not fill it")
        self._begins, self._sizes = ends - sizes, sizes

    def spans(self, column: str) -> list[tuple[int, int]]:
        number = self._names.index(column)
        return [*zip(self._begins[:, number].tolist(), self._sizes[:, number].tolist(), strict=True)]

    def values(self, column: str) -> list[Any] | None:
        decode = self._decoder(self.encodings[column])
        if decode is None:
            return None
        return [_decoded(decode, self._plain[begin : begin + size]) for begin, size in self.spans(column)]


@dataclass(frozen=True, kw_only=True)
class RecordsConfig(SourceConfig, ABC):
    """The shards that every `index.json` below a folder names. Folders, as ``train`` and ``val``, are splits.

    Attributes:
        writer: of the shards, as messages call it.
    """

    writer: ClassVar[str]

    columns: Columns = BY_NAME

    @abstractmethod
    def shards(
        self, tree: Any, folder: str, files: Mapping[str, int]
    ) -> Iterator[tuple[str, int | None, RecordShard]]:
        """Yields the name, size (None: any) and shard of each file of an index, which is given with the
        location of its folder and the files below that.
        """

    def samples(self, execute: Execute) -> Source:
        return _listed(self, execute)


def _listed(source: RecordsConfig, execute: Execute) -> Source:
    """Lists the samples. Raises UsageError if there is no index, a file is missing or damaged, or no column
    fits.
    """
    writer, columns, captions = source.writer, source.columns, source.captions
    val_frac, ignore_split_names = source.val_frac, source.ignore_split_names
    root = storage.absolute(source.place).rstrip("/")
    notes: list[str] = []
    listed = files_below(root, notes)
    # An index above others, as streaming's `merge_index` writes, names the same shards again.
    shards: dict[str, RecordShard] = {}
    for index in (name for name in listed if name.rpartition("/")[2] == INDEX):
        folder, location = index.removesuffix(INDEX), storage.join(root, index)
        below = {name.removeprefix(folder): size for name, size in listed.items() if name.startswith(folder)}
        try:
            tree = json.loads(storage.read_bytes(location))
            found = [*source.shards(tree, storage.join(root, folder).rstrip("/"), below)]
        except UsageError as error:
            raise UsageError(f"{location}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{location} is not an index of {writer}: {error!r}") from None
        for name, size, shard in found:
            if name not in below:
                raise UsageError(f"{location} names {name}, which is not there: copy the folder again")
            if size not in (None, below[name]):
                raise UsageError(
                    f"{shard.location} has {below[name]} bytes, and {size} in {location}: it is cut short or"
                    " damaged; copy it again"
                )
            shards[f"{folder}{name}"] = shard
    if not shards:
        raise UsageError(f"{root} has no {INDEX} that names a shard: give the folder that {writer} wrote")
    splits, said = (dict.fromkeys(shards), []) if ignore_split_names else splits_of(shards, root)
    parts = execute(partial(index_records, columns, captions=captions), [shards[name] for name in splits])
    if ignore_split_names:
        parts = (part._replace(splits=(), doubt="") for part in parts)
    own = {storage.join(root, name): split for name, split in splits.items()}
    return tabulated(parts, own, val_frac, read_records, notes=notes + said)


def index_records(columns: Columns, shard: RecordShard, *, captions: bool = False) -> Part:
    """Indexes the samples of a shard. Samples with `captions` need no labels.

    Raises:
        UsageError: naming the shard, if it is damaged or no column fits.
    """
    location, content = shard.location, storage.read_bytes(shard.location)
    with _named_if_damaged(location):
        plain = shard.unpack(content)
        records = shard.records(plain)
        image, label, caption, key = roles_of(records.encodings, columns, location, captions)
        spans = records.spans(image)
        if len(spans) != shard.rows:
            raise ValueError(f"it has {len(spans)} samples, and {shard.rows} in {INDEX}")
        keys = [f"{shard.name}:{row}" for row in range(len(spans))]
        if key:
            found = _values(records, [key], location)
            keys = [default if _is_none(k) else str(k) for k, default in zip(found, keys, strict=True)]
        labels = _values(records, label, location) if label else [None] * len(spans)
        texts = _values(records, caption, location) if caption else [None] * len(spans)
    rows, sets, fields, problems = [], [], [], []
    for row, (_, size) in enumerate(spans):
        try:
            if not size:
                raise ValueError("no image")
            found = listed_labels(_checked(labels[row]))
            field = captions_as_field(_checked(texts[row])) if captions else b""
        except (ValueError, RecursionError) as error:
            problems.append(f"{location}: {keys[row]}: {error}")
            continue
        rows.append(row)
        sets.append(found)
        fields.append(field)
    read = read_labels(sets, [keys[row] for row in rows], location)
    chosen = [i for i, first in enumerate(read.first) if first is not None or not label]
    lost = sorted({*range(len(rows))} - {*chosen})
    problems += [f"{location}: {keys[rows[i]]}: no label" for i in lost]
    packed, encoding = plain is not content, records.encodings[image]
    places = [spans[rows[i]] for i in chosen]
    return Part(
        location,
        [read.first[i] for i in chosen],
        [keys[rows[i]] for i in chosen],
        places,
        [ImagePlace(shard, packed, offset, size, encoding) for offset, size in places],
        others=[read.others[i] for i in chosen] if read.others else [],
        skipped=problems,
        shard=_described(location, len(chosen), content, len(plain)) if packed else None,
        fields={TEXT: [fields[i] for i in chosen]} if captions else {},
        hot=read.hot,
        splits=splits_of_samples([keys[rows[i]] for i in chosen]),
        unlabelled=len(lost),
    )


def read_records(places: Sequence[ImagePlace]) -> Iterator[bytes | BadImage]:
    """Reads images by their ranges; of a compressed shard, which is unpacked once for neighbouring images."""
    with ThreadPoolExecutor(READERS) as pool:
        for shard, group in groupby(places, key=lambda place: place.shard if place.packed else None):
            alike = list(group)
            if shard is None:
                contents = pool.map(_range, alike)
            else:
                whole = storage.read_bytes(shard.location)
                with _named_if_damaged(shard.location):
                    plain = shard.unpack(whole)
                contents = (plain[place.offset : place.offset + place.size] for place in alike)
            for place, content in zip(alike, contents, strict=True):
                yield _as_image(place, content)


def decompress(content: bytes, codec: str, size: int) -> bytes:
    """Decompresses a file; only snappy needs the `size` that comes out. Raises ValueError or OSError."""
    if codec == "snappy":
        return pa.decompress(content, decompressed_size=size, codec=codec, asbytes=True)
    with pa.CompressedInputStream(pa.BufferReader(content), CODECS[codec]) as stream:
        return stream.read()


def codec_of(compression: str | None) -> str:
    """Returns the key of `CODECS` that ``zstd:7`` names, empty for no compression. Raises UsageError."""
    codec = (compression or "").partition(":")[0]
    if codec and codec not in CODECS:
        raise UsageError(f"compression {compression!r} is not read; known: {', '.join(CODECS)}")
    return codec


def scalar(dtype: str, content: bytes) -> int | float:
    return np.frombuffer(content, dtype).reshape(()).item()


def _range(place: ImagePlace) -> bytes:
    return storage.read_range(place.shard.location, place.offset, place.size).content


def _as_image(place: ImagePlace, content: bytes) -> bytes | BadImage:
    kind = encoding_kind(place.encoding)
    if kind == "pil":
        convert = _image_of_pixels
    elif kind in ARRAYS and (decode := place.shard.decoder(place.encoding)):
        convert = partial(_image_of_array, decode)
    else:
        return content
    try:
        buffer = io.BytesIO()
        convert(content).save(buffer, format="PNG")
        return buffer.getvalue()
    except BadImage as error:
        return error
    except (ValueError, IndexError, KeyError, struct.error) as error:
        return BadImage(f"damaged {place.encoding}: {reason_of(error)}")


def _image_of_pixels(content: bytes) -> Image.Image:
    """Reads what both projects store of Pillow's images: width, height and length of the mode (uint32 each),
    the mode, pixels.
    """
    width, height, length = struct.unpack_from("<III", content)
    mode, raw = content[12 : 12 + length].decode(), content[12 + length :]
    if mode not in (*KEPT_MODES, *CONVERTED_MODES):
        why = ", and its palette is not stored" if mode == "P" else ""
        raise BadImage(f"raw pixels of mode {mode} are not read{why}")
    if width * height > 8 * len(raw):
        raise ValueError("pixels are missing")
    image = Image.frombytes(mode, (width, height), raw)
    return image if mode in KEPT_MODES else image.convert("RGB")


def _image_of_array(decode: ValueReader, content: bytes) -> Image.Image:
    """Reads (H, W), (H, W, channels) or (channels, H, W) uint8."""
    array = decode(content)
    axes = array.ndim
    if axes == 3 and array.shape[2] not in CHANNELS and array.shape[0] in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.dtype != np.uint8 or axes not in (2, 3) or (axes == 3 and array.shape[2] not in CHANNELS):
        raise BadImage(f"an array {array.shape} of {array.dtype} is not an image of uint8")
    return Image.fromarray(
        array[..., 0] if axes == 3 and array.shape[2] == 1 else np.ascontiguousarray(array)
    )


def _values(records: RecordTable, columns: Sequence[str], location: str) -> list[Any]:
    """Returns the value of each record, a list if there are several columns."""
    found = []
    for column in columns:
        values = records.values(column)
        if values is None:
            raise unread(location, column, records.encodings[column])
        found.append(values)
    if len(found) == 1:
        return found[0]
    rows = (list(row) for row in zip(*found, strict=True))
    return [next((value for value in row if isinstance(value, ValueError)), row) for row in rows]


def _decoded(decode: ValueReader, content: bytes) -> Any:
    try:
        return decode(content)
    except (ValueError, TypeError, IndexError, KeyError, RecursionError, struct.error) as error:
        return ValueError(f"its value {content[:20]!r} is damaged: {reason_of(error)}")


def _checked(value: Any) -> Any:
    if isinstance(value, ValueError):
        raise value
    return value


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, ValueError)


def _described(location: str, rows: int, content: bytes, unpacked: int) -> Shard:
    digest = hashlib.sha256(content).hexdigest()
    return Shard(path=location, rows=rows, bytes=len(content), sha256=digest, unpacked=unpacked)


@contextmanager
def _named_if_damaged(location: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except (ValueError, IndexError, OSError, pa.ArrowException, struct.error) as error:  # OSError is Arrow's
        raise UsageError(f"{location} cannot be read: {reason_of(error)}; copy it again") from None
