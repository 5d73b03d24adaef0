"""Packing is deterministic, checks every image, and never leaves half a data set."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.pack_shards import on_cluster
from orchestrator import storage
from orchestrator.data.manifest import Manifest, open_manifest
from orchestrator.errors import UsageError
from orchestrator.packing import open_source, pack as packing
from orchestrator.packing.in_place import index_external_shards
from orchestrator.packing.pack import Sample, check_free, digits, pack, write_shards
from tests.orchestrator.data.images import JPEG, PNG, files, numbered, parquet, samples, tar, write
from tests.parts import start_ray

Pack = Callable[..., tuple[str, Manifest]]


@pytest.fixture
def images(tmp_path: Path) -> str:
    """A folder of 3 x 40 images, as a source."""
    content = {f"{c}/{n}.png": numbered(40 * c + n) for c in range(3) for n in range(40)}
    return f"folder:{write(tmp_path / 'images', content)}"


def rows(path: str | Path, split: str) -> list[dict[str, Any]]:
    shards = open_manifest(str(path)).splits[split]
    return [row for shard in shards for row in pq.read_table(f"{path}/{shard.path}").to_pylist()]


def backwards(work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    return map(work, tasks[::-1])


def test_same_input_same_bytes(images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which shards are finished and files are listed does not matter."""
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 8)
    report = pack(str(tmp_path / "a"), open_source(images))
    walk = os.walk
    monkeypatch.setattr(
        os, "walk", lambda *args, **kw: ((f, d, n[::-1]) for f, d, n in reversed([*walk(*args, **kw)]))
    )
    again = pack(str(tmp_path / "b"), open_source(images), execute=backwards)
    assert again == report
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert len(files(tmp_path / "a")) > 12


def test_every_image_once(images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 50)
    report = pack(str(tmp_path / "out"), open_source(images))
    manifest = open_manifest(str(tmp_path / "out"))
    assert manifest == report.manifest
    assert manifest.classes == ("0", "1", "2")
    found = {row["key"]: row for split in ("train", "val") for row in rows(tmp_path / "out", split)}
    assert {key: (row["label"], row["image"]) for key, row in found.items()} == {
        f"{c}/{n}.png": (c, numbered(40 * c + n)) for c in range(3) for n in range(40)
    }
    assert report.labels["train"] + report.labels["val"] == Counter({0: 40, 1: 40, 2: 40})
    assert [shard.rows for shard in manifest.splits["train"]][:-1] == [50]
    assert manifest.rows("train") + manifest.rows("val") == 120
    assert not (tmp_path / "out" / "skipped.txt").exists()


def test_bad_images_are_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 2)
    good = {f"{c}/{n}.png": PNG for c in "ab" for n in range(4)}
    bad = {f"{c}/{n}.jpg": JPEG[:200] for c in "ab" for n in range(9)}
    source = open_source(f"folder:{write(tmp_path / 'images', good | bad | {'a/x.txt': b''})}")
    report = pack(str(tmp_path / "out"), source)
    assert {row["key"] for split in ("train", "val") for row in rows(tmp_path / "out", split)} == {*good}
    assert {line.split(": ")[0] for line in report.skipped} == {*bad, f"{tmp_path}/images/a/x.txt"}
    assert all(line.split(": ", 1)[1] for line in report.skipped)
    assert (tmp_path / "out" / "skipped.txt").read_text().splitlines() == [*report.skipped]
    assert all(shard.rows for shards in report.manifest.splits.values() for shard in shards)


def test_without_a_valid_image(tmp_path: Path) -> None:
    images = {f"{c}/{n}.png": b"none" for c in "ab" for n in range(4)}
    source = open_source(f"folder:{write(tmp_path / 'images', images)}")
    message = r"no valid train images, see .*skipped.txt; the first: ./\d.png: not an"
    with pytest.raises(UsageError, match=message):
        pack(str(tmp_path / "out"), source)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert len((tmp_path / "out" / "skipped.txt").read_text().splitlines()) == 8


def test_shards_of_large_images_hold_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are cut by the sizes of the files; a file above the limit has a shard of its own."""
    sizes = [len(PNG)] * 9
    monkeypatch.setattr(packing, "SHARD_BYTES", 4 * len(PNG))
    write(tmp_path / "images", {f"train/{n % 2}/{n}.png": PNG for n in range(len(sizes))})
    write(tmp_path / "images", {"val/0/a.png": PNG + bytes(9 * len(PNG)), "val/1/b.png": PNG})
    report = pack(str(tmp_path / "out"), open_source(f"folder:{tmp_path}/images"))
    assert [shard.rows for shard in report.manifest.splits["train"]] == [4, 4, 1]
    assert [shard.rows for shard in report.manifest.splits["val"]] == [1, 1]


def test_files_of_others(images: str, tmp_path: Path) -> None:
    write(tmp_path / "out", {".keep": b""})
    check_free(str(tmp_path / "out"))
    write(tmp_path / "out", {"thesis.txt": b"mine"})
    with pytest.raises(UsageError, match=r"holds other files \(thesis.txt ..\)"):
        pack(str(tmp_path / "out"), open_source(images))


def test_overwriting(images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set is only replaced with `fresh`: all its files are deleted, and no others."""
    out = str(tmp_path / "out")
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 8)
    pack(out, open_source(images))
    mine = {"notes.txt": b"mine", "train/000000.parquet.bak": b"mine"}
    write(tmp_path / "out", mine | {"skipped.txt": b"old"})
    before = files(out)
    for refused in (lambda: pack(out, open_source("digits")), lambda: check_free(out)):
        with pytest.raises(UsageError, match=f"{out} already holds a data set: .*`fresh`"):
            refused()
    assert files(out) == before
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 1000)
    pack(out, open_source("digits"), fresh=True)
    shards = ("train/000000.parquet", "train/000001.parquet", "val/000000.parquet")
    index = ("train.index", "train.keys", "val.index", "val.keys")
    assert {*files(out)} == {*shards, *index, "manifest.json", *mine}


def test_an_interrupted_packing(images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no data set, not even an older one; the next packing continues in the same place."""
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 8)
    out = str(tmp_path / "out")
    pack(out, open_source("digits"))

    def breaks_off(work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        yield work(tasks[3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(out, open_source(images), fresh=True, execute=breaks_off)
    assert {*files(out)} == {"train/000003.parquet", "unfinished"}
    with pytest.raises(UsageError, match="packing into it broke off"):
        index_external_shards(out, str(tmp_path))
    pack(out, open_source(images))
    assert "unfinished" not in files(out)
    assert {row["key"][0] for row in rows(out, "train")} == {"0", "1", "2"}


def test_on_s3(bucket, images: str, tmp_path: Path) -> None:
    """The bytes are the same; a storage that fails ends the packing."""
    pack(str(tmp_path / "out"), open_source(images))
    pack(bucket.uri("out"), open_source(images))
    local = files(tmp_path / "out")
    names = storage.files(bucket.uri("out"))
    assert {name: storage.read_bytes(bucket.uri("out", name)) for name in names} == local
    pack(bucket.uri("out"), open_source("digits"), fresh=True)
    assert len(open_manifest(bucket.uri("out")).classes) == 10
    with bucket.failing("busy"), pytest.raises(OSError, match="503"):
        pack(bucket.uri("other"), open_source(images))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_images_sorted_by_class(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are mixed, unless files are compressed: then a warning says so."""
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 20)
    columns = {"image": [numbered(n) for n in range(200)], "label": [n // 20 for n in range(200)]}
    path = parquet(tmp_path / "x.parquet", columns, compression=compression, use_dictionary=False)
    pack(str(tmp_path / "out"), open_source(f"parquet:{path}"))
    assert ("is sorted by class: 20 neighbouring samples" in caplog.text) == (compression == "zstd")
    first = pq.read_table(tmp_path / "out" / "train" / "000000.parquet")["label"].to_pylist()
    assert (len({*first}) < 3) == (compression == "zstd")


def test_digits(digits: str) -> None:
    manifest = open_manifest(digits)
    assert manifest.classes == tuple("0123456789")
    assert (manifest.rows("train"), manifest.rows("val")) == (1430, 367)
    # The same as the fixture, which does not decode the images.
    assert pack(f"{digits}-again", open_source("digits")).manifest == manifest


def test_write_shards_refuses(pack_greys: Pack) -> None:
    path, manifest = pack_greys(train=10)
    assert open_manifest(path) == manifest
    assert [shard.rows for shard in manifest.splits["train"]] == [4, 4, 2]
    before = files(path)
    with pytest.raises(UsageError, match=f"{path} already holds a data set"):
        write_shards(path, ["a"], {"train": [Sample(b"", 0, "k")]})
    assert files(path) == before
    with pytest.raises(UsageError, match="no valid val images"):
        pack_greys(train=5, val=0)


@pytest.mark.smoke
def test_from_a_bucket_into_a_bucket(
    no_cluster, bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of a cluster find the bucket through their environment."""
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 8)
    for name, first, count in (("train-0.tar", 0, 30), ("val-0.tar", 30, 10)):
        path = tar(tmp_path / "tars" / name, samples(first, count))
        storage.write_bytes(bucket.uri("tars", name), path.read_bytes())
    start_ray()
    source = open_source(f"webdataset:{bucket.uri('tars')}", execute=on_cluster)
    report = pack(bucket.uri("out"), source, execute=on_cluster)
    assert report == pack(str(tmp_path / "out"), open_source(f"webdataset:{tmp_path}/tars"))
    assert open_manifest(bucket.uri("out")) == report.manifest
    assert [shard.rows for shard in report.manifest.splits["train"]] == [8, 8, 8, 6]


def test_digits_of_another_version_are_packed_again(tmp_path: Path) -> None:
    """They are made, so a new version of the project replaces them; what is of its own format stays."""
    path = Path(digits(str(tmp_path)))
    manifest = path / "manifest.json"
    written = manifest.read_text()
    began = manifest.stat().st_mtime_ns
    assert Path(digits(str(tmp_path))) == path
    assert manifest.stat().st_mtime_ns == began
    manifest.write_text(written.replace('"format": 2', '"format": 1').replace('"format":2', '"format":1'))
    with pytest.raises(UsageError, match="packed by another version"):
        open_manifest(str(path))
    digits(str(tmp_path))
    assert manifest.read_text() == written
