"""Training on shards of other projects in place: they are indexed once, in a manifest kept elsewhere."""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator import storage
from orchestrator.data.formats import class_names, read_samples
from orchestrator.data.manifest import Format, Manifest, Shard, has_manifest, save_manifest
from orchestrator.data.samples import classes_of, digest, resolve_splits, shards_at, split_hint
from orchestrator.data.sources import check_names
from orchestrator.errors import UsageError

FORMATS: dict[str, Format] = {".parquet": "parquet", ".tar": "webdataset"}
READERS = 4  # files in memory at the same time
VAL_FRAC = 0.1  # of the files, where none is for validation
SHOWN = 5  # samples left out, per file

log = logging.getLogger(__name__)


class ShardIndex(NamedTuple):
    """A shard, a key for each of its labels, the number of samples per label, and the labels' names."""

    shard: Shard
    labels: dict[int | str, str]
    counts: Counter[int | str]
    names: list[str] | None


def index_external_shards(path: str, root: str) -> str:
    """Returns the data set, below `root`, of the tars or parquet files in the folder `path`, local or on S3.

    ``train`` and ``val`` are folders in it, or words in the files' names. A listing that changed gives
    another data set.

    Raises:
        UsageError: if there are no such files, one is damaged, or their labels do not fit together.
    """
    path = storage.absolute(path).rstrip("/")
    if storage.size(path) is not None:
        raise UsageError(f"no data set at {path}: it is a file; name the folder of the shards")
    try:
        folder, sizes = shards_at(path, *FORMATS)
    except UsageError as error:
        raise UsageError(
            f"no data set at {path}: no manifest.json, and {error}; pack one with jobs/pack_shards.py"
        ) from None
    listing = json.dumps([folder, sizes], sort_keys=True)
    name = f"{folder.rpartition('/')[2]}-{hashlib.sha256(listing.encode()).hexdigest()[:12]}"
    data_set = storage.join(root, "data", "adopted", name)
    if not has_manifest(data_set):
        save_manifest(data_set, _manifest(folder, sorted(sizes)))
        log.info("the shards of %s are indexed in %s", path, data_set)
    return data_set


def _manifest(folder: str, names: Sequence[str]) -> Manifest:
    splits = _splits(folder, names)
    used = sorted(splits)
    if len({os.path.splitext(name)[1] for name in used}) > 1:
        raise UsageError(f"{folder} holds tars and parquet files: only one kind can be indexed")
    log.info("reading %d shards of %s once", len(used), folder)
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
        indexes = dict(
            zip(used, pool.map(_index, (storage.join(folder, name) for name in used)), strict=True)
        )
    check_names({index.shard.path: index.names for index in indexes.values()})
    labels = {label: key for index in indexes.values() for label, key in index.labels.items()}
    shards = {
        split: tuple(i.shard for name, i in indexes.items() if splits[name] == split and i.shard.rows)
        for split in ("train", "val")
    }
    for split, found in shards.items():
        if not found:
            raise UsageError(f"{folder} has no {split} sample with an image and a label")
    counts = sum((indexes[name].counts for name in used if splits[name] == "val"), Counter[int | str]())
    classes = classes_of(labels, indexes[used[0]].names)
    return Manifest(classes=classes, splits=shards, val_majority=max(counts.values()))


def _splits(folder: str, names: Sequence[str]) -> dict[str, str | None]:
    """File -> ``train`` or ``val``; if no file is for validation, a tenth of them becomes it."""
    used = resolve_splits({name: split_hint(name) for name in names}, folder)
    if all(used.values()):
        return used
    if len(names) < 2:
        raise UsageError(
            f"{folder} has one shard, none for validation: pack it with jobs/pack_shards.py, which splits it"
        )
    val = sorted(names, key=digest)[: max(1, round(VAL_FRAC * len(names)))]
    return {name: "val" if name in val else "train" for name in names}


def _index(location: str) -> ShardIndex:
    content = pa.py_buffer(storage.read_bytes(location))
    format = FORMATS[os.path.splitext(location)[1]]
    samples, problems = read_samples(content, format, location)
    if problems:
        shown = "; ".join(problems[:SHOWN])
        log.warning("%s: %d samples left out: %s", location, len(problems), shown)
    log.info("%s: %d samples", location, samples.num_rows)
    labels = samples["label"].to_pylist()
    return ShardIndex(
        shard=Shard(
            path=location,
            rows=samples.num_rows,
            bytes=content.size,
            sha256=hashlib.sha256(content).hexdigest(),
            format=format,
        ),
        labels=dict(zip(labels, samples["key"].to_pylist(), strict=True)),
        counts=Counter(labels),
        names=class_names(pq.read_schema(pa.BufferReader(content))) if format == "parquet" else None,
    )
