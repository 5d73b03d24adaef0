"""Images inside tars and parquet files, as other tools write them."""

from pathlib import Path

import pyarrow as pa
import pytest

from orchestrator import storage
from orchestrator.data.sources import open_source
from orchestrator.errors import UsageError
from tests.orchestrator.data.foreign import parquet, samples, tar
from tests.orchestrator.data.images import everything, numbered


def images(first: int, count: int) -> pa.Array:
    return pa.array([{"bytes": numbered(n), "path": f"{n:04d}.png"} for n in range(first, first + count)])


def write_tar(path: Path, first: int, count: int) -> None:
    tar(path.with_suffix(".tar"), samples(first, count))


def write_parquet(path: Path, first: int, count: int) -> None:
    labels = [n % 2 for n in range(first, first + count)]
    columns = {"image": images(first, count), "label": labels}
    parquet(path.with_suffix(".parquet"), columns, row_group_size=7, compression="zstd")


EVERY_KIND = pytest.mark.parametrize(
    ("kind", "write"),
    [pytest.param("webdataset", write_tar, id="tar"), pytest.param("parquet", write_parquet, id="pq")],
)


@EVERY_KIND
def test_images_labels_and_order(kind: str, write, tmp_path: Path) -> None:
    """In the order of the files, which lie at any depth; split by key."""
    write(tmp_path / "b", 0, 30)
    write(tmp_path / "a" / "z", 30, 30)
    source = open_source(f"{kind}:{tmp_path}")
    found, skipped = everything(source)
    assert skipped == []
    assert source.skipped == ()
    key = "{:04d}" if kind == "webdataset" else "{:04d}.png"
    assert {k: (t.label, t.image) for k, t in found.items()} == {
        key.format(n): (n % 2, numbered(n)) for n in range(60)
    }
    for split in ("train", "val"):
        mine = [int(k[:4]) for k, taken in found.items() if taken.split == split]
        assert mine == sorted(mine, key=lambda n: (n < 30, n))
        assert 3 < len(mine) < 57


@EVERY_KIND
@pytest.mark.parametrize(
    ("train", "val"), [("train-000", "val-000"), ("train/0", "validation/0"), ("x-train-0of1", "x-test-0of1")]
)
def test_own_split(kind: str, write, train: str, val: str, tmp_path: Path) -> None:
    write(tmp_path / train, 0, 6)
    write(tmp_path / val, 6, 3)
    found, _ = everything(open_source(f"{kind}:{tmp_path}"))
    assert [(int(k[:4]), taken.split) for k, taken in found.items()] == [
        (n, "train" if n < 6 else "val") for n in range(9)
    ]


@EVERY_KIND
def test_patterns_and_single_files(kind: str, write, tmp_path: Path) -> None:
    suffix = {"webdataset": ".tar", "parquet": ".parquet"}[kind]
    for n in range(3):
        write(tmp_path / "test" / f"shard-{n}", 100 * n, 40)
    for pattern, count in (("shard-[01]*", 80), (f"shard-?{suffix}", 120), (f"shard-2{suffix}", 40)):
        found, _ = everything(open_source(f"{kind}:{tmp_path}/test/{pattern}"))
        assert len(found) == count, pattern
        assert {taken.split for taken in found.values()} == {"train", "val"}
    with pytest.raises(UsageError, match=rf"no {suffix} files at .*x\*; there are shard-0{suffix}"):
        open_source(f"{kind}:{tmp_path}/test/x*")


def test_keys_that_repeat_are_told_apart(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "val-0"):
        write_tar(tmp_path / name, 0, 4)
    found, _ = everything(open_source(f"webdataset:{tmp_path}"))
    assert [key for key in found if key.startswith("0000")] == ["0000", "0000#2", "0000#3"]
    assert len(found) == 12


def test_names_of_numbers(tmp_path: Path) -> None:
    columns = {"image": images(0, 9), "label": [n % 3 for n in range(9)]}
    parquet(tmp_path / "train.parquet", columns, names=["zebra", "ape", "cat", "none of it"])
    parquet(tmp_path / "test.parquet", columns, names=["zebra", "ape", "cat", "none of it"])
    source = open_source(f"parquet:{tmp_path}")
    assert source.classes == ("zebra", "ape", "cat", "none of it")
    assert [sample.label for sample in source.splits["train"]] == [0, 1, 2] * 3
    parquet(tmp_path / "test.parquet", columns, names=["ape", "zebra", "cat", "none of it"])
    with pytest.raises(UsageError, match=r"test.parquet and .*train.parquet name their labels differently"):
        open_source(f"parquet:{tmp_path}")
    parquet(tmp_path / "test.parquet", columns, names=["zebra", "ape"])
    parquet(tmp_path / "train.parquet", columns, names=["zebra", "ape"])
    with pytest.raises(UsageError, match=r"label 2 of 0008.png#2: classes are numbered 0 to 1"):
        open_source(f"parquet:{tmp_path}")


def test_rows_that_are_no_samples_are_named(tmp_path: Path) -> None:
    image = pa.array([{"bytes": numbered(n) if n != 3 else None, "path": f"{n}"} for n in range(8)])
    labels = [n % 2 if n != 5 else None for n in range(8)]
    source = open_source(f"parquet:{parquet(tmp_path / 'x.parquet', {'image': image, 'label': labels})}")
    found, skipped = everything(source)
    assert sorted(found) == ["0", "1", "2", "4", "6", "7"]
    assert skipped == ["3"]
    assert source.skipped == (f"{tmp_path}/x.parquet: 5: no label",)
    members = [*samples(0, 6), ("lost.jpg", b""), ("0001.txt", b"a caption")]
    source = open_source(f"webdataset:{tar(tmp_path / 'x.tar', members)}")
    assert source.skipped[0].startswith(f"{tmp_path}/x.tar: lost: no label")
    assert len(everything(source)[0]) == 6


def test_a_part_of_the_files_is_no_split(tmp_path: Path) -> None:
    for name in ("train-0", "val-0", "more"):
        write_tar(tmp_path / name, 0, 4)
    with pytest.raises(
        UsageError, match=r"more.tar is neither for training nor for validation, but others are"
    ):
        open_source(f"webdataset:{tmp_path}")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a", 0, 4)
    (tmp_path / "b.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:3000])
    with pytest.raises(UsageError, match=r"b.tar is not a whole uncompressed tar"):
        open_source(f"webdataset:{tmp_path}")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"b.parquet is not a whole parquet file"):
        open_source(f"parquet:{tmp_path}")


@EVERY_KIND
def test_on_s3(kind: str, write, bucket, tmp_path: Path) -> None:
    write(tmp_path / "train-0", 0, 10)
    write(tmp_path / "val-0", 10, 4)
    for path in tmp_path.iterdir():
        storage.write_bytes(bucket.uri("set", path.name), path.read_bytes())
    for place in (bucket.uri("set"), bucket.uri("set", "*-0.*")):
        found, _ = everything(open_source(f"{kind}:{place}"))
        assert [taken.image for taken in found.values()] == [numbered(n) for n in range(14)]
