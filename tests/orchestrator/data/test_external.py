"""Other projects' tars and parquet files, indexed to be trained on in place."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator import storage
from orchestrator.data.index import sample_ids
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.parquet import class_names
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.in_place import VAL_FRAC, index_external_shards
from tests.orchestrator.data.images import numbered, parquet, samples, tar


def write_parquet(path: Path, labels: Sequence[Any], **options) -> Path:
    return parquet(path, {"image": [numbered(n) for n in range(len(labels))], "label": labels}, **options)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Two tars for training, one for validation."""
    tar(tmp_path / "theirs" / "train-0.tar", samples(0, 6, classes=3))
    tar(tmp_path / "theirs" / "train-1.tar", samples(6, 4, classes=3))
    return tar(tmp_path / "theirs" / "val-0.tar", samples(10, 2, classes=5)).parent


def open_data(path: str) -> DataSet:
    manifest = open_manifest(path)
    check_shards(path, manifest, verify=True)
    return DataSet(path=path, manifest=manifest, cache_bytes=10**9)


def contents(path: str, split: str) -> list[tuple[str, int, bytes]]:
    """Reads key, label and image of every sample, in the order of training."""
    data = open_data(path)
    shards = data.manifest.splits[split]
    shard = np.repeat(range(len(shards)), [shard.rows for shard in shards])
    row = np.concatenate([np.arange(shard.rows) for shard in shards])
    records = data.records(split, shard, row)
    images, _ = data.images(split, shard, records)
    keys = [key for number in range(len(shards)) for key in data.keys(split, number)]
    assert records["sample"].tolist() == sample_ids(keys).tolist()
    return [
        (k, label, image()) for k, label, image in zip(keys, records["label"].tolist(), images, strict=True)
    ]


def expected(numbers: Iterable[int], classes: int = 2) -> list[tuple[str, int, bytes]]:
    return [(f"{n:04d}", n % classes, numbered(n)) for n in numbers]


def test_tars_in_place(theirs: Path, tmp_path: Path) -> None:
    path = index_external_shards(str(theirs), str(tmp_path / "root"))
    assert path.startswith(f"{tmp_path}/root/data/indexed/theirs-")
    manifest = open_manifest(path)
    assert manifest.classes == ("0", "1", "2")
    rows = {split: [shard.rows for shard in shards] for split, shards in manifest.splits.items()}
    assert rows == {"train": [6, 4], "val": [2]}
    assert contents(path, "train") == expected(range(10), classes=3)
    assert contents(path, "val") == [("0010", 0, numbered(10)), ("0011", 1, numbered(11))]


def test_a_changed_listing_is_another_data_set(theirs: Path, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    first = index_external_shards(str(theirs), root)
    assert index_external_shards(f"{theirs}/", root) == first
    tar(theirs / "train-2.tar", samples(20, 2))
    second = index_external_shards(str(theirs), root)
    assert second != first
    assert open_manifest(second).rows("train") == 12
    assert open_manifest(first).rows("train") == 10


def test_files_that_were_moved_are_the_same_data(theirs: Path, tmp_path: Path) -> None:
    """Runs go on with them. A record may have the digest of 0.2.0, which knew the places of the files."""
    first = open_manifest(index_external_shards(str(theirs), str(tmp_path / "root")))
    moved = index_external_shards(str(theirs.rename(tmp_path / "moved")), str(tmp_path / "root"))
    second = open_manifest(moved)
    assert first.splits != second.splits
    assert first.digest() == second.digest() == first.digest("unknown")
    with_places = hashlib.sha256(first.to_json()).hexdigest()
    assert first.digest(with_places) == with_places != second.digest(with_places)
    tar(tmp_path / "moved" / "val-0.tar", samples(30, 2, classes=3))
    other = open_manifest(index_external_shards(str(tmp_path / "moved"), str(tmp_path / "root2")))
    assert other.digest() != first.digest()


def test_names_of_classes(tmp_path: Path) -> None:
    """Names are sorted over all files, unless the files name their numbers; all must name them alike."""
    write_parquet(tmp_path / "named" / "train" / "0.parquet", ["dog", "cat", "ape"])
    write_parquet(tmp_path / "named" / "test" / "0.parquet", ["ape", "dog", "dog"])
    manifest = open_manifest(index_external_shards(str(tmp_path / "named"), str(tmp_path)))
    assert manifest.classes == ("ape", "cat", "dog")
    (shard,) = manifest.splits["val"]
    assert (shard.path, shard.rows) == (f"{tmp_path}/named/test/0.parquet", 3)
    assert manifest.val_majority == 2
    assert class_names(pq.read_schema(shard.path)) is None
    for n in range(3):
        write_parquet(tmp_path / "them" / f"{n}.parquet", [1, 0], names=["zebra", "ape", "none of it"])
    manifest = open_manifest(index_external_shards(str(tmp_path / "them"), str(tmp_path)))
    assert manifest.classes == ("zebra", "ape", "none of it")
    write_parquet(tmp_path / "them" / "3.parquet", [1, 0], names=["ape", "zebra"])
    with pytest.raises(UsageError, match=r"0.parquet and .*3.parquet name their labels differently"):
        index_external_shards(str(tmp_path / "them"), str(tmp_path))


def test_a_tenth_of_the_samples_validates(tmp_path: Path) -> None:
    """A sample is for validation by the hash of its key, as in packing; files stand in both splits."""
    for n in range(4):
        tar(tmp_path / "them" / f"{n}.tar", samples(100 * n, 100))
    path = index_external_shards(str(tmp_path / "them"), str(tmp_path))
    manifest = open_manifest(path)
    packed = open_source(f"webdataset:{tmp_path}/them", val_frac=VAL_FRAC)
    for split in ("train", "val"):
        assert [Path(shard.path).name for shard in manifest.splits[split]] == [f"{n}.tar" for n in range(4)]
        assert {key for key, _, _ in contents(path, split)} == {s.key for s in packed.splits[split]}
    assert 20 < manifest.rows("val") < 60
    both = contents(path, "train") + contents(path, "val")
    assert sorted(both) == expected(range(400))


def test_a_single_file_is_split(tmp_path: Path) -> None:
    tar(tmp_path / "them" / "0.tar", samples(0, 60))
    path = index_external_shards(str(tmp_path / "them"), str(tmp_path))
    assert sorted(contents(path, "train") + contents(path, "val")) == expected(range(60))


def test_files_sorted_by_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every class is trained and validated on; the order within the files is warned of."""
    for c in range(10):
        members = [
            (f"{c}-{n}.{kind}", content)
            for n in range(20)
            for kind, content in (("png", numbered(20 * c + n)), ("cls", str(c).encode()))
        ]
        tar(tmp_path / "them" / f"{c}.tar", members)
    path = index_external_shards(str(tmp_path / "them"), str(tmp_path))
    for split in ("train", "val"):
        assert {label for _, label, _ in contents(path, split)} == {*range(10)}
    assert f"{tmp_path}/them is sorted by class: " in caplog.text
    assert "pack it with jobs/pack_shards.py, which mixes them" in caplog.text


def test_mixed_files_raise_no_warning(theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index_external_shards(str(theirs), str(tmp_path))
    assert "sorted" not in caplog.text


def test_validation_classes_without_training_images(theirs: Path, tmp_path: Path) -> None:
    tar(theirs / "val-1.tar", [("cat.png", numbered(0)), ("cat.cls", b"3")])
    message = r"validation has images of 1 classes without training images \(3\)"
    with pytest.raises(UsageError, match=message):
        index_external_shards(str(theirs), str(tmp_path))


def test_repeated_keys_are_numbered(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "val-0"):
        tar(tmp_path / "them" / f"{name}.tar", samples(0, 4))
    path = index_external_shards(str(tmp_path / "them"), str(tmp_path))
    names = [f"{n:04d}" for n in range(4)]
    assert [key for key, _, _ in contents(path, "train")] == names + [f"{name}#2" for name in names]
    assert [key for key, _, _ in contents(path, "val")] == [f"{name}#3" for name in names]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_incomplete_samples_are_left_out_and_named(
    compression: str, theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tars and parquet files may lie in one folder."""
    tar(theirs / "train-1.tar", [*samples(0, 3), ("lost.jpg", b"-"), ("0007.cls", b"1")])
    tar(theirs / "train-2.tar", [("0.cls", b"0")])
    images = [numbered(20), None, numbered(22), numbered(23)]
    table = {"image": images, "label": [0, 1, None, 1], "key": ["20", "21", "22", "23"]}
    parquet(theirs / "val-1.parquet", table, compression=compression)
    path = index_external_shards(str(theirs), str(tmp_path))
    assert [shard.rows for shard in open_manifest(path).splits["train"]] == [6, 3]
    assert contents(path, "val")[2:] == [("20", 0, numbered(20)), ("23", 1, numbered(23))]
    assert f"5 samples are left out: {theirs}/train-1.tar: lost: no label" in caplog.text


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([-2, 0], "label -2 of 1.parquet:0: classes are numbered 0 to"),
        (pa.array([2**64 - 1, 0], pa.uint64()), "label 18446744073709551615 of 1.parquet:0: classes are"),
        (["a", "b"], "some labels are numbers .*, some are names"),
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
    refused(tmp_path / "other", r"no .tar or .parquet files at .*/other; there are notes.txt")
    (theirs / "train-1.tar").write_bytes(b"nothing")
    refused(theirs, "train-1.tar is not a whole uncompressed tar")


def test_files_that_are_passed_over(theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A compressed tar, and a name in capitals; notes are no shards."""
    for name in ("train-9.tar.gz", "TRAIN-8.TAR", "notes.txt"):
        (theirs / name).write_bytes(b"-")
    index_external_shards(str(theirs), str(tmp_path))
    assert f"{theirs}: 2 files are passed over, whose names do not end in .tar or .parquet" in caplog.text
    assert "(unpack compressed tars): TRAIN-8.TAR, train-9.tar.gz" in caplog.text


def test_shards_in_place_on_s3(bucket, theirs: Path) -> None:
    for path in theirs.iterdir():
        storage.write_bytes(bucket.uri("theirs", path.name), path.read_bytes())
    bucket.proxy.requests.clear()
    path = index_external_shards(bucket.uri("theirs"), bucket.uri("root"))
    assert path.startswith(bucket.uri("root", "data", "indexed", "theirs-"))
    fetched = [
        request for request in bucket.proxy.requests if request.startswith("GET") and ".tar" in request
    ]
    assert len(fetched) == 3, "each file is read by one request"
    assert contents(path, "train") == expected(range(10), classes=3)
    manifest = open_manifest(path)
    assert [shard.path for shard in manifest.splits["val"]] == [bucket.uri("theirs", "val-0.tar")]
    bucket.proxy.requests.clear()
    assert index_external_shards(bucket.uri("theirs"), bucket.uri("root")) == path
    assert not any(request.startswith("GET") and ".tar" in request for request in bucket.proxy.requests)


def test_metadata_beside_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As img2dataset has it: a parquet file without images is passed over by name, but not if all are so."""
    them = tmp_path / "them"
    for n in range(2):
        tar(them / f"{n:05}.tar", samples(10 * n, 6))
        parquet(them / f"{n:05}.parquet", {"url": ["https://example.org"], "label": [0], "key": ["0"]})
    manifest = open_manifest(index_external_shards(str(them), str(tmp_path)))
    assert sum(manifest.rows(split) for split in manifest.splits) == 12
    assert "00000.parquet has no column of encoded images" in caplog.text
    with pytest.raises(
        UsageError, match=r"no sample .*00000.parquet has no column of .* it has url \(string\)"
    ):
        open_source(f"parquet:{them}")
