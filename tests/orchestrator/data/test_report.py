"""What packing says about the data, in words, as JSON and as a page."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.pack import pack, write_shards
from orchestrator.packing.report import PackingReport
from orchestrator.packing.samples import Sample, Source
from tests.orchestrator.data.images import ALPHA, PNG, WORDS, encoded, numbered, write


def packed(folder: Path, files: dict[str, bytes], **options) -> PackingReport:
    write(folder / "in", files)
    return pack(str(folder / "out"), open_source(f"folder:{folder}/in", val_frac=0.3, **options))


def pets(**more: int) -> dict[str, bytes]:
    counts = {"cat": 12, "dog": 12} | more
    return {f"{name}/{n}.png": numbered(n) for name, count in counts.items() for n in range(count)}


def test_a_healthy_data_set_has_no_warning(tmp_path: Path) -> None:
    report = packed(tmp_path, pets())
    assert report.warnings() == []
    tree = report.to_json()
    assert sum(tree["images"].values()) == 24
    assert [found["name"] for found in tree["classes"]] == ["cat", "dog"]
    assert sum(found["train"] + found["val"] for found in tree["classes"]) == 24
    assert (tree["height"], tree["width"]["median"]) == ({"least": 4, "median": 4, "most": 4}, 5)


DARK = encoded(Image.fromarray(WORDS // 16))
WARNINGS = {  # files -> a part of the warning
    "few": (pets(fox=3), r"1 classes have fewer than 5 training images: fox \([12]\)"),
    "empty": (pets() | {"fox/1.heic": b"-"}, "no image of the folders fox"),
    "broken": (pets() | {f"fox/{n}.png": b"-" for n in range(2)}, "train has no image of 1 classes: fox"),
    "common": (pets(fox=90), "% of the validation images are of fox"),
    "case": ({f"{c}/{n}.png": numbered(n) for c in ("cat", "CAT") for n in range(12)}, "differ in case"),
    "dark": (
        {f"{c}/{n}.png": DARK for c in "ab" for n in range(6)},
        rf"12 of 12 images have samples of 16 bits, none above {WORDS.max() // 16}: .* black; with `white`",
    ),
}


@pytest.mark.parametrize("kind", WARNINGS)
def test_warnings(kind: str, tmp_path: Path) -> None:
    files, part = WARNINGS[kind]
    assert re.search(part, "\n".join(packed(tmp_path, files).warnings()))


def test_transparency_and_reasons(tmp_path: Path) -> None:
    files = (
        pets()
        | {f"cat/clear{n}.png": encoded(ALPHA) for n in range(3)}
        | {"dog/a.txt": b"", "dog/b.txt": b""}
    )
    report = packed(tmp_path, files)
    assert report.pixels.transparent == 3
    ((reason, count, first),) = report.reasons()
    assert (reason, count) == (".txt is not an image by its name, in dog", 2)
    assert first.endswith("dog/a.txt")


def test_the_page(tmp_path: Path) -> None:
    """It shows images of each class, frames those of validation, and can do without a server."""
    report = packed(tmp_path, pets(**{"<b>": 6}))
    report.save(str(tmp_path / "out"))
    page = (tmp_path / "out/report.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "http" not in page.replace('lang="en"', "")
    for row in page.split("<tr>")[2:]:
        assert 4 <= row.count("data:image/jpeg;base64,") <= 8
        assert 'class="val"' in row
    assert json.loads((tmp_path / "out/report.json").read_text()) == report.to_json()


def test_validation_that_cannot_be_learned_is_refused(tmp_path: Path) -> None:
    """Also where the last training image of a class is broken, and for a `Source` made by hand."""
    folders = ("train/a", "train/b", "val/a", "val/b")
    files = {f"{folder}/{n}.png": numbered(n) for folder in folders for n in range(3)}
    with pytest.raises(UsageError, match=r"1 classes without training images \(b\)"):
        packed(tmp_path, files | {f"train/b/{n}.png": b"-" for n in range(3)})
    assert not (tmp_path / "out/manifest.json").exists()
    splits = {"train": [Sample(PNG, 0, "1")], "val": [Sample(PNG, 1, "2")]}
    with pytest.raises(UsageError, match=r"1 classes without training images \(b\)"):
        pack(str(tmp_path / "own"), Source(classes=("a", "b"), splits=splits, fetch=iter))
    assert write_shards(str(tmp_path / "own"), "ab", splits).classes == ("a", "b")


def test_the_page_has_width_by_height_and_escapes_what_is_left_out(tmp_path: Path) -> None:
    packed(tmp_path, pets() | {"cat/<b>.xml": b"-"}).save(str(tmp_path / "out"))
    page = (tmp_path / "out/report.html").read_text()
    assert "of 5 x 4 pixels (medians)" in page
    assert "cat/&lt;b&gt;.xml" in page
