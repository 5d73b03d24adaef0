"""Training straight from shards that somebody else wrote: a manifest for them, made once, kept elsewhere."""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pyarrow as pa

from orchestrator import storage
from orchestrator.data.formats import class_names, read_samples
from orchestrator.data.manifest import Format, Manifest, Shard, has_manifest, save_manifest
from orchestrator.data.sources.arrange import classes_of, digest
from orchestrator.data.sources.listing import by_split, shards_at, split_of
from orchestrator.errors import UsageError

FORMATS: dict[str, Format] = {".parquet": "parquet", ".tar": "webdataset"}
READERS = 4  # files in memory at the same time
VAL_FRAC = 0.1  # of the files, where none is for validation
NAMED = 5  # samples that are left out, by file

log = logging.getLogger(__name__)


class File(NamedTuple):
    """Attributes:
    labels: each with the key of a sample that has it.
    counts: samples of each label.
    names: of the labels, where the file says them.
    """

    shard: Shard
    labels: dict[int | str, str]
    counts: Counter[int | str]
    names: list[str] | None


def adopt(path: str, root: str) -> str:
    """The data set, below `root`, whose shards are the tars or parquet files at `path`.

    `path` is a folder, local or on S3; ``train`` and ``val`` are folders in it or words in the files' names.
    A listing that changed gives another data set.

    Raises:
        UsageError: if there are no such files, or one is damaged, or their labels do not fit.
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
        log.info("%s is adopted as %s", path, data_set)
    return data_set


def _manifest(folder: str, names: Sequence[str]) -> Manifest:
    splits = _splits(folder, names)
    used = sorted(splits)
    log.info("reading %d shards of %s once", len(used), folder)
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
        files = dict(zip(used, pool.map(_read, (storage.join(folder, name) for name in used)), strict=True))
    if len({file.shard.format for file in files.values()}) > 1:
        raise UsageError(f"{folder} holds tars and parquet files: only one kind can be adopted")
    labels = {label: key for file in files.values() for label, key in file.labels.items()}
    first = files[used[0]]
    if odd := next((file for file in files.values() if file.names != first.names), None):
        raise UsageError(f"{first.shard.path} and {odd.shard.path} name their labels differently")
    shards = {
        split: tuple(files[name].shard for name in used if splits[name] == split and files[name].shard.rows)
        for split in ("train", "val")
    }
    for split, found in shards.items():
        if not found:
            raise UsageError(f"{folder} has no {split} sample with an image and a label")
    counts = sum((files[name].counts for name in used if splits[name] == "val"), Counter[int | str]())
    return Manifest(classes=classes_of(labels, first.names), splits=shards, val_majority=max(counts.values()))


def _splits(folder: str, names: Sequence[str]) -> dict[str, str | None]:
    """File -> ``train`` or ``val``; a tenth of the files is for validation where none is."""
    used = by_split({name: split_of(name) for name in names}, folder)
    if all(used.values()):
        return used
    if len(names) < 2:
        raise UsageError(
            f"{folder} has one shard, none for validation: pack it with jobs/pack_shards.py, which splits it"
        )
    val = sorted(names, key=digest)[: max(1, round(VAL_FRAC * len(names)))]
    return {name: "val" if name in val else "train" for name in names}


def _read(location: str) -> File:
    content = pa.py_buffer(storage.read_bytes(location))
    format = FORMATS[f".{location.rpartition('.')[2]}"]
    samples, problems = read_samples(content, format, location)
    if problems:
        shown = "; ".join(problems[:NAMED])
        log.warning("%s: %d samples left out: %s", location, len(problems), shown)
    log.info("%s: %d samples", location, samples.num_rows)
    return File(
        shard=Shard(
            path=location,
            rows=samples.num_rows,
            bytes=content.size,
            sha256=hashlib.sha256(content).hexdigest(),
            format=format,
        ),
        labels=dict(zip(samples["label"].to_pylist(), samples["key"].to_pylist(), strict=True)),
        counts=Counter(samples["label"].to_pylist()),
        names=class_names(content) if format == "parquet" else None,
    )
