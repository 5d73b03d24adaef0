"""Images that two splits have in common: found if compressed, shrunk or mirrored, and no others."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images

from jobs import pack_shards
from papers.duplicates import HashedSplit, pairs
from papers.jobs import duplicates as job

Call = Callable[..., tuple[str, str]]


def hashed(*bits: int, mirrored: int = 0, digest: int = 0, small: bool = False) -> HashedSplit:
    count = len(bits)
    return HashedSplit(
        name="",
        keys=[""] * count,
        number=np.arange(count),
        bits=np.array(bits, dtype=np.uint64),
        mirrored=np.full(count, mirrored, dtype=np.uint64),
        digest=np.full(count, digest, dtype=np.uint64),
        small=np.full(count, small),
    )


def test_distances_by_hand():
    """The mirrored hash of all images is 2**64 - 1, of which the last image of the other lacks a bit."""
    one, other = hashed(0, 0b1111, mirrored=2**64 - 1), hashed(0b11, 2**64 - 2)
    assert {*map(tuple, pairs(one, other))} == {
        (0, 0, 2, False),
        (1, 0, 2, False),
        (0, 1, 1, True),
        (1, 1, 1, True),
    }
    assert list(pairs(hashed(0), hashed(2**9 - 1))) == []


def test_small_images_are_equal_to_the_pixel_or_not_at_all():
    assert [*map(tuple, pairs(hashed(0, digest=5, small=True), hashed(0, digest=5, small=True)))] == [
        (0, 0, 0, False)
    ]
    assert not [*pairs(hashed(0, digest=5, small=True), hashed(0, digest=6, small=True))]
    assert not [*pairs(hashed(0, digest=5, small=True), hashed(0, digest=5))]


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Crops of two photographs; of the first six of each, three are in val as well: compressed, shrunk,
    mirrored, and beside them one of another place.
    """
    rng, changed = np.random.default_rng(0), ("jpeg.jpg", "small.png", "mirror.png", "other.png")
    for name, pixels in zip(("a", "b"), load_sample_images().images, strict=True):
        for split in ("train", "val"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
        places = rng.integers(200, size=(7, 2)).tolist()
        crops = [Image.fromarray(pixels).crop((x, y, x + 200, y + 200)) for x, y in places]
        for number, crop in enumerate(crops[:6]):
            crop.save(tmp_path / "images" / "train" / name / f"{number}.png")
        val = [tmp_path / "images" / "val" / name / file for file in changed]
        crops[0].save(val[0], quality=50)
        crops[1].resize((64, 64)).save(val[1])
        ImageOps.mirror(crops[2]).save(val[2])
        crops[6].save(val[3])
    return tmp_path / "images"


def test_what_is_in_both_splits_is_listed_and_shown(photographs: Path, tmp_path: Path, call: Call):
    stopped, _ = call(
        pack_shards.main, "--source", f"folder:{photographs}", "--out", str(tmp_path / "packed")
    )
    assert stopped == ""
    stopped, said = call(job.main, str(tmp_path / "packed"), "--out", str(tmp_path / "out"))
    assert stopped == ""
    rows = [*csv.DictReader((tmp_path / "out" / job.CSV).open())]
    same = {(row["one_key"], row["other_key"]) for row in rows if row["verdict"] == "duplicate"}
    expected = {"0.png": "jpeg.jpg", "1.png": "small.png", "2.png": "mirror.png"}
    assert same == {(f"train/{c}/{a}", f"val/{c}/{b}") for c in "ab" for a, b in expected.items()}
    assert all((row["mirrored"] == "True") == ("mirror" in row["other_key"]) for row in rows)
    page = (tmp_path / "out" / job.PAGE).read_text()
    assert page.count("<img") == 2 * len(rows)
    assert "75.00%" in said


def test_texts_are_refused(tmp_path: Path, call: Call):
    stopped, _ = call(pack_shards.main, "--source", "python-topics", "--out", str(tmp_path / "texts"))
    assert stopped == ""
    stopped, _ = call(job.main, str(tmp_path / "texts"), "--out", str(tmp_path / "out"))
    assert "has no image that can be decoded: texts cannot be compared" in stopped


def test_a_folder_with_other_files_is_kept(tmp_path: Path, call: Call):
    (tmp_path / "thesis.txt").write_text("mine")
    stopped, _ = call(job.main, "digits", "--out", str(tmp_path))
    assert "holds other files (thesis.txt)" in stopped
