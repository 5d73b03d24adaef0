"""Trains on files of other projects in place, after indexing them (`FilesConfig.in_place`)."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from orchestrator import storage
from orchestrator.data.index import IndexedShard, records_of, write_index
from orchestrator.data.manifest import FORMAT, UNFINISHED, Manifest, Shard, has_manifest, save_manifest
from orchestrator.errors import UsageError
from orchestrator.packing.base import FilesConfig, in_place
from orchestrator.packing.listing import shards_at
from orchestrator.packing.samples import Execute, Part, Table, warn_if_sorted, with_progress
from orchestrator.packing.splits import splits_of

VAL_FRAC = 0.1  # of the samples, if no file is for validation
SHOWN = 5  # samples left out, in the log

log = logging.getLogger(__name__)


def index_external_shards(path: str, root: str, *, execute: Execute = map) -> str:
    """Returns the data set, below `root`, of the files in the folder `path` that can be read in place.

    ``train`` and ``val`` are folders in it, or words in the files' names; else a tenth of the samples is for
    validation. A listing that changed gives another data set. `execute` runs the indexing of files.

    Raises:
        UsageError: if there are no such files, a file is damaged, or labels or splits do not fit together.
    """
    path = storage.absolute(path).rstrip("/")
    if storage.size(path) is not None:
        raise UsageError(f"no data set at {path}: it is a file; name the folder of the shards")
    try:
        sources = in_place()
        folder, sizes = shards_at(path, *(end for source in sources for end in source.extensions))
    except UsageError as error:
        raise UsageError(
            f"no data set at {path}: no manifest.json, and {error}; pack one with jobs/pack_shards.py"
        ) from None
    if storage.size(storage.join(path, UNFINISHED)) is not None:
        raise UsageError(f"no data set at {path}: packing into it broke off; pack it again")
    digest = hashlib.sha256(json.dumps([FORMAT, folder, sizes], sort_keys=True).encode()).hexdigest()
    data_set = storage.join(root, "data", "indexed", f"{folder.rpartition('/')[2]}-{digest[:12]}")
    if not has_manifest(data_set):
        log.info("reading %d shards of %s once", len(sizes), folder)
        named, notes = splits_of(sizes, folder)
        splits = {storage.join(folder, name): split for name, split in named.items()}
        parts = execute(partial(index_file, sources=sources), list(splits))
        parts = with_progress(parts, len(splits), "indexed", lambda part: len(part.keys))
        table = Table(parts, splits, VAL_FRAC)
        for note in notes + table.notes:
            log.warning("%s: %s", folder, note)
        if table.skipped:
            log.warning("%d samples are left out: %s", len(table.skipped), "; ".join(table.skipped[:SHOWN]))
        warn_if_sorted(table.neighbours(), folder, "pack it with jobs/pack_shards.py, which mixes them")
        save_manifest(data_set, _write(data_set, table))
        log.info("the %d samples of %s are indexed in %s", len(table.labels), path, data_set)
    return data_set


def index_file(location: str, sources: Sequence[FilesConfig] = ()) -> Part:
    """Indexes a file by the source, by default any, that recognises it. Raises as its `index` does."""
    sources = sources or in_place()
    source = next((source for source in sources if source.recognises(location)), None)
    if source is None:
        known = ", ".join(end for each in sources for end in each.extensions)
        raise UsageError(f"{location} is none of the files that are read in place: {known}")
    return source.index(location)


def _write(data_set: str, table: Table) -> Manifest:
    splits: dict[str, tuple[Shard, ...]] = {}
    index = {}
    images: dict[str, Counter[Any]] = {"train": Counter(), "val": Counter()}
    for split in ("train", "val"):
        shards: list[Shard] = []
        index[split] = write_index(data_set, split, _noting(table, split, shards, images[split]))
        splits[split] = tuple(shards)
    most = max(images["val"].values())
    return Manifest(
        classes=table.classes, splits=splits, index=index, val_majority=most, labels=table.most_labels
    )


def _noting(table: Table, split: str, shards: list[Shard], images: Counter[Any]) -> Iterator[IndexedShard]:
    """Yields the samples of files, appends the files to `shards`, and counts the images of each label."""
    for part in table.parts(split):
        assert part.shard
        shards.append(replace(part.shard, rows=len(part.keys)))
        images.update(chain(part.labels, *part.others))
        offsets, sizes = zip(*part.places, strict=True)
        fields = offsets, sizes, part.crcs, part.labels, part.keys, part.others, table.most_labels
        yield IndexedShard(records_of(*fields), part.keys)
