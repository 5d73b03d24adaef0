"""Dialects of csv and jsonl, and rows that say more than one field."""

import json
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.samples import Source
from tests.orchestrator.data.images import numbered, write

ROWS = [(f"img/{n}.png", "cat" if n % 2 else "dog") for n in range(8)]


def listed(folder: Path, text: bytes, name: str = "list.csv", **options) -> Source:
    write(folder, {f"img/{n}.png": numbered(n) for n in range(8)} | {name: text})
    return open_source(f"csv:{folder}/{name}", val_frac=0.4, **options)


def named(source: Source) -> dict[str, list[str]]:
    return {
        sample.key: [source.classes[label] for label in (sample.label, *sample.others)]
        for samples in source.splits.values()
        for sample in samples
    }


@pytest.mark.parametrize("delimiter", ",;|\t")
@pytest.mark.parametrize("header", ["path,label", "Path, Label", "FILENAME ,CLASS", "\ufefffile_name,target"])
def test_headers(delimiter: str, header: str, tmp_path: Path) -> None:
    lines = [header, *(f"{path}, {label}" for path, label in ROWS)]
    text = "\r\n".join(line.replace(",", delimiter) for line in lines)
    assert named(listed(tmp_path, text.encode())) == {path: [label] for path, label in ROWS}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_encodings_and_excel(encoding: str, tmp_path: Path) -> None:
    text = "sep=;\r\npath;label\r\n" + "".join(f"{path};kät{label}\r\n" for path, label in ROWS)
    assert named(listed(tmp_path, text.encode(encoding)))["img/0.png"] == ["kätdog"]


def test_paths_of_windows(tmp_path: Path) -> None:
    text = "path,label\n" + "".join(f"{path},{label}\n".replace("/", "\\") for path, label in ROWS)
    source = listed(tmp_path, text.encode())
    assert {*source.fetch([s.image for s in source.splits["train"]])} <= {numbered(n) for n in range(8)}


def test_rows_of_an_image_are_several_labels(tmp_path: Path) -> None:
    """Three votes of 0 or 1 are no list with a 0 or 1 for each of three classes."""
    text = "path,label\n" + "".join(f"{path},{vote}\n" for path, _ in ROWS for vote in (0, 1, 1))
    assert named(listed(tmp_path, text.encode())) == {path: ["0", "1"] for path, _ in ROWS}


def test_rows_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    """An image has one list of 0 and 1, and one split."""
    lists = "path,label\n" + "".join(f'{path},"[0, 1, 1]"\n' for path, _ in ROWS)
    source = listed(tmp_path, f'{lists}img/1.png,"[1, 0, 0]"\nimg/2.png,"[0, 1, 1]"\n'.encode())
    assert named(source)["img/1.png"] == ["1", "2"]
    (line,) = source.skipped
    assert "line 10: another list of 0 and 1 for img/1.png" in line
    rows = "path,label,split\n" + "".join(f"{path},{label},train\n" for path, label in ROWS)
    text = f"{rows}img/1.png,bird,val\n".encode()
    with pytest.raises(UsageError, match=r"img/1.png is in 'train' and in 'val', in column split"):
        listed(tmp_path, text)
    assert named(listed(tmp_path, text, ignore_split_names=True))["img/1.png"] == ["cat", "bird"]
    # One split in two spellings, and a column of another meaning.
    for header, one, other in (("split", "train", "Training"), ("type", "round", "square")):
        val = "val" if header == "split" else "oval"
        rows = "".join(f"{path},{label},{val if n < 3 else one}\n" for n, (path, label) in enumerate(ROWS))
        source = listed(tmp_path, f"path,label,{header}\n{rows}img/5.png,bird,{other}\n".encode())
        assert named(source)["img/5.png"] == ["cat", "bird"]


def test_rows_with_more_fields_are_named(tmp_path: Path) -> None:
    text = "path,label\n" + "".join(f"{path},{label}\n" for path, label in ROWS) + "img/1.png,crane, bird\n"
    source = listed(tmp_path, text.encode())
    assert "crane" not in source.classes
    (line,) = source.skipped
    assert line.endswith(
        "line 10: 3 fields, but the header has 2: put quotes around a text with a separator in it"
    )


def test_objects(tmp_path: Path) -> None:
    """As `datasets` has them beside a folder of images."""
    rows = [{"file_name": path, "label": [label, "pet"], "text": f"a {label}"} for path, label in ROWS]
    text = "\n".join(json.dumps(row) for row in rows).encode()
    source = listed(tmp_path, text, "metadata.jsonl", captions=True)
    assert named(source) == {path: [label, "pet"] for path, label in ROWS}
    assert source.splits["val"][0].fields["text"] in (b"a cat", b"a dog")
    for text, message in ((b"[1]", "an object is wanted"), (b"{", "line 1: Expecting")):
        with pytest.raises(UsageError, match=message):
            listed(tmp_path, text, "metadata.jsonl")


def test_a_label_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    text = "path,label\n" + "".join(f"{path},café{label}\n" for path, label in ROWS)
    with pytest.raises(UsageError, match="line 2: label 'cafédog' is not UTF-8: save the file as UTF-8"):
        listed(tmp_path, text.encode("cp1252"))


def test_lists_without_images_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {"classes.csv": b"number,name\n0,cat\n"})
    listed(tmp_path, ("path,label\n" + "".join(f"{path},{label}\n" for path, label in ROWS)).encode())
    source = open_source(f"csv:{tmp_path}", val_frac=0.4)
    assert "classes.csv has no path column" in source.skipped[0]
    assert len(named(source)) == 8
