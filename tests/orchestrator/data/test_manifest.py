"""Shards that differ from the manifest are refused by name, before training."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.data.manifest import (
    Manifest,
    check_shards,
    class_counts,
    locate,
    open_manifest,
    save_manifest,
)
from orchestrator.errors import UsageError
from orchestrator.packing.pack import Sample, write_shards
from tests.orchestrator.buckets import Bucket

Pack = Callable[..., tuple[str, Manifest]]


def changed(manifest: Manifest, **fields) -> Manifest:
    first, *others = manifest.splits["train"]
    return replace(manifest, splits={**manifest.splits, "train": (replace(first, **fields), *others)})


def test_what_is_whole_passes(pack_greys: Pack, bucket: Bucket) -> None:
    path, manifest = pack_greys(train=8)
    check_shards(path, manifest)
    check_shards(path, manifest, verify=True)
    sample = Sample(b"image", 0, "key")
    remote = write_shards(bucket.uri("data"), ["a"], {"train": [sample], "val": [sample]})
    check_shards(bucket.uri("data"), remote, verify=True)


def test_missing_incomplete_and_damaged_shards(pack_greys: Pack) -> None:
    path, manifest = pack_greys(train=8)
    whole = Path(path, manifest.splits["train"][1].path)
    content = bytearray(whole.read_bytes())
    content[50] ^= 1
    whole.write_bytes(content)
    check_shards(path, manifest)  # found when training first reads it
    with pytest.raises(UsageError, match=f"{whole} changed since it was packed"):
        check_shards(path, manifest, verify=True)
    shard = manifest.splits["val"][-1]
    os.truncate(f"{path}/{shard.path}", shard.bytes - 1)
    message = f"{path}/{shard.path} has {shard.bytes - 1} bytes, the manifest says {shard.bytes}"
    with pytest.raises(UsageError, match=message):
        check_shards(path, manifest)
    os.remove(f"{path}/{shard.path}")
    with pytest.raises(UsageError, match=f"{path}/{shard.path} is missing, the manifest says"):
        check_shards(path, manifest)


def test_shards_that_lie_elsewhere(pack_greys: Pack, tmp_path: Path) -> None:
    path, manifest = pack_greys(train=4)
    absolute = changed(manifest, path=f"{path}/train/000000.parquet")
    save_manifest(str(tmp_path / "other"), absolute)
    for name in ("train.index", "val.index"):
        shutil.copy(f"{path}/{name}", tmp_path / "other")
    with pytest.raises(UsageError, match=f"{tmp_path}/other/val/000000.parquet is missing"):
        check_shards(str(tmp_path / "other"), absolute)
    moved = {k: [replace(s, path=f"{path}/{s.path}") for s in v] for k, v in manifest.splits.items()}
    check_shards(str(tmp_path / "other"), replace(manifest, splits=moved), verify=True)
    on_s3 = replace(manifest.splits["train"][0], path="s3://theirs/0.parquet")
    assert locate("s3://ours/data", on_s3) == "s3://theirs/0.parquet"


def test_no_data_set_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no data set at {tmp_path}/nothing: .*pack one with"):
        open_manifest(f"{tmp_path}/nothing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"manifest.json is damaged .*: copy it again"),
        ("[]", "is damaged"),
        ("{}", "is damaged .*classes"),
        (
            '{"format": 2, "classes": [], "splits": {"train": [{"path": "x"}]}, "index": {}}',
            "is damaged .*rows",
        ),
        ('{"format": 2, "classes": [], "splits": {}, "index": {}, "val_majority": 1}', "has no train shards"),
        (
            '{"classes": [], "splits": {}}',
            "in format 1, and this version reads format 2: pack it again, with",
        ),
        ('{"format": 3, "splits": 0}', "was packed by another version, in format 3, and this version reads"),
    ],
)
def test_manifests_that_are_damaged(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        open_manifest(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_digest_tells_data_sets_apart(pack_greys: Pack) -> None:
    sizes = [{"train": 8}, {"train": 9}, {"train": 8, "val": 4}]
    assert len({pack_greys(**size)[1].digest() for size in sizes}) == 3


def test_names_outside_of_the_folder(pack_greys: Pack, tmp_path: Path) -> None:
    """A digest is the name of a file in the cache."""
    _, manifest = pack_greys(train=4)
    for other in (
        changed(manifest, path="../../other/x.parquet"),
        changed(manifest, sha256="../../x"),
        replace(manifest, index={**manifest.index, "train": "../../x"}),
    ):
        save_manifest(str(tmp_path / "other"), other)
        with pytest.raises(UsageError, match=r"manifest\.json names a file outside of its folder"):
            open_manifest(str(tmp_path / "other"))


def test_an_index_that_is_damaged_or_missing(pack_greys: Pack) -> None:
    path, manifest = pack_greys(train=4)
    index = Path(path, "train.index")
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    message = f"{index} changed since it was packed"
    with pytest.raises(UsageError, match=message):
        class_counts(path, "train")
    with pytest.raises(UsageError, match=message):
        check_shards(path, manifest, verify=True)
    index.unlink()
    with pytest.raises(UsageError, match=f"{index} is missing"):
        check_shards(path, manifest)
