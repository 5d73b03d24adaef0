"""What a data set holds: its `manifest.json` names every shard with its rows, size and SHA-256."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator import storage
from orchestrator.errors import UsageError

Format = Literal["parquet", "webdataset"]
CHECKED_AT_ONCE = 32  # shards; most of a check is waiting for storage
READ_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Shard:
    path: str  # below the data set; absolute or a URI for shards of other projects
    rows: int
    bytes: int
    sha256: str
    format: Format = "parquet"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The classes and shards of a data set.

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
        """SHA-256 over the digests of all shards: data sets of equal digest are equal."""
        shards = {"classes": self.classes, "splits": asdict(self)["splits"]}
        return hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()


def locate(data_set: str, shard: Shard) -> str:
    """Returns the absolute path or URI of a shard of the data set."""
    elsewhere = shard.path.startswith("/") or "://" in shard.path
    return shard.path if elsewhere else storage.join(data_set, shard.path)


def has_manifest(path: str) -> bool:
    return storage.size(storage.join(path, "manifest.json")) is not None


def save_manifest(path: str, manifest: Manifest) -> None:
    storage.write_bytes(storage.join(path, "manifest.json"), json.dumps(asdict(manifest), indent=1).encode())


def open_manifest(path: str) -> Manifest:
    """Reads a data set's manifest; `check_shards` compares it with the shards.

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


def check_shards(path: str, manifest: Manifest, *, verify: bool = False) -> None:
    """Checks every shard's size, the rows and labels in parquet footers, and with `verify` its SHA-256.

    Raises:
        UsageError: naming the first shard that differs from the manifest.
    """
    sizes = storage.files(path)  # one listing instead of a request for each shard

    def check(shard: Shard) -> None:
        location = locate(path, shard)
        size = sizes[shard.path] if shard.path in sizes else storage.size(location)
        if size != shard.bytes:
            state = "is missing" if size is None else f"has {size} bytes"
            raise UsageError(
                f"shard {location} {state}, the manifest says {shard.bytes} bytes: copy it again"
            )
        if shard.format == "parquet":
            _check_footer(location, shard, len(manifest.classes))
        if verify:
            digest = hashlib.sha256()
            with storage.open_to_read(location) as file:
                while piece := file.read(READ_BYTES):
                    digest.update(piece)
            check_digest(location, shard, digest.hexdigest())

    with ThreadPoolExecutor(CHECKED_AT_ONCE) as pool:
        for _ in pool.map(check, [shard for shards in manifest.splits.values() for shard in shards]):
            pass


def check_digest(location: str, shard: Shard, digest: str) -> None:
    """Raises UsageError unless `digest` is the shard's SHA-256."""
    if digest != shard.sha256:
        raise UsageError(
            f"shard {location} changed since it was packed (SHA-256 differs): copy it again, or pack anew"
        )


def _check_footer(location: str, shard: Shard, classes: int) -> None:
    try:
        with storage.open_to_read(location) as file:
            footer = pq.read_metadata(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"shard {location} is not a whole parquet file ({error}): copy it again") from None
    # Shards of other projects may hold rows without an image or label, which are not read.
    may_have_more = location == shard.path
    if footer.num_rows < shard.rows or (footer.num_rows > shard.rows and not may_have_more):
        raise UsageError(
            f"shard {location} has {footer.num_rows} rows, the manifest says {shard.rows}: copy it again"
        )
    groups = (footer.row_group(group) for group in range(footer.num_row_groups))
    for column in (group.column(i) for group in groups for i in range(footer.num_columns)):
        found = column.statistics
        if column.path_in_schema != "label" or not found or not found.has_min_max:
            continue
        for label in (found.min, found.max):
            if isinstance(label, int) and not 0 <= label < classes:
                raise UsageError(
                    f"shard {location} has label {label}, the data set has {classes} classes:"
                    f" 0 to {classes - 1}"
                )
