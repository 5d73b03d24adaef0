"""The manifest of a data set: its `manifest.json` names every shard with its rows, size and SHA-256."""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator import storage
from orchestrator.data.fields import Stored
from orchestrator.data.index import NO_LABEL, Ints, labels_of, record_type
from orchestrator.errors import UsageError

FORMAT = 2  # of manifest and index; 2 since an index has checksums of images
CHECKED_AT_ONCE = 32  # shards; most of a check is waiting for storage
UNFINISHED = "unfinished"  # a file beside shards whose packing goes on, or broke off


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file that holds images of a split; the index says where.

    path: below the data set; absolute or a URI for files of other projects.
    rows: images of the split.
    bytes: size of the file.
    unpacked: bytes of all images of a compressed parquet file, whose index counts from the first of them;
        None for files that hold the encoded images verbatim.
    """

    path: str
    rows: int
    bytes: int
    sha256: str
    unpacked: int | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The classes and shards of a data set.

    classes: names by label.
    splits: ``train`` and ``val`` -> shards in order.
    index: split -> SHA-256 of the records of its index.
    val_majority: validation images of the most frequent class.
    labels: the most labels of an image.
    fields: name -> how it is stored, of the fields beside image and label.
    background, white: what was done to images of the source, as `Preparation` has it.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, tuple[Shard, ...]]
    index: Mapping[str, str]
    val_majority: int
    labels: int = 1
    fields: Mapping[str, Stored] = field(default_factory=dict)
    background: str | None = None
    white: int | None = None

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.splits[split])

    def index_of(self, split: str) -> Shard:
        """Returns the file of a split's index."""
        rows = self.rows(split)
        size = rows * record_type(self.labels, self.fields).itemsize
        return Shard(path=f"{split}.index", rows=rows, bytes=size, sha256=self.index[split])

    def digest(self, known: str = "") -> str:
        """Returns a SHA-256 over classes, shards and indexes, equal for equal data sets wherever they lie.

        `known`: a digest that is returned if it is that of these data with the places of their files, as
        records of 0.2.0 and before have it of files of other projects.
        """
        if known and known == hashlib.sha256(self.to_json()).hexdigest():
            return known
        splits = {
            split: tuple(replace(s, path=s.path.rpartition("/")[2]) if is_elsewhere(s) else s for s in shards)
            for split, shards in self.splits.items()
        }
        return hashlib.sha256(replace(self, splits=splits).to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Returns the content of `manifest.json`, without what is as in most data sets.

        An indent would take five times as long.
        """
        usual = {"labels": 1, "fields": {}, "background": None, "white": None}
        tree = {name: value for name, value in vars(self).items() if usual.get(name) != value}
        tree["format"] = FORMAT
        return json.dumps(tree, default=vars, sort_keys=True, separators=(",\n", ": ")).encode()


def is_elsewhere(shard: Shard) -> bool:
    """Returns whether a shard is a file of another project, outside of the data set."""
    return shard.path.startswith("/") or "://" in shard.path


def locate(data_set: str, shard: Shard) -> str:
    """Returns the absolute path or URI of a shard of the data set."""
    return shard.path if is_elsewhere(shard) else storage.join(data_set, shard.path)


def has_manifest(path: str) -> bool:
    return storage.size(storage.join(path, "manifest.json")) is not None


def save_manifest(path: str, manifest: Manifest) -> None:
    storage.write_bytes(storage.join(path, "manifest.json"), manifest.to_json())


def open_manifest(path: str) -> Manifest:
    """Reads a data set's manifest; `check_shards` compares it with the shards.

    Raises:
        UsageError: if there is no manifest, it is damaged, or it has no shards of a split.
    """
    try:
        content = storage.read_bytes(storage.join(path, "manifest.json"))
    except OSError as error:
        raise UsageError(f"no data set at {path}: {error}; pack one with jobs/pack_shards.py") from None
    try:
        tree = json.loads(content)
        if "splits" in tree and tree.get("format") != FORMAT:
            raise UsageError(
                f"{path} was packed by another version, in format {tree.get('format', 1)}, and this version"
                f" reads format {FORMAT}: pack it again, with `fresh`"
            )
        manifest = Manifest(
            classes=tuple(tree["classes"]),
            splits={split: tuple(Shard(**s) for s in shards) for split, shards in tree["splits"].items()},
            index=tree["index"],
            val_majority=tree["val_majority"],
            labels=tree.get("labels", 1),
            fields=tree.get("fields", {}),
            background=tree.get("background"),
            white=tree.get("white"),
        )
        indexes = [manifest.index_of(split) for split in manifest.splits]
        for shard in (*indexes, *(shard for shards in manifest.splits.values() for shard in shards)):
            # A digest is the name of a file in the cache.
            if ".." in shard.path.split("/") or not re.fullmatch(r"\w+", shard.sha256):
                raise UsageError(f"{path}/manifest.json names a file outside of its folder: {shard.path}")
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}/manifest.json is damaged ({error!r}): copy it again") from None
    for split in ("train", "val"):
        if not manifest.splits.get(split):
            raise UsageError(f"{path}/manifest.json has no {split} shards")
    return manifest


def class_counts(path: str, split: str) -> Ints:
    """Returns the number of labels of each class in a split, (classes,).

    Raises:
        UsageError: if there is no manifest, or the index is not the one that it names.
    """
    manifest = open_manifest(path)
    index = manifest.index_of(split)
    content = storage.read_bytes(location := locate(path, index))
    check_digest(location, index, hashlib.sha256(content).hexdigest())
    labels = labels_of(np.frombuffer(content, record_type(manifest.labels, manifest.fields)))
    return np.bincount(labels[labels != NO_LABEL], minlength=len(manifest.classes))


def check_shards(path: str, manifest: Manifest, *, verify: bool = False) -> None:
    """Checks every shard's size, and with `verify` its SHA-256, which else is checked when it is fetched
    whole.

    Raises:
        UsageError: naming the first shard that differs from the manifest.
    """
    # One listing takes the place of a request for each shard.
    sizes = storage.files(path) if storage.can_list(path) else {}
    indexes = [manifest.index_of(split) for split in manifest.index]

    def check(shard: Shard) -> None:
        location = locate(path, shard)
        size = sizes[shard.path] if shard.path in sizes else storage.size(location)
        if size != shard.bytes:
            state = "is missing" if size is None else f"has {size} bytes"
            raise UsageError(f"{location} {state}, the manifest says {shard.bytes} bytes: copy it again")
        if verify:
            digest = hashlib.sha256()
            for piece in storage.pieces(location):
                digest.update(piece)
            check_digest(location, shard, digest.hexdigest())

    shards = {shard.path: shard for shards in manifest.splits.values() for shard in shards}
    with ThreadPoolExecutor(CHECKED_AT_ONCE) as pool:
        for _ in pool.map(check, [*indexes, *shards.values()]):
            pass


def check_digest(location: str, shard: Shard, digest: str) -> None:
    """Raises UsageError unless `digest` is the shard's SHA-256."""
    if digest != shard.sha256:
        raise UsageError(
            f"{location} changed since it was packed (SHA-256 differs): copy it again, or pack anew"
        )
