"""What lies beside images in folders, and folders without images."""

from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from tests.orchestrator.data.images import PNG, write

PETS = {f"{c}/{n}.png": PNG for c in ("cat", "dog") for n in range(4)}


@pytest.mark.parametrize(
    "side",
    [
        "@eaDir",
        "$RECYCLE.BIN",
        "System Volume Information",
        "lost+found",
        "__MACOSX",
        "#recycle",
        "Thumbnails",
    ],
)
def test_what_systems_put_beside_images(side: str, tmp_path: Path) -> None:
    write(tmp_path, PETS | {f"{side}/x.png": PNG, f"cat/{side}/0.png/small.png": PNG, "dog/Thumbs.db": b"-"})
    source = open_source(f"folder:{tmp_path}")
    assert source.classes == ("cat", "dog")
    assert sum(map(len, source.splits.values())) == 8
    assert source.notes == (f"what systems put beside images is passed over: the files in {side} (2)",)
    assert source.skipped == ()


def test_folders_that_gave_no_image_are_named(tmp_path: Path) -> None:
    write(tmp_path, PETS | {f"{c}/{n}.heic": b"-" for c in ("fox", "owl") for n in range(3)})
    (tmp_path / "hen").mkdir()
    assert open_source(f"folder:{tmp_path}").notes == ("no image of the folders fox, hen, owl",)


def test_a_list_beside_images_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"1.png": PNG, "metadata.jsonl": b"{}"})
    with pytest.raises(UsageError, match=r"no class folders .* the source is csv:.*metadata\.jsonl"):
        open_source(f"folder:{tmp_path}")


def test_validation_that_is_not_sorted(tmp_path: Path) -> None:
    """As Tiny ImageNet is unzipped."""
    write(tmp_path, {f"train/{c}/images/{n}.png": PNG for c in ("n01", "n02") for n in range(3)})
    write(tmp_path, {f"val/images/val_{n}.png": PNG for n in range(3)} | {"val/val_annotations.txt": b""})
    with pytest.raises(UsageError, match=r"training images \(images\): .* not sorted .*val_annotations\.txt"):
        open_source(f"folder:{tmp_path}")


def test_names_in_other_forms_are_one_class(tmp_path: Path) -> None:
    """A Mac writes é as e and an accent, and copies of a name have blanks at their end."""
    names = {"train/caf\u00e9/1.png", "train/tea /1.png", "val/cafe\u0301/2.png", "val/tea/2.png"}
    source = open_source(f"folder:{write(tmp_path, dict.fromkeys(names, PNG))}")
    assert source.classes == ("caf\u00e9", "tea")
