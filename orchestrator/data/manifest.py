"""What a data set holds: a directory's `manifest.json` names every shard, its rows, size and SHA-256."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from orchestrator import storage
from orchestrator.errors import UsageError

Format = Literal["parquet", "webdataset"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    path: str  # below the data set; or absolute or a URI, of shards that somebody else wrote
    rows: int
    bytes: int
    sha256: str
    format: Format = "parquet"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Attributes:
    classes: names by label.
    splits: ``train`` and ``val`` -> shards in order.
    val_majority: validation images of the most frequent class; None in manifests of older versions.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, tuple[Shard, ...]]
    val_majority: int | None = None

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.splits[split])

    def digest(self) -> str:
        """SHA-256 over all shards' own: two data sets of equal digest are equal."""
        shards = {"classes": self.classes, "splits": asdict(self)["splits"]}
        return hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()


def locate(data_set: str, shard: Shard) -> str:
    """Where a shard of the data set lies."""
    elsewhere = shard.path.startswith("/") or "://" in shard.path
    return shard.path if elsewhere else storage.join(data_set, shard.path)


def has_manifest(path: str) -> bool:
    return storage.size(storage.join(path, "manifest.json")) is not None


def save_manifest(path: str, manifest: Manifest) -> None:
    storage.write_bytes(storage.join(path, "manifest.json"), json.dumps(asdict(manifest), indent=1).encode())


def open_manifest(path: str) -> Manifest:
    """Reads a data set's manifest; `check` compares it with what is there.

    Raises:
        UsageError: if there is none, or it has no shards of a split.
    """
    try:
        content = storage.read_bytes(storage.join(path, "manifest.json"))
    except OSError as error:
        raise UsageError(f"no data set at {path}: {error}; pack one with jobs/pack_shards.py") from None
    try:
        tree = json.loads(content)
        manifest = Manifest(
            classes=tuple(tree["classes"]),
            splits={split: tuple(Shard(**s) for s in shards) for split, shards in tree["splits"].items()},
            val_majority=tree.get("val_majority"),
        )
    except ValueError as error:
        raise UsageError(f"{path}/manifest.json is damaged ({error}): copy it again") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}/manifest.json is not a shard manifest ({error!r})") from None
    for split in ("train", "val"):
        if not manifest.splits.get(split):
            raise UsageError(f"{path}/manifest.json has no {split} shards")
    return manifest
