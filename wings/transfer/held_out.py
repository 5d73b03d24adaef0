"""A piece of training images held out for choosing settings: a data set of indexes alone, whose shards stay
where they are.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from orchestrator import storage
from orchestrator.data.index import NO_LABEL, IndexedShard, labels_of, read_keys, sample_ids, write_index
from orchestrator.data.manifest import Manifest, has_manifest, locate, open_manifest, save_manifest
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError


def hold_out(path: str, root: str, fraction: float) -> str:
    """Returns the data set, below `root`, whose ``train`` and ``val`` are pieces of the training images of
    `path`: a piece of this fraction is for validation. The validation images of `path` are in neither.

    The images of the lowest hashes of their sample ids are held out, whatever their order and shards are.

    Raises:
        UsageError: if one of the pieces would be empty.
    """
    manifest = open_manifest(path)
    rows = manifest.rows("train")
    count = round(fraction * rows)
    if not 0 < count < rows:
        raise UsageError(
            f"{fraction:g} of the {rows} training images of {path} is {count} images, and both pieces need"
            " some: use another fraction, or a single rate, which needs no choice"
        )
    text = f"{path}\n{manifest.digest()}\n{fraction}"
    name = f"{path.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    target = storage.join(root, "data", "held-out", name)
    if not has_manifest(target):
        save_manifest(target, _write(target, path, manifest, count))
    return target


def _write(target: str, path: str, manifest: Manifest, count: int) -> Manifest:
    """Writes the indexes of the pieces, and returns the manifest of their data set."""
    data = DataSet(path=path, manifest=manifest, cache_bytes=0)
    shard, row = data.places("train", np.arange(manifest.rows("train")))
    records = data.records("train", shard, row)
    # Hashed again, because packing may have chosen validation images by the ids themselves.
    order = np.argsort(sample_ids(map(str, records["sample"].tolist())), kind="stable")
    is_val = np.zeros(len(order), bool)
    is_val[order[:count]] = True

    def pieces(chosen: NDArray[np.bool_], numbers: list[int]) -> Iterator[IndexedShard]:
        for number in numbers:
            keys, here = read_keys(path, "train", number), chosen & (shard == number)
            yield IndexedShard(records[here], [keys[i] for i in row[here]])

    splits, index = {}, {}
    for split, chosen in (("train", ~is_val), ("val", is_val)):
        rows = np.bincount(shard[chosen], minlength=len(manifest.splits["train"])).tolist()
        splits[split] = tuple(
            replace(of, path=locate(path, of), rows=n)
            for of, n in zip(manifest.splits["train"], rows, strict=True)
            if n
        )
        index[split] = write_index(target, split, pieces(chosen, [i for i, n in enumerate(rows) if n]))
    labels = labels_of(records[is_val])
    majority = int(np.bincount(labels[labels != NO_LABEL]).max())
    return replace(manifest, splits=splits, index=index, val_majority=majority)
