"""`jobs/pack_shards.py` as a user runs it, alone and on a cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from jobs import pack_shards
from orchestrator.data.images import decode
from orchestrator.data.manifest import open_manifest
from orchestrator.data.text import read_tokenizer
from orchestrator.packing import open_source, pack as packing
from orchestrator.packing.pack import pack
from tests.orchestrator.data.images import JPEG, PNG, files, numbered, parquet, samples, tar, write

ROOT = Path(__file__).parents[2]
Call = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def call(call: Callable[..., tuple[str, str]]) -> Call:
    """``call("--source", "digits", ..)``: what it exits with, and the lines after the first."""

    def run_here(*args: str) -> tuple[str, list[str]]:
        stopped, said = call(pack_shards.main, *args)
        return stopped, said.splitlines()[1:]

    return run_here


def test_digits_need_no_cluster(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs._cli.connect", None)
    error, lines = call("--source", "digits", "--out", str(tmp_path), "--val-frac", "0.5")
    assert error == ""
    train, val, *classes, end = lines
    assert classes[3] == "class 3, 3: 94 train and 89 val"
    assert open_manifest(str(tmp_path)).rows("val") == 907
    assert train.startswith("train: 890 images, 0.")
    assert train.endswith(" MB in 2 shards")
    assert val.startswith("val: 907 images, 0.")
    assert end == f"{tmp_path}: 890 training and 907 validation images, 10 classes, 0 skipped"


def test_transparency_is_named_and_can_be_put_on_a_background(call: Call, tmp_path: Path) -> None:
    """The pixel is blue under full transparency, which training would show without a background."""
    glass, opaque = BytesIO(), BytesIO()
    Image.new("RGBA", (8, 8), (0, 0, 255, 0)).save(glass, "PNG")
    Image.new("RGBA", (8, 8), (0, 0, 255, 255)).save(opaque, "PNG")
    pictures = {f"{c}/{n}.png": glass.getvalue() for c in "ab" for n in range(4)}
    write(tmp_path / "in", pictures | {"a/opaque.png": opaque.getvalue()})
    source = ("--source", f"folder:{tmp_path / 'in'}", "--out", str(tmp_path / "out"), "--val-frac", "0.5")
    error, lines = call(*source)
    assert error == ""
    assert (
        "warning: 8 of 9 images have transparency and are trained on without their alpha: `background` white"
        " puts them on a colour" in lines
    )
    assert corners(tmp_path / "out") == {(0, 0, 255)}
    _, lines = call(*source, "--fresh", "--background", "white")
    assert "8 of 9 images have transparency and were put on white" in lines
    assert corners(tmp_path / "out") == {(0, 0, 255), (255, 255, 255)}
    error, _ = call(*source, "--fresh", "--background", "whyte")
    assert "unknown colour 'whyte'" in str(error)


def corners(data_set: Path) -> set[tuple[int, ...]]:
    """Returns the first pixels of all images as training sees them."""
    tables = [pq.read_table(path) for path in data_set.glob("*/*.parquet")]
    return {tuple(decode(x)[:, 0, 0].tolist()) for table in tables for x in table["image"].to_pylist()}


def test_several_labels_per_image(call: Call, tmp_path: Path) -> None:
    """The last line says so; an image without a label is named."""
    columns = {"image": [numbered(n) for n in range(6)], "label": [[0, 1], [1], [0], [1, 2, 0], [0], []]}
    source = f"parquet:{parquet(tmp_path / 'x.parquet', columns)}"
    error, lines = call("--source", source, "--out", str(tmp_path / "out"), "--val-frac", "0.5")
    assert error == ""
    assert f"skipped {tmp_path}/x.parquet: x.parquet:5: no label" in lines
    assert lines[-1].endswith(" validation images, 3 classes, up to 3 labels per image, 1 skipped")


@pytest.mark.slow  # a Ray of its own
def test_on_a_cluster(cluster: None, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as in one process; what is skipped is counted, shown in part, and kept."""
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 10)
    good = {f"{c}/{n}.png": numbered(60 * c + n) for c in range(2) for n in range(60)}
    bad = {f"1/{n}.jpg": JPEG[:100] for n in range(30)}
    source = f"folder:{write(tmp_path / 'images', good | bad)}"
    error, lines = call("--source", source, "--out", str(tmp_path / "out"))
    assert error == ""
    assert sum(line.startswith("skipped 1/") for line in lines) == 20
    assert ".. and 10 more, see skipped.txt" in lines
    assert lines[-1].endswith(" validation images, 2 classes, 30 skipped")
    pack(str(tmp_path / "here"), open_source(source))
    assert files(tmp_path / "out") == files(tmp_path / "here")
    assert len(files(tmp_path / "here")) > 8


@pytest.mark.smoke
def test_a_failure_on_the_cluster_is_one_line(
    cluster: None, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(9):
        tar(tmp_path / "in" / f"{n}.tar", samples(10 * n, 10))
    (tmp_path / "in" / "1.tar").write_bytes(b"nothing")
    error, lines = call("--source", f"webdataset:{tmp_path}/in", "--out", str(tmp_path / "out"))
    assert error.startswith(f"error: {tmp_path}/in/1.tar is not a whole uncompressed tar")
    assert lines == []
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 4)
    write(tmp_path / "images", {f"{c}/{n}.png": PNG for c in range(2) for n in range(20)})
    (tmp_path / "file").touch()
    error, _ = call("--source", f"folder:{tmp_path}/images", "--out", str(tmp_path / "file" / "out"))
    assert error.startswith("error: ")
    assert "Not a directory" in error


def test_warnings(call: Call, tmp_path: Path) -> None:
    """Classes without a valid image, and more bad files than good ones."""
    write(tmp_path / "images", {f"{c}/{n}.png": PNG for c in "ab" for n in range(4)})
    write(tmp_path / "images", {f"c/{n}.png": b"-" for n in range(9)})
    error, lines = call("--source", f"folder:{tmp_path}/images", "--out", str(tmp_path / "out"))
    assert error == ""
    assert "warning: train has no image of 1 classes: c" in lines
    assert "warning: more than half of all files were skipped, see skipped.txt" in lines


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "imagenet",
            "error: unknown source 'imagenet'; known: cluttered-digits, csv:PATH, digits,",
        ),
        ("folder:/not/there", "error: no folder /not/there"),
        ("torchvision:Mnist", "error: torchvision.datasets has no 'Mnist'; it has "),
        ("torchvision:CIFAR10", "error: torchvision:CIFAR10 below "),
    ],
)
def test_mistakes_are_one_line(source: str, message: str, call: Call, tmp_path: Path) -> None:
    error, lines = call("--source", source, "--out", str(tmp_path / "out"), "--root", str(tmp_path))
    assert error.startswith(message)
    assert "\n" not in error
    assert lines == []


def test_never_into_the_source(call: Call, tmp_path: Path) -> None:
    """`--fresh` would delete what looks like shards of ours."""
    for source, out in ((tmp_path, tmp_path), (tmp_path, tmp_path / "out"), (tmp_path / "train", tmp_path)):
        error, _ = call("--source", f"parquet:{source}", "--out", str(out), "--fresh")
        assert error == f"error: --out {out} and the source {source} lie in each other: choose another place"


def test_overwriting_is_asked_for(call: Call, tmp_path: Path) -> None:
    pack(str(tmp_path), open_source("digits"))
    error, _ = call("--source", "folder:/not/there", "--out", str(tmp_path))
    assert "already holds a data set: choose another place, or use --fresh" in error
    error, _ = call("--source", "folder:/not/there", "--out", str(tmp_path), "--fresh")
    assert error == "error: no folder /not/there"
    assert open_manifest(str(tmp_path)).rows("train")  # a mistake costs nothing
    assert call("--source", "digits", "--out", str(tmp_path), "--fresh")[0] == ""


def test_an_out_that_cannot_be_written_to(call: Call, tmp_path: Path) -> None:
    """It is named before the source is listed."""
    error, lines = call("--source", f"folder:{tmp_path}/none", "--out", "/proc/nope")
    assert error == "error: --out /proc/nope cannot be written to: No such file or directory"
    assert lines == []


def test_files_that_are_not_images_are_one_line(call: Call, tmp_path: Path) -> None:
    """Other reasons have a line each."""
    write(tmp_path / "images", {f"{c}/{n}.png": PNG for c in "ab" for n in range(4)})
    write(tmp_path / "images", {f"a/{n}.ogg": b"-" for n in range(1001)})
    write(tmp_path / "images", {"a/note.txt": b"-", "b/note.TXT": b"-", "top.png": PNG, "b/bad.jpg": b"-"})
    error, lines = call("--source", f"folder:{tmp_path}/images", "--out", str(tmp_path / "out"))
    assert error == ""
    assert lines[0] == "skipped 1,003 files that are not images: 1,001 .ogg, 2 .txt"
    assert lines[1] == f"skipped {tmp_path}/images/top.png: in no class folder"
    assert lines[2].startswith("skipped b/bad.jpg: not an")
    assert lines[3].startswith("train: ")
    skipped = (tmp_path / "out/skipped.txt").read_text().splitlines()
    assert len(skipped) == 1005
    assert f"{tmp_path}/images/a/note.txt: is not an image by its name" in skipped


@pytest.mark.slow
def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C while it packs: not exit code 0, and nothing that could be taken for a data set."""
    script = "import os; from orchestrator.packing import pack as packing; packing.ROWS_PER_SHARD = 4"
    write(tmp_path / "images", {f"{c}/{n}.png": numbered(n) for c in range(2) for n in range(4000)})
    command = f"{script}; from jobs.pack_shards import main; main()"
    job = subprocess.Popen(
        [sys.executable, "-c", command, "--source", f"folder:{tmp_path}/images", "--out", f"{tmp_path}/out"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 120
        while not list((tmp_path / "out").rglob("*.parquet")) and time.monotonic() < until:
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        _, error = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 130
    assert error.splitlines()[-1].startswith("Interrupted.")
    assert list((tmp_path / "out").rglob("*.parquet"))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_source_of_ones_own(call: Call, tmp_path: Path) -> None:
    own, out = ROOT / "tests/own/stripes.py", str(tmp_path / "shards")
    error, lines = call("--source", f"{own}:make", "--out", out)
    assert error == ""
    manifest = open_manifest(out)
    assert (sorted(manifest.classes), manifest.rows("train") + manifest.rows("val")) == (
        ["lying", "standing"],
        200,
    )
    assert lines[-1].endswith("2 classes, 0 skipped")


@pytest.mark.smoke
@pytest.mark.usefixtures("cluster")
def test_a_source_of_ones_own_reads_on_other_nodes(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions are sent to the processes that pack."""
    monkeypatch.setattr("orchestrator.packing.pack.ROWS_PER_SHARD", 8)
    own, out = ROOT / "tests/own/stripes.py", str(tmp_path / "shards")
    assert call("--source", f"{own}:placed", "--out", out)[0] == ""
    assert len(open_manifest(out).splits["train"]) == 20


def test_sources_of_ones_own_that_are_refused(call: Call, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", ["--out", str(tmp_path / "out")]
    file.write_text("def make():\n    return [1]\n\ndef fail():\n    raise KeyError('x')\n")
    for source, said in {
        f"{file}:make": f"error: {file}:make must return a Source, or samples: ",
        f"{file}:fail": f"error: {file}:fail, line 5: KeyError: 'x'",
        f"{file}:none": f"error: {file} has no function 'none'",
        f"{tmp_path}/no.py:make": f"error: no file {tmp_path}/no.py: a function of your own is ",
    }.items():
        assert call("--source", source, *out)[0].startswith(said)


def test_captions_are_described_before_anything_trains(call: Call, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    error, lines = call("--source", "digits-captions", "--out", out, "--tokenizer", "bpe:600")
    assert error == ""
    assert lines[:4] == [
        "captions: 7,150 of 1,430 training images, at most 5 of an image; 100 are distinct",
        "tokens of a caption, with its end: median 4, 95 % at most 7, longest 7; 0.0% are cut at 16",
        "tokenizer: bpe, 585 ids; it does not know 0.0% of the words of validation",
        "a batch of 256 images has about 92 distinct captions",
    ]
    assert lines[4].startswith("warning: equal captions of a batch count as wrong pairs")
    assert "ln 256 = 5.55 (softmax) or about 6.55 (sigmoid)" in lines[4]
    assert open_manifest(out).fields == {"text": "bytes"}
    assert read_tokenizer(out).size() == 585


def test_captions_that_all_differ_need_no_warning(call: Call, tmp_path: Path) -> None:
    members = {f"{n}.png": numbered(n) for n in range(40)} | {f"{n}.txt": b"%d" % n for n in range(40)}
    write(tmp_path / "in", members)
    error, lines = call("--source", f"folder:{tmp_path / 'in'}", "--captions", "--out", str(tmp_path / "out"))
    assert error == ""
    assert "it does not know 100.0% of the words of validation" in lines[2]
    assert not [line for line in lines if "warning" in line]
    assert ", 1 classes, 0 skipped" in lines[-1]


def test_a_tokenizer_needs_captions(call: Call, tmp_path: Path) -> None:
    error, _ = call("--source", "digits", "--out", str(tmp_path / "out"), "--tokenizer", "words")
    assert "--tokenizer is that of captions: give --captions too" in error
