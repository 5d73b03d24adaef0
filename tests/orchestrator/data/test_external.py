"""Shards of other projects become a data set in place."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from orchestrator import storage
from orchestrator.data.external import index_external_shards
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError
from tests.orchestrator.data.images import numbered, parquet, samples, tar


def write_parquet(path: Path, labels: Sequence[Any], **options) -> Path:
    return parquet(path, {"image": [numbered(n) for n in range(len(labels))], "label": labels}, **options)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Two tars to train on, one to validate."""
    tar(tmp_path / "theirs" / "train-0.tar", samples(0, 6, classes=3))
    tar(tmp_path / "theirs" / "train-1.tar", samples(6, 4, classes=3))
    return tar(tmp_path / "theirs" / "val-0.tar", samples(10, 2, classes=5)).parent


def test_tars(theirs: Path, tmp_path: Path) -> None:
    path = index_external_shards(str(theirs), str(tmp_path / "root"))
    assert path.startswith(f"{tmp_path}/root/data/adopted/theirs-")
    manifest = open_manifest(path)
    assert manifest.classes == ("0", "1", "2")
    rows = {split: [shard.rows for shard in shards] for split, shards in manifest.splits.items()}
    assert rows == {"train": [6, 4], "val": [2]}
    for shard in (*manifest.splits["train"], *manifest.splits["val"]):
        content = Path(shard.path).read_bytes()
        assert (shard.bytes, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert shard.format == "webdataset"


def test_once_and_again_when_the_listing_changes(theirs: Path, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    first = index_external_shards(str(theirs), root)
    (theirs / "train-0.tar").chmod(0)
    assert index_external_shards(f"{theirs}/", root) == first  # nothing is read
    (theirs / "train-0.tar").chmod(0o600)
    tar(theirs / "train-2.tar", samples(20, 2))
    second = index_external_shards(str(theirs), root)
    assert second != first
    assert open_manifest(second).rows("train") == 12
    assert open_manifest(first).rows("train") == 10


@pytest.mark.parametrize("val", ["val", "test"])
def test_folders_of_parquet_and_names(val: str, tmp_path: Path) -> None:
    """Names are sorted over all files; a class may be in one split alone."""
    write_parquet(tmp_path / "them" / "train" / "0.parquet", ["dog", "cat"])
    write_parquet(tmp_path / "them" / val / "0.parquet", ["ape", "dog", "dog"])
    manifest = open_manifest(index_external_shards(str(tmp_path / "them"), str(tmp_path)))
    assert manifest.classes == ("ape", "cat", "dog")
    (shard,) = manifest.splits["val"]
    expected = (f"{tmp_path}/them/{val}/0.parquet", 3, "parquet")
    assert (shard.path, shard.rows, shard.format) == expected
    assert manifest.val_majority == 2


def test_names_in_the_files(tmp_path: Path) -> None:
    for n in range(3):
        write_parquet(tmp_path / "them" / f"{n}.parquet", [1, 0], names=["zebra", "ape", "none of it"])
    manifest = open_manifest(index_external_shards(str(tmp_path / "them"), str(tmp_path)))
    assert manifest.classes == ("zebra", "ape", "none of it")
    write_parquet(tmp_path / "them" / "3.parquet", [1, 0], names=["ape", "zebra"])
    with pytest.raises(UsageError, match=r"0.parquet and .*3.parquet name their labels differently"):
        index_external_shards(str(tmp_path / "them"), str(tmp_path))


def test_a_tenth_of_the_files_validates(tmp_path: Path) -> None:
    for n in range(20):
        tar(tmp_path / "them" / f"{n}.tar", samples(2 * n, 2))
    manifest = open_manifest(index_external_shards(str(tmp_path / "them"), str(tmp_path)))
    hashes = {f"{n}.tar": hashlib.sha256(f"{n}.tar".encode()).hexdigest() for n in range(20)}
    lowest = sorted(hashes, key=lambda name: hashes[name])[:2]
    assert {Path(shard.path).name for shard in manifest.splits["val"]} == {*lowest}
    assert len(manifest.splits["train"]) == 18


def test_samples_that_are_none_are_left_out_and_named(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tar(theirs / "train-1.tar", [*samples(0, 3), ("lost.jpg", b"-"), ("0007.cls", b"1")])
    tar(theirs / "train-2.tar", [("0.cls", b"0")])
    with caplog.at_level(logging.INFO):
        manifest = open_manifest(index_external_shards(str(theirs), str(tmp_path)))
    assert [shard.rows for shard in manifest.splits["train"]] == [6, 3]
    assert f"{theirs}/train-1.tar: 2 samples left out: {theirs}/train-1.tar: lost: no label" in caplog.text
    assert f"{theirs}/train-0.tar: 6 samples" in caplog.messages


def test_rows_that_are_left_out_are_not_read(tmp_path: Path) -> None:
    """The file's footer still counts them."""
    images = [numbered(0), None, numbered(2), numbered(3)]
    for name in ("train-0", "val-0"):
        parquet(tmp_path / "them" / f"{name}.parquet", {"image": images, "label": [0, 1, None, 1]})
    path = index_external_shards(str(tmp_path / "them"), str(tmp_path))
    manifest = open_manifest(path)
    check_shards(path, manifest)
    rows = DataSet(path=path, manifest=manifest, cache_bytes=10**9).open("train", 0)
    assert [rows.image(n) for n in range(2)] == [numbered(0), numbered(3)]
    assert rows.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([-1, 0], "label -1 of .*1.parquet:0: classes are numbered 0 to"),
        (["a", "b"], "some labels are numbers .*, some are names"),
        (pa.array([None, None], pa.int64()), "no val sample with an image and a label"),
    ],
)
def test_labels_that_do_not_fit(labels: Sequence[Any], message: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "them" / "train" / "0.parquet", [0, 1])
    write_parquet(tmp_path / "them" / "val" / "1.parquet", labels)
    with pytest.raises(UsageError, match=message):
        index_external_shards(str(tmp_path / "them"), str(tmp_path))
    assert not (tmp_path / "data").exists()


def test_places_that_cannot_be_indexed(theirs: Path, tmp_path: Path) -> None:
    def refused(path: Path | str, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            index_external_shards(str(path), str(tmp_path))

    refused("/not/there", "no data set at /not/there: no manifest.json, and no folder")
    refused(theirs / "train-0.tar", r"no data set at .*train-0.tar: it is a file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    refused(tmp_path / "other", r"no .parquet or .tar files at .*/other; there are notes.txt")
    tar(tmp_path / "single" / "0.tar", samples(0, 4))
    refused(tmp_path / "single", "/single has one shard, none for validation: pack it with jobs/pack_sh")
    write_parquet(theirs / "train-9.parquet", [0, 1])
    refused(theirs, "holds tars and parquet files")
    (theirs / "train-9.parquet").unlink()
    (theirs / "train-1.tar").write_bytes(b"nothing")
    refused(theirs, "train-1.tar is not a whole uncompressed tar")


def test_on_s3(bucket, theirs: Path) -> None:
    for path in theirs.iterdir():
        storage.write_bytes(bucket.uri("theirs", path.name), path.read_bytes())
    path = index_external_shards(bucket.uri("theirs"), bucket.uri("root"))
    assert path.startswith(bucket.uri("root", "data", "adopted", "theirs-"))
    manifest = open_manifest(path)
    assert [shard.path for shard in manifest.splits["val"]] == [bucket.uri("theirs", "val-0.tar")]
    bucket.proxy.requests.clear()
    assert index_external_shards(bucket.uri("theirs"), bucket.uri("root")) == path
    assert not any(request.startswith("GET") and ".tar" in request for request in bucket.proxy.requests)
