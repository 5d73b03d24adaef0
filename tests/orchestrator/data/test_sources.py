"""Folders of images of every kind that people have, and files that are none."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from orchestrator import storage
from orchestrator.data.decode import BadImage, decode
from orchestrator.data.sources import open_source
from orchestrator.errors import UsageError
from tests.orchestrator.data.images import (
    CONVERTED,
    JPEG,
    KEPT,
    PNG,
    everything,
    numbered,
    pixels,
    raw_png,
    write,
)


def many(classes: int, images: int) -> dict[str, bytes]:
    return {f"{c}/{n}.png": numbered(n) for c in range(classes) for n in range(images)}


def test_every_kind_of_image_is_stored_as_training_sees_it(tmp_path: Path) -> None:
    """What training decodes stays as it is; the rest becomes PNG of the same pixels."""
    files = {f"cat/{name}": content for name, content in (KEPT | CONVERTED).items()}
    source = open_source(f"folder:{write(tmp_path, {**files, 'dog/a/b/1.png': PNG, 'dog/2.png': PNG})}")
    found, bad = everything(source)
    assert source.skipped == ()
    assert bad == []
    assert {*found} == {*files, "dog/a/b/1.png", "dog/2.png"}
    for key, content in files.items():
        np.testing.assert_array_equal(pixels(found[key].image), pixels(content), err_msg=key)
        assert (found[key].image == content) == (key.removeprefix("cat/") in KEPT), key
        assert found[key].image == content or found[key].image.startswith(b"\x89PNG"), key


def test_files_that_are_no_images_are_named(tmp_path: Path) -> None:
    bomb = raw_png(width=60_000, height=60_000, bits=8, rows=b"")
    bad = {
        "cat/cut.jpg": JPEG[: len(JPEG) // 2],
        "dog/empty.png": b"",
        "dog/bomb.png": bomb,
        "dog/x": b"text",
    }
    by_name = {
        "cat/notes.txt": b"no image",
        "cat/labels.xml": b"<a/>",
        "loose.png": PNG,
        "dog/LICENSE.md": b"",
    }
    hidden = {
        f"cat/{name}": b"?" for name in (".DS_Store", "._1.png", "Thumbs.db", ".cache/1.png", "desktop.ini")
    }
    good = {f"{c}/{n}.png": PNG for c in ("cat", "dog") for n in range(4)}
    source = open_source(f"folder:{write(tmp_path, bad | by_name | hidden | good)}")
    found, skipped = everything(source)
    assert {*found} == {*good}
    assert {*skipped} == {*bad}
    assert sorted(line.split(": ")[0] for line in source.skipped) == sorted(
        f"{tmp_path}/{n}" for n in by_name
    )


def test_links(tmp_path: Path) -> None:
    """Followed, to files and folders; not in a circle; one that leads nowhere is named."""
    store = write(
        tmp_path / "store", {"1.png": numbered(1), "more/2.png": numbered(2), "more/3.png": numbered(3)}
    )
    folder = write(tmp_path / "set", {"dog/4.png": numbered(4), "dog/5.png": numbered(5), "cat/6.png": PNG})
    for link, target in {
        "cat/1.png": store / "1.png",
        "cat/more": store / "more",
        "cat/gone.png": store / "gone.png",
        "cat/circle": folder,
    }.items():
        (folder / link).symlink_to(target)
    found, skipped = everything(open_source(f"folder:{folder}"))
    pets = ["cat/1.png", "cat/6.png", "cat/more/2.png", "cat/more/3.png", "dog/4.png", "dog/5.png"]
    assert sorted(found) == pets
    assert skipped == ["cat/gone.png"]


def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, many(2, 4))
    (folder / "0" / "2.png").chmod(0)
    if os.access(folder / "0" / "2.png", os.R_OK):
        pytest.skip("root may read all")
    _, skipped = everything(open_source(f"folder:{folder}"))
    assert skipped == ["0/2.png"]


@pytest.mark.parametrize("count", [50, pytest.param(300, marks=pytest.mark.slow)])
def test_what_is_packed_can_be_decoded(count: int, tmp_path: Path) -> None:
    """Damaged files, none of which may stop a training run."""
    rng = np.random.default_rng(0)
    files = {}
    for i in range(count):
        name, content = list((KEPT | CONVERTED).items())[i % len(KEPT | CONVERTED)]
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.integers(min(len(damaged), 60))] = rng.integers(256)
        files[f"{i % 2}/{i}-{name}"] = bytes(damaged)
    found, skipped = everything(open_source(f"folder:{write(tmp_path, files)}"))
    assert len(found) + len(skipped) == count
    assert len(found) > count / 6
    assert len(skipped) > count / 6
    for taken in found.values():
        assert decode(taken.image).shape[0] == 3


@pytest.mark.parametrize("val", ["val", "valid", "validation", "test"])
def test_own_split(val: str, tmp_path: Path) -> None:
    """A class may be missing on one side; labels count the classes of both."""
    files = ("train/b/1.png", "train/a/x/1.png", f"{val}/b/2.png", f"{val}/c/3.png", "extra/a/1.png")
    source = open_source(f"folder:{write(tmp_path, dict.fromkeys(files, PNG))}")
    assert source.classes == ("a", "b", "c")
    found, _ = everything(source)
    assert {key: taken[:2] for key, taken in found.items()} == {
        "train/b/1.png": ("train", 1),
        "train/a/x/1.png": ("train", 0),
        f"{val}/b/2.png": ("val", 1),
        f"{val}/c/3.png": ("val", 2),
    }
    assert source.skipped == (
        f"{tmp_path}/extra/a/1.png: neither in train nor in a folder of validation images",
    )


def test_test_images_are_kept_for_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [f"{split}/{c}/{n}.png" for split in ("train", "valid", "test") for c in "ab" for n in range(2)]
    found, _ = everything(open_source(f"folder:{write(tmp_path, dict.fromkeys(files, PNG))}"))
    assert sorted(found) == sorted(name for name in files if not name.startswith("test"))
    assert "validation is valid; left out: test" in caplog.text


def test_a_class_named_train(tmp_path: Path) -> None:
    names = [f"{c}/{n}.png" for c in ("bus", "train") for n in range(4)]
    assert open_source(f"folder:{write(tmp_path, dict.fromkeys(names, PNG))}").classes == ("bus", "train")


def test_train_alone_is_split(tmp_path: Path) -> None:
    found, _ = everything(
        open_source(f"folder:{write(tmp_path / 'set', many(2, 30)).rename(tmp_path / 'train')}")
    )
    inside, _ = everything(open_source(f"folder:{tmp_path}"))
    assert len(found) == len(inside) == 60
    assert Counter(taken.split for taken in inside.values())["val"] > 2


def test_split_by_key_is_stable(tmp_path: Path) -> None:
    """A sample keeps its side when others come; a fifth is validation."""
    write(tmp_path, {f"{n % 2}/{n:03d}.png": PNG for n in range(0, 200)})
    before, _ = everything(open_source(f"folder:{tmp_path}"))
    write(tmp_path, {f"{n % 2}/{n:03d}.png": PNG for n in range(200, 400)})
    after, _ = everything(open_source(f"folder:{tmp_path}"))
    assert len(after) == 400
    assert all(after[key].split == taken.split for key, taken in before.items())
    assert 55 < sum(taken.split == "val" for taken in after.values()) < 105


@pytest.mark.parametrize("val_frac", [0.01, 0.2, 0.99])
def test_a_class_of_two_has_one_on_either_side(val_frac: float, tmp_path: Path) -> None:
    write(tmp_path, {**many(20, 2), "single/1.png": PNG})
    found, _ = everything(open_source(f"folder:{tmp_path}", val_frac=val_frac))
    count = Counter(
        (taken.split, taken.label) for key, taken in found.items() if not key.startswith("single")
    )
    assert count == Counter({(split, label): 1 for split in ("train", "val") for label in range(20)})


def test_val_frac(tmp_path: Path) -> None:
    write(tmp_path, many(2, 300))
    found, _ = everything(open_source(f"folder:{tmp_path}", val_frac=0.5))
    assert 250 < sum(taken.split == "val" for taken in found.values()) < 350
    for wrong in (0, 1, -0.1, float("nan")):
        with pytest.raises(UsageError, match=r"--val-frac .* must lie between 0 and 1"):
            open_source(f"folder:{tmp_path}", val_frac=wrong)


def test_every_part_of_the_order_holds_all_classes(tmp_path: Path) -> None:
    write(tmp_path, many(4, 60))
    samples = open_source(f"folder:{tmp_path}").splits["train"]
    for first in range(0, 180, 20):
        assert {sample.label for sample in samples[first : first + 20]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no files below"),
        (
            ["image.png"],
            "has no class folders with images; 1 files, the first: .*image.png: in no class folder",
        ),
        (["cat/1.txt"], "has no class folders with images.*is not an image by its name"),
        (["cat/1.png"], "only one class .cat."),
        (["train/1.png", "val/1.png"], "has no class folders with images"),
        (["cat/1.png", "dog/1.png"], "none of the 2 images is for (train|val)"),
    ],
)
def test_folders_of_another_make(files: list[str], message: str, tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(files, PNG))
    with pytest.raises(UsageError, match=message):
        open_source(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagenet", "unknown source 'imagenet'; known: digits, folder:PATH, webdataset:PATH"),
        ("folder:", "unknown source 'folder:'"),
        ("folder:/not/there", "no folder /not/there"),
        ("webdataset:/not/there", "no folder /not/there"),
        ("parquet:/not/there", "no folder /not/there"),
        ("csv:/not/there.csv", "no file /not/there.csv"),
        ("jsonl:/not/there", "no file /not/there"),
    ],
)
def test_unknown_sources(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(name)


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path, {"cat/\udcff.png": PNG})
    with pytest.raises(UsageError, match="is not UTF-8: rename it"):
        open_source(f"folder:{tmp_path}")


def test_on_s3(bucket) -> None:
    for name, content in many(2, 5).items():
        storage.write_bytes(bucket.uri("set", name), content)
    storage.write_bytes(bucket.uri("set", "0", ".hidden.png"), PNG)
    source = open_source(f"folder:{bucket.uri('set')}")
    found, skipped = everything(source)
    assert {key: taken.image for key, taken in found.items()} == many(2, 5)
    assert skipped == []
    with pytest.raises(UsageError, match="no files below s3://"):
        open_source(f"folder:{bucket.uri('nothing')}")
    with bucket.failing("busy"), pytest.raises(OSError, match="503"):
        everything(source)


def test_a_pipe_is_no_image_and_nobody_waits_for_it(tmp_path: Path) -> None:
    write(tmp_path / "a", {"cat/fine.png": PNG, "dog/fine.png": PNG})
    os.mkfifo(tmp_path / "a" / "cat" / "pipe.png")
    source = open_source(f"folder:{tmp_path / 'a'}")
    fetched = [
        image for samples in source.splits.values() for image in source.fetch([s.image for s in samples])
    ]
    assert sorted(str(image) for image in fetched if isinstance(image, BadImage)) == ["no regular file"]


def test_an_empty_class_folder_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a", {"cat/fine.png": PNG, "dog/deep/fine.png": PNG})
    (tmp_path / "a" / "emu").mkdir()
    assert open_source(f"folder:{tmp_path / 'a'}").classes == ("cat", "dog")
    assert [record.message for record in caplog.records] == [f"{tmp_path}/a/emu has no files: it is no class"]
