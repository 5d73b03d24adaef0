"""Captions of every source, images without labels, and captions that cannot be read."""

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from orchestrator.data.parquet import Columns
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.samples import Sample, Source
from orchestrator.packing.tars import index_tar
from tests.orchestrator.data.images import everything, numbered, parquet, samples, tar, write

COUNT = 8
NAMES = [f"{n:04d}" for n in range(COUNT)]


def captions(source: Source) -> dict[str, list[str]]:
    """Returns the captions of every sample by the digits of its key, and checks that its image is its own."""
    found = {}
    for part in source.splits.values():
        for sample, content in zip(part, source.fetch([s.image for s in part]), strict=True):
            number = "".join(c for c in sample.key.split(":")[-1] if c.isdigit())
            assert content == numbered(int(number)), sample
            found[number] = sample.fields["text"].decode().split("\n")
    return found


def check(source: Source, *, bad: int = 1, classes: tuple[str, ...] = ("image",)) -> None:
    """Sample n has the captions `cat n` and `dog n`; the first `bad` are left out."""
    assert source.classes == classes
    expected = {name: [f"cat {int(name)}", f"dog {int(name)}"] for name in NAMES[bad:]}
    assert {f"{int(key):04d}": found for key, found in captions(source).items()} == expected
    assert len(source.skipped) == bad


def images() -> dict[str, bytes]:
    return {f"{name}.png": numbered(int(name)) for name in NAMES}


def text(n: int) -> bytes:
    return f"cat {n}\r\n\ndog  {n}\n".encode()


BAD = pytest.mark.parametrize(
    ("broken", "reason"),
    [(b"", "has no caption"), (b" \n ", "has no caption"), (b"\xff\xfe", "not UTF-8"), (None, "no caption")],
    ids=["empty", "blank", "not UTF-8", "missing"],
)


def texts(broken: bytes | None) -> dict[str, bytes]:
    found = {f"{name}.txt": text(int(name)) for name in NAMES[1:]}
    return found if broken is None else found | {f"{NAMES[0]}.txt": broken}


@BAD
def test_folder(tmp_path: Path, broken: bytes | None, reason: str) -> None:
    """No class folder is needed, and a file of captions is not named among those that are not images."""
    source = open_source(f"folder:{write(tmp_path, images() | texts(broken))}", captions=True)
    check(source)
    assert reason in source.skipped[0]
    assert "0000.png" in source.skipped[0]


def test_folder_with_splits_and_classes(tmp_path: Path) -> None:
    files = {
        f"{'val' if int(name[:4]) < 3 else 'train'}/{'odd' if int(name[:4]) % 2 else 'even'}/{name}": content
        for name, content in (images() | texts(text(0))).items()
    }
    source = open_source(f"folder:{write(tmp_path, files)}", captions=True)
    check(source, bad=0, classes=("even", "odd"))
    assert len(source.splits["val"]) == 3
    # without being asked for, text files are nothing
    assert len(open_source(f"folder:{tmp_path}").skipped) == COUNT


@BAD
def test_tar_with_txt(tmp_path: Path, broken: bytes | None, reason: str) -> None:
    tar(tmp_path / "a.tar", sorted((images() | texts(broken)).items()))
    source = open_source(f"webdataset:{tmp_path / 'a.tar'}", captions=True, caption_lines=True)
    check(source)
    assert reason in source.skipped[0]
    with pytest.raises(UsageError, match="no label"):
        open_source(f"webdataset:{tmp_path / 'a.tar'}")


def test_tar_with_links(tmp_path: Path) -> None:
    """A symbolic link is not followed, as one to an image is not."""
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name, content in (images() | texts(None)).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("0000.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "0001.txt"
        file.addfile(link)
    source = open_source(f"webdataset:{tmp_path}", captions=True, caption_lines=True)
    check(source)
    assert ".txt is a symbolic link to 0001.txt" in source.skipped[0]


@pytest.mark.parametrize("name", ["captions", "caption", "text"])
def test_tar_with_json(tmp_path: Path, name: str) -> None:
    """Labels are kept where there are any."""
    members = [*images().items()]
    for n in range(COUNT):
        found = [f"cat\n{n}", f"dog {n}"] if n else 3
        members.append((f"{n:04d}.json", json.dumps({name: found, "label": n % 2}).encode()))
    tar(tmp_path / "a.tar", members)
    source = open_source(f"webdataset:{tmp_path}", captions=True)
    check(source, classes=("0", "1"))
    assert "its caption 3 is not text" in source.skipped[0]


def test_a_txt_counts_more_than_a_json(tmp_path: Path) -> None:
    members = images() | texts(text(0)) | {f"{name}.json": b'{"caption": "other"}' for name in NAMES}
    tar(tmp_path / "a.tar", [*members.items()])
    check(open_source(f"webdataset:{tmp_path}", captions=True, caption_lines=True), bad=0)


@pytest.mark.parametrize("as_list", [False, True], ids=["text", "list"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_parquet(tmp_path: Path, as_list: bool, compression: str) -> None:
    """A caption that is not UTF-8 does not cost the others of its file."""
    rows = [[f"cat {n}", f"dog {n}"] if as_list else f"cat {n}" for n in range(COUNT)]
    rows[0] = [] if as_list else None
    column = pa.array(rows)
    if not as_list:
        broken = pa.array([None, b"\xff", *(row.encode() for row in rows[2:])], pa.binary())
        column = pa.StringArray.from_buffers(COUNT, *broken.buffers()[1:], broken.buffers()[0])
    columns = {"image": [numbered(n) for n in range(COUNT)], "key": NAMES, "sentence": column}
    path = parquet(tmp_path / "a.parquet", columns, compression=compression)
    source = open_source(f"parquet:{path}", columns=Columns(caption="sentence"), captions=True)
    if as_list:
        check(source)
    else:
        assert source.classes == ("image",)
        assert captions(source) == {name: [f"cat {int(name)}"] for name in NAMES[2:]}
        assert [line.rpartition(": ")[2] for line in source.skipped] == [
            "it has no caption",
            "its caption is not UTF-8",
        ]
    with pytest.raises(UsageError, match=r"no caption column \(caption, captions, .*\); it has .*sentence"):
        open_source(f"parquet:{path}", captions=True)
    with pytest.raises(UsageError, match=r"no label column \(label, .*\); it has"):
        open_source(f"parquet:{path}")


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_csv(tmp_path: Path, delimiter: str) -> None:
    """Several rows of an image are several captions, in any order."""
    write(tmp_path / "images", images())
    rows = [f"images/{name}.png{delimiter}cat {int(name)}" for name in NAMES[1:]]
    rows += [f'images/{name}.png{delimiter}"dog\n{int(name)}"' for name in NAMES[1:]]
    head = f"path{delimiter}caption"
    (tmp_path / "list.csv").write_text("\n".join([head, *rows, f"images/{NAMES[0]}.png{delimiter}", ""]))
    source = open_source(f"csv:{tmp_path / 'list.csv'}", captions=True)
    check(source)
    assert "it has no caption" in source.skipped[0]
    with pytest.raises(UsageError, match=r"no label column \(label, .*\); it has path, caption"):
        open_source(f"csv:{tmp_path / 'list.csv'}")


def test_csv_with_labels_and_splits(tmp_path: Path) -> None:
    """Captions are not needed for classes; paths may be absolute, and a missing image is skipped."""
    write(tmp_path / "images", images())
    for split, names in (("train", NAMES[2:]), ("val", NAMES[:2])):
        rows = [f"{tmp_path}/images/{name}.png,{'odd' if int(name) % 2 else 'even'}" for name in names]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["filepath,label", *rows, "images/none.png,odd"]))
    source = open_source(f"csv:{tmp_path}")
    assert source.classes == ("even", "odd")
    taken, skipped = everything(source)
    assert len(taken) == COUNT
    assert {key.partition("#")[0] for key in skipped} == {"images/none.png"}


def test_csv_with_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    write(tmp_path, images())
    rows = [f"{name}.png,cat".encode() for name in NAMES[1:]] + [b"0000.png,\xff"]
    (tmp_path / "a.csv").write_bytes(b"\n".join([b"\xef\xbb\xbfimage,title", *rows]))
    source = open_source(f"csv:{tmp_path}/a.csv", captions=True)
    assert len(captions(source)) == COUNT - 1
    assert "0000.png: its caption is not UTF-8" in source.skipped[0]


def test_no_caption_at_all(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", samples(0, 4))
    with pytest.raises(
        UsageError, match=r"no sample .*no caption \(\.txt, or one of captions, caption, text"
    ):
        open_source(f"webdataset:{tmp_path / 'a.tar'}", captions=True)
    write(tmp_path / "folder", images())
    with pytest.raises(UsageError, match=r"has no images with captions; 8 files, .*no caption \(0000.txt\)"):
        open_source(f"folder:{tmp_path / 'folder'}", captions=True)
    for name in ("digits", "cluttered-digits", "torchvision:CIFAR10"):
        with pytest.raises(UsageError, match=f"{name} has no captions; digits-captions has"):
            open_source(name, captions=True)


def test_some_images_without_a_label(tmp_path: Path) -> None:
    members = images() | texts(text(0)) | {f"{name}.cls": b"3" for name in NAMES[1:]}
    tar(tmp_path / "a.tar", [*members.items()])
    source = open_source(f"webdataset:{tmp_path}", captions=True, caption_lines=True)
    check(source, bad=0)
    assert source.notes == ("0000 has no label: all images are of one class, image",)


def test_digits_are_the_same_images() -> None:
    plain, described = open_source("digits"), open_source("digits-captions")
    assert [(s.key, s.label, s.image) for s in plain.splits["val"]] == [
        (s.key, s.label, s.image) for s in described.splits["val"]
    ]
    assert described.splits == open_source("digits-captions").splits
    everywhere = {
        caption for found in described.splits["train"] for caption in found.fields["text"].split(b"\n")
    }
    assert len(everywhere) == 100
    assert {b"the digit 7", b"the digit seven"} < everywhere


OWN = """
from orchestrator import Sample
def all():
    return [Sample(image=b"x", label=0, key=str(n), fields={"text": b"a cat"}) for n in range(9)]
def some():
    return [*all(), Sample(image=b"x", label=0, key="last")]
"""


def test_own_source(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    source = open_source(f"{tmp_path}/own.py:all", captions=True)
    assert sum(map(len, source.splits.values())) == 9
    assert all(isinstance(s, Sample) and s.fields["text"] == b"a cat" for s in source.splits["train"])
    with pytest.raises(UsageError, match=r"a sample has no captions; give each fields="):
        open_source(f"{tmp_path}/own.py:some", captions=True)


def test_json_captions_that_are_a_link(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as file:
        info = tarfile.TarInfo("0001.png")
        info.size = len(numbered(1))
        file.addfile(info, io.BytesIO(numbered(1)))
        link = tarfile.TarInfo("0001.json")
        link.type, link.linkname = tarfile.SYMTYPE, "0000.json"
        file.addfile(link)
    part = index_tar(f"{tmp_path}/0.tar", captions=True)
    assert part.skipped == [f"{tmp_path}/0.tar: 0001: .json is a symbolic link to 0000.json"]
