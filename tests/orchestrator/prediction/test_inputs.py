"""Which images there are, and how they are cut: every one once, in an order that does not change."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.errors import UsageError
from orchestrator.prediction.inputs import open_inputs
from tests.parts import png

CACHE = 10**9


def keys(inputs, size):
    return [key for part in inputs.parts(size) for key, _ in part.images()]


@pytest.fixture
def folder(tmp_path):
    """Seven images, one deeper, and what is none."""
    for name in ("b.png", "a.png", "deep/c.PNG", "d d.jpg", "é.png", "no extension", "#1.webp"):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(np.full((8, 8), len(name))))
    for name in ("notes.txt", ".hidden.png", "deep/.git/x.png"):
        (tmp_path / "folder" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(b"text")
    return tmp_path / "folder"


def test_files_below_a_folder(folder, caplog):
    caplog.set_level("INFO", logger="orchestrator")
    inputs = open_inputs(str(folder), None, cache_bytes=0)
    expected = ["#1.webp", "a.png", "b.png", "d d.jpg", "deep/c.PNG", "no extension", "é.png"]
    assert inputs.count == 7
    for size in (1, 3, 7, 100):
        assert keys(inputs, size) == expected
        assert [part.count() for part in inputs.parts(size)][:-1] == [size] * ((7 - 1) // size)
    assert "left out 1 files that are not images by their names: notes.txt" in caplog.text
    ((_, encoded),) = inputs.parts(1)[1].images()
    assert encoded == (folder / "a.png").read_bytes()


def test_a_file_that_has_gone_is_bad_and_not_the_end(folder):
    inputs = open_inputs(str(folder), None, cache_bytes=0)
    (folder / "b.png").unlink()
    found = dict(next(iter(inputs.parts(100))).images())
    assert str(found["b.png"]) == "no such file"
    assert sum(isinstance(image, BadImage) for image in found.values()) == 1


def test_the_digest_is_of_names_and_sizes(folder):
    before = open_inputs(str(folder), None, cache_bytes=0).sha256
    (folder / "notes.txt").write_bytes(b"other text")
    assert open_inputs(str(folder), None, cache_bytes=0).sha256 == before
    (folder / "a.png").rename(folder / "z.png")
    renamed = open_inputs(str(folder), None, cache_bytes=0).sha256
    (folder / "z.png").write_bytes(b"longer or shorter")
    assert len({before, renamed, open_inputs(str(folder), None, cache_bytes=0).sha256}) == 3


@pytest.mark.parametrize("size", [1, 3, 4, 5, 100])
def test_rows_of_shards(size, pack_greys):
    """20 and 7 images in shards of 4: parts cut across shards, never across splits; parts travel as bytes."""
    path, _ = pack_greys(train=20, val=7)
    inputs = open_inputs(path, None, cache_bytes=CACHE)
    assert inputs.count == 27
    parts = [pickle.loads(pickle.dumps(part)) for part in inputs.parts(size)]
    assert [key for part in parts for key, _ in part.images()] == [f"grey-{n}" for n in range(27)]
    assert sum(part.count() for part in parts) == 27
    assert [part.count() for part in parts if part.split == "val"][-1] == 7 % size or size
    assert keys(open_inputs(path, "val", cache_bytes=CACHE), size) == [f"grey-{n}" for n in range(20, 27)]


def test_of_an_s3_bucket(bucket, pack_greys):
    for name in ("b.png", "deep/a.png", "readme.md"):
        storage.write_bytes(bucket.uri("images", name), png(np.zeros((8, 8))))
    assert keys(open_inputs(bucket.uri("images/"), None, cache_bytes=0), 1) == ["b.png", "deep/a.png"]
    path, manifest = pack_greys(train=4, val=3)
    for name in storage.files(path):
        storage.write_bytes(bucket.uri("shards", name), storage.read_bytes(storage.join(path, name)))
    inputs = open_inputs(bucket.uri("shards"), None, cache_bytes=CACHE)
    assert keys(inputs, 3) == [f"grey-{n}" for n in range(7)]
    assert inputs == replace(open_inputs(path, None, cache_bytes=CACHE), location=bucket.uri("shards"))
    assert inputs.sha256 == manifest.digest()


def test_where_there_are_no_images(tmp_path):
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/0.tar").write_bytes(b"")
    for place, split, message in [
        ("nothing", None, "no folder .*nothing"),
        ("tars", None, r"no images below .*tars, but 1 other files, such as 0\.tar; shards need a manifest"),
        ("tars", "val", r"--split val: .*tars has no manifest\.json"),
    ]:
        with pytest.raises(UsageError, match=message):
            open_inputs(str(tmp_path / place), split, cache_bytes=0)
