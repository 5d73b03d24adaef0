"""Files as whole as they were written, or not there."""

import os
from pathlib import Path

import pytest

from orchestrator import storage


def test_write_then_read(tmp_path: Path) -> None:
    location = str(tmp_path / "new" / "deep" / "file")
    assert storage.size(location) is None
    storage.write_bytes(location, b"first, and longer")
    storage.write_bytes(location, b"second")
    assert storage.read_bytes(location) == b"second"
    assert storage.size(location) == 6
    assert os.listdir(tmp_path / "new" / "deep") == ["file"]


def test_a_directory_has_no_size(tmp_path: Path) -> None:
    assert storage.size(str(tmp_path)) is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        storage.write_bytes(str(tmp_path / "taken"), b"content")
    assert os.listdir(tmp_path) == ["taken"]


def test_old_content_stays_until_the_new_is_whole(tmp_path: Path) -> None:
    """A reader that has the file open still reads the old bytes: they were replaced, not written over."""
    location = tmp_path / "file"
    storage.write_bytes(str(location), b"old")
    with location.open("rb") as reader:
        storage.write_bytes(str(location), b"new")
        assert reader.read() == b"old"


def test_reading_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(str(tmp_path / "nothing"))


def test_file_uris(tmp_path: Path) -> None:
    storage.write_bytes(f"file://{tmp_path}/a/b", b"content")
    assert storage.read_bytes(str(tmp_path / "a" / "b")) == b"content"
    assert storage.size(f"file://{tmp_path}/a/b") == 7


def test_join() -> None:
    assert storage.join("s3://bucket/data/", "train", "0.parquet") == "s3://bucket/data/train/0.parquet"
    assert storage.join("/data", "manifest.json") == "/data/manifest.json"


def test_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.absolute("runs/../data") == f"{tmp_path.resolve()}/data"
    assert storage.absolute("~/data") == f"{tmp_path.resolve()}/data"
    assert storage.absolute("s3://bucket/../data") == "s3://bucket/../data"
