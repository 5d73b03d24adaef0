"""Packing is deterministic, and what is not as the manifest says is refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.config import UsageError
from orchestrator.data.manifest import Manifest, open_manifest
from orchestrator.data.packing import Sample, write_shards
from orchestrator.data.sources import open_source

Pack = Callable[..., tuple[str, Manifest]]


def files(path: str) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()}


def test_same_input_same_bytes(digits: str, tmp_path: Path) -> None:
    source = open_source("digits")
    again = write_shards(str(tmp_path / "again"), source.classes, source.splits)
    assert files(str(tmp_path / "again")) == files(digits)
    assert again.digest() == open_manifest(digits).digest()


def test_round_trip(pack_greys: Pack) -> None:
    path, manifest = pack_greys(train=10, val=3)
    assert open_manifest(path) == manifest
    assert [shard.rows for shard in manifest.splits["train"]] == [4, 4, 2]
    assert manifest.rows("train") == 10
    assert manifest.rows("val") == 3
    rows = [row for shard in manifest.splits["train"] for row in read_shard(path, shard).to_pylist()]
    assert [(row["key"], row["label"]) for row in rows] == [(f"grey-{n}", n % 10) for n in range(10)]


def test_digest_tells_data_sets_apart(pack_greys: Pack) -> None:
    assert pack_greys(train=8)[1].digest() != pack_greys(train=9)[1].digest()


def test_digits(digits: str) -> None:
    manifest = open_manifest(digits)
    assert manifest.classes == tuple("0123456789")
    assert manifest.rows("train") + manifest.rows("val") == 1797
    assert 0.17 < manifest.rows("val") / 1797 < 0.23


def test_packing_never_overwrites(pack_greys: Pack) -> None:
    path, _ = pack_greys(train=4)
    before = files(path)
    with pytest.raises(UsageError, match=f"{path} already holds a data set"):
        write_shards(path, ["a"], {"train": [Sample(b"", 0, "k")]})
    assert files(path) == before


def test_no_data_set_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no data set at {tmp_path}/nothing: .*pack one with"):
        open_manifest(f"{tmp_path}/nothing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no data set at .*pack one with"),
        ("[]", "is not a shard manifest"),
        ("{}", "is not a shard manifest .*classes"),
        ('{"classes": [], "splits": {"train": [{"path": "x"}]}}', "is not a shard manifest .*rows"),
        ('{"classes": [], "splits": []}', "is not a shard manifest"),
        ('{"classes": [], "splits": {}}', "has no train shards"),
    ],
)
def test_manifest_that_is_none(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        open_manifest(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_missing_split(pack_greys: Pack) -> None:
    with pytest.raises(UsageError, match="no val images"):
        pack_greys(train=4, val=0)
    path, _ = pack_greys(train=4)
    manifest = Path(path) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"val"', '"test"'))
    with pytest.raises(UsageError, match="has no val shards"):
        open_manifest(path)


@pytest.mark.parametrize("shard", ["train/000001.parquet", "val/000000.parquet"])
def test_missing_shard(shard: str, pack_greys: Pack) -> None:
    path, _ = pack_greys(train=8)
    os.remove(f"{path}/{shard}")
    with pytest.raises(UsageError, match=f"{path}/{shard} is missing, the manifest says"):
        open_manifest(path)


def test_shard_cut_short(pack_greys: Pack) -> None:
    path, manifest = pack_greys(train=8)
    shard = manifest.splits["train"][1]
    os.truncate(f"{path}/{shard.path}", shard.bytes - 1)
    message = f"{path}/{shard.path} has {shard.bytes - 1} bytes, the manifest says {shard.bytes}"
    with pytest.raises(UsageError, match=message):
        open_manifest(path)


def test_flipped_byte(pack_greys: Pack) -> None:
    path, manifest = pack_greys(train=8)
    first, second = manifest.splits["train"]
    content = bytearray(Path(path, second.path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(path, second.path).write_bytes(content)
    open_manifest(path)  # sizes are all that is checked at the start
    assert read_shard(path, first).num_rows == 4
    with pytest.raises(UsageError, match=f"{path}/{second.path} changed since it was packed"):
        read_shard(path, second)


def test_manifest_is_written_last(tmp_path: Path) -> None:
    """A packing that breaks off leaves nothing that could be taken for a data set."""

    def breaks_off():
        yield Sample(b"", 0, "k")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(str(tmp_path), ["a"], {"train": [Sample(b"", 0, "k")], "val": breaks_off()})
    assert not (tmp_path / "manifest.json").exists()
    write_shards(str(tmp_path), ["a"], {"train": [Sample(b"", 0, "k")], "val": [Sample(b"", 0, "v")]})
    assert json.loads((tmp_path / "manifest.json").read_text())["classes"] == ["a"]
