"""The index of a data set: where each image of a split lies, its checksum, its label and its sample id.

Beside the manifest, `<split>.index` holds a record of 28 bytes for each image, shard after shard in the order
of the manifest. It is mapped, so that no process needs memory that grows with the number of images. Where
images have several labels, a record also holds the further ones, 4 bytes each; where samples have further
fields, their places or values (`fields.py`). `<split>.keys` is a parquet
file of the keys, a row group per shard, which only reports about bad images read.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator import storage
from orchestrator.data.fields import Stored

# offset: of the encoded image in its shard's file, in bytes; size: bytes; crc32: of these bytes, by zlib,
# which checks several GB/s; sample: see `sample_ids`.
RECORD = np.dtype([("offset", "<u8"), ("size", "<u4"), ("crc32", "<u4"), ("label", "<i4"), ("sample", "<i8")])
PLACE = (("offset", "<u8"), ("size", "<u4"), ("crc32", "<u4"))
NO_LABEL = -1  # in place of labels, where an image has fewer than another

Ints = NDArray[np.int64]
Records = NDArray[Any]  # of dtype `record_type`


class IndexedShard(NamedTuple):
    """The images of a shard: (rows,) records, and as many keys."""

    records: Records
    keys: Sequence[str]


def record_type(labels: int, fields: Mapping[str, Stored] = {}) -> np.dtype[Any]:
    """Returns the type of the records of a data set whose images have at most so many labels each, and whose
    samples have these further fields.
    """
    columns: list[Any] = [("others", "<i4", (labels - 1,))] if labels > 1 else []
    for name, stored in sorted(fields.items()):
        places = [(f"{name}.{part}", kind) for part, kind in PLACE]
        columns += places if stored == "bytes" else [(name, "<f8")]
    return np.dtype([*RECORD.descr, *columns])


def place_of(records: Records, field: str) -> tuple[Any, Any, Any]:
    """Returns the offsets, sizes and CRC-32 of a field of bytes."""
    prefix = "" if field == "image" else f"{field}."
    offset, size, crc32 = (records[f"{prefix}{part}"] for part, _ in PLACE)
    return offset, size, crc32


def has_images(data_set: str, labels: int, fields: Mapping[str, Stored]) -> bool:
    """Returns whether the samples of a data set are images; text alone, say, is a field of its samples."""
    if not fields:
        return True
    kind = record_type(labels, fields)
    first = storage.read_range(storage.join(data_set, "train.index"), 0, kind.itemsize)
    return bool(np.frombuffer(first.content, kind)["size"][0])


def sample_ids(keys: Iterable[str]) -> Ints:
    """Returns the first 63 bits of each key's SHA-256: a sample's name in fingerprints, and the seed of its
    augmentation.
    """
    digests = b"".join(hashlib.sha256(key.encode()).digest()[:8] for key in keys)
    return (np.frombuffer(digests, ">u8") >> 1).astype(np.int64)


def records_of(
    offsets: Any,
    sizes: Any,
    crcs: Any,
    labels: Any,
    keys: Sequence[str],
    others: Iterable[Sequence[int]] = (),
    most_labels: int = 1,
    fields: Mapping[str, Any] = {},
) -> Records:
    """Returns the records of images, given as equally long sequences.

    others: the further labels of each image; none if each image has one label.
    most_labels: the most labels of an image of the data set.
    fields: the values of further fields, or, of bytes, (offsets, sizes, CRC-32).
    """
    stored: dict[str, Stored] = {n: "bytes" if isinstance(v, tuple) else "number" for n, v in fields.items()}
    records = np.empty(len(keys), record_type(most_labels, stored))
    for name, values in fields.items():
        if stored[name] == "number":
            records[name] = values
        else:
            for (part, _), column in zip(PLACE, values, strict=True):
                records[f"{name}.{part}"] = column
    records["offset"], records["size"], records["crc32"], records["label"] = offsets, sizes, crcs, labels
    records["sample"] = sample_ids(keys)
    if most_labels > 1:
        records["others"] = NO_LABEL
        for record, further in zip(records["others"], others, strict=False):
            record[: len(further)] = further
    return records


def labels_of(records: Records) -> Ints:
    """Returns (n, M) int64: all labels of each image, `NO_LABEL` where it has fewer."""
    first = records["label"][:, None].astype(np.int64)
    several = "others" in (records.dtype.names or ())
    return np.concatenate([first, records["others"]], 1) if several else first


def write_index(data_set: str, split: str, shards: Iterable[IndexedShard]) -> str:
    """Writes the index of a split, shard after shard, and returns the SHA-256 of its records."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    digest, schema = hashlib.sha256(), pa.schema([("key", pa.string())])
    storage.make_folder(data_set)
    with (
        storage.open_to_write(storage.join(data_set, f"{split}.index")) as index,
        storage.open_to_write(storage.join(data_set, f"{split}.keys")) as keys,
        pq.ParquetWriter(keys, schema, compression="zstd", write_statistics=False) as writer,
    ):
        for shard in shards:
            content = shard.records.tobytes()
            digest.update(content)
            index.write(content)
            writer.write_table(pa.table([shard.keys], schema=schema), row_group_size=max(1, len(shard.keys)))
    return digest.hexdigest()


def read_keys(data_set: str, split: str, shard: int) -> list[str]:
    """Reads the keys of a shard's images."""
    import pyarrow.parquet as pq

    with storage.open_to_read(storage.join(data_set, f"{split}.keys")) as file:
        return pq.ParquetFile(file).read_row_group(shard)["key"].to_pylist()
