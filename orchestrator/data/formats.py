"""A shard's content as a table of samples, whoever wrote it: parquet, or WebDataset's tar."""

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.data import parquet
from orchestrator.data.manifest import Format
from orchestrator.data.webdataset import members
from orchestrator.errors import UsageError


def read_table(content: pa.Buffer, format: Format, name: str) -> pa.Table:
    """Columns image (binary or large_binary, encoded), label (int64 or string, as found) and key (string).

    Samples without an image or a label are left out; `read_samples` names them.

    Raises:
        UsageError: naming the file, if it is cut short or no column fits.
    """
    return read_samples(content, format, name)[0]


def read_samples(content: pa.Buffer, format: Format, name: str) -> tuple[pa.Table, list[str]]:
    """As `read_table`, and a line for each sample that is left out."""
    return (_parquet if format == "parquet" else _webdataset)(content, name)


def class_names(content: pa.Buffer) -> list[str] | None:
    """Names of a parquet file's labels, if it holds them."""
    return parquet.class_names(pq.read_schema(pa.BufferReader(content)))


def _parquet(content: pa.Buffer, name: str) -> tuple[pa.Table, list[str]]:
    with parquet.named_if_broken(name):
        file = pq.ParquetFile(pa.BufferReader(content))
        found = parquet.columns(file.schema_arrow, name)
        if found.paths:
            raise UsageError(
                f"{name}: column {found.image[0]} holds paths: pack those files with jobs/pack_shards.py"
            )
        table = file.read(columns=parquet.selection(*found[:3]))
    columns = {
        "image": parquet.read_leaf(table, found.image),
        "label": parquet.read_labels(table, found),
        "key": parquet.read_keys(table, found, name),
    }
    samples = pa.table(columns)
    unusable = []
    for column in ("image", "label"):
        missing = samples.filter(samples[column].is_null())
        unusable += [f"{name}: {key}: no {column}" for key in missing["key"].to_pylist()]
    return samples.drop_null() if unusable else samples, unusable


def _webdataset(content: pa.Buffer, name: str) -> tuple[pa.Table, list[str]]:
    found, unusable = members(pa.BufferReader(content), name)
    view = memoryview(content)
    images = pa.array([view[m.offset : m.offset + m.size] for m in found], pa.large_binary())
    columns = {
        "image": images,
        "label": _labels([m.label for m in found], name),
        "key": pa.array([m.key for m in found], pa.string()),
    }
    return pa.table(columns), unusable


def _labels(labels: list[int | str], name: str) -> pa.Array:
    kinds = {type(label) for label in labels}
    if len(kinds) > 1:
        raise UsageError(f"{name}: some labels are numbers, some are names")
    return pa.array(labels, pa.string() if str in kinds else pa.int64())
