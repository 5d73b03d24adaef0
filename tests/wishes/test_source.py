"""A wish: a format of files of one's own, a file outside of the tree; packed, and trained in place."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jobs import pack_shards, train
from orchestrator.data.manifest import open_manifest
from tests.parts import png

WISH = '''
import hashlib
import json
import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator import storage
from orchestrator.data.manifest import Shard
from orchestrator.packing import FilesConfig
from orchestrator.packing.samples import Part


@dataclass(frozen=True, kw_only=True)
class RecordsConfig(FilesConfig):
    """Files .rec: a length, as many bytes of JSON with [key, class, bytes] of each image, and the images."""

    kind: Literal["records"] = "records"
    extensions: ClassVar[tuple[str, ...]] = (".rec",)
    in_place: ClassVar[bool] = True

    def index(self, location: str) -> Part:
        content = storage.read_bytes(location)
        at = 4 + int.from_bytes(content[:4], "little")
        keys, labels, sizes = zip(*json.loads(content[4:at]))
        places = []
        for size in sizes:
            places.append((at, size))
            at += size
        crcs = [zlib.crc32(content[begin : begin + size]) for begin, size in places]
        digest = hashlib.sha256(content).hexdigest()
        shard = Shard(path=location, rows=len(keys), bytes=len(content), sha256=digest)
        return Part(location, labels, keys, places, shard=shard, crcs=crcs)
'''
SHORT = ("--set", "train.steps=4", "--set", "train.report_every=2", "--set", "data.batch_size=8")


@pytest.fixture
def wish(tmp_path: Path, new_process: Callable[[], None]) -> str:
    (tmp_path / "records.py").write_text(WISH)
    return str(tmp_path / "records.py")


@pytest.fixture
def files(tmp_path: Path) -> str:
    """Two files of 20 images, in two classes that are called by names."""
    rng = np.random.default_rng(0)
    for split, first in (("train", 0), ("val", 20)):
        images = [png(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(20)]
        listed = [(f"k{first + n}", ("cat", "dog")[n % 2], len(image)) for n, image in enumerate(images)]
        index = json.dumps(listed).encode()
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{split}.rec").write_bytes(
            len(index).to_bytes(4, "little") + index + b"".join(images)
        )
    return str(tmp_path / "files")


@pytest.fixture
def home(tmp_path: Path, empty_store: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    empty_store(tmp_path / "home")
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def call(monkeypatch: pytest.MonkeyPatch, command: ModuleType, *args: str) -> str:
    """Returns what a command exits with."""
    monkeypatch.setattr(sys, "argv", ["command", *args])
    try:
        command.main()
    except SystemExit as stop:
        return str(stop.code or "")
    return ""


def test_it_is_packed(wish: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = ("--source", f"records:{files}"), str(tmp_path / "packed")
    refused = call(monkeypatch, pack_shards, *source, "--out", out)
    assert "unknown source" in refused
    assert "mds:PATH" in refused
    assert call(monkeypatch, pack_shards, "--plugin", wish, *source, "--out", out) == ""
    manifest = open_manifest(out)
    assert (manifest.classes, manifest.rows("train"), manifest.rows("val")) == (("cat", "dog"), 20, 20)
    inside = call(monkeypatch, pack_shards, "--plugin", wish, *source, "--out", f"{files}/x")
    assert "lie in each other" in inside


def test_it_is_trained_in_place(wish: str, files: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ("--name", "wish", "--data", files, *SHORT)
    assert "no .tar or .parquet files" in call(monkeypatch, train, *run)
    assert call(monkeypatch, train, "--plugin", wish, *run) == ""
    assert json.loads((home / "wish" / "result.json").read_text())["status"] == "finished"
    data_set = json.loads((home / "wish" / "config.json").read_text())["config"]["data"]["path"]
    shards = open_manifest(data_set).splits["train"]
    assert [(Path(shard.path).name, shard.rows) for shard in shards] == [("train.rec", 20)]
