"""Samples of tars and parquet files of any origin, and data sets of such files in place."""

import gzip
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator import storage
from orchestrator.data.formats import class_names, index_external_shards, read_samples
from orchestrator.data.manifest import Format, check_shards, open_manifest
from orchestrator.data.packing import Sample, write_shards
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError
from tests.orchestrator.data.images import numbered, parquet, samples, tar

BYTES = [b"a", b"bb", b"ccc"]
NUMBERS, NAMES = [0, 1, 2], ["x", "y", "x"]
FILES = ["0.jpg", "1.jpg", "2.jpg"]
UNNAMED = ["NAME:0", "NAME:1", "NAME:2"]
LARGE = pa.array(BYTES, pa.large_binary())
HF = pa.array([{"bytes": b, "path": f"{n}.jpg"} for n, b in enumerate(BYTES)])


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    format: Format = "webdataset" if path.suffix == ".tar" else "parquet"
    table, problems = read_samples(pa.py_buffer(path.read_bytes()), format, "NAME")
    assert table["image"].type in (pa.binary(), pa.large_binary())
    assert table["label"].type in (pa.int64(), pa.string())
    assert table["key"].type == pa.string()
    return table.select(["image", "label", "key"]).to_pylist(), problems


def rows(labels: list[Any], keys: list[str]) -> list[dict[str, Any]]:
    found = zip(BYTES, labels, keys, strict=True)
    return [{"image": image, "label": label, "key": key} for image, label, key in found]


@pytest.mark.parametrize(
    ("columns", "labels", "keys"),
    [
        ({"image": BYTES, "label": NUMBERS}, NUMBERS, UNNAMED),
        ({"image": HF, "label": NUMBERS, "id": [7, 8, 9]}, NUMBERS, ["7", "8", "9"]),
        ({"jpg": BYTES, "cls": NAMES, "__key__": ["a", None, "c"]}, NAMES, ["a", "NAME:1", "c"]),
        ({"image": LARGE, "target": pa.array(NUMBERS, pa.uint8())}, NUMBERS, UNNAMED),
        ({"img": HF, "mask": BYTES, "fine_label": NUMBERS, "coarse_label": [9, 9, 9]}, NUMBERS, FILES),
        ({"image": BYTES, "label": pa.array(NAMES).dictionary_encode()}, NAMES, UNNAMED),
        ({"image": BYTES, "label": [True, False, True]}, [1, 0, 1], UNNAMED),
        ({"image": BYTES, "label": NAMES, "path": FILES}, NAMES, FILES),
    ],
)
def test_parquet(columns: dict[str, Any], labels: list[Any], keys: list[str], tmp_path: Path) -> None:
    found = read(parquet(tmp_path / "x.parquet", columns, compression="zstd", row_group_size=2))
    assert found == (rows(labels, keys), [])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": BYTES, "y": NUMBERS}, r"has no label column \(label, .* image \(binary\), y \(int64\)"),
        ({"image": [[1]], "label": [0]}, r"has no column of encoded images .* image \(list"),
        ({"image": BYTES, "label": [0.5, 1, 2]}, "column label is double: labels are whole numbers or names"),
    ],
)
def test_parquet_that_does_not_fit(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"NAME:? {message}"):
        read(parquet(tmp_path / "x.parquet", columns))


def test_rows_without_image_or_label_are_named(tmp_path: Path) -> None:
    image = pa.array(
        [{"bytes": b"a", "path": "0"}, {"bytes": None, "path": "1"}, None, {"bytes": b"d", "path": "3"}]
    )
    found, problems = read(parquet(tmp_path / "x.parquet", {"image": image, "label": [0, 1, 2, None]}))
    assert [row["key"] for row in found] == ["0"]
    assert problems == ["NAME: 1: no image", "NAME: NAME:2: no image", "NAME: 3: no label"]


def test_webdataset(tmp_path: Path) -> None:
    """Members come in any order, with folders and other members between them."""
    members = [
        ("a/b.1.jpg", b"not an image: its extension is 1.jpg"),
        ("a/0001.JPG", b"a"),
        ("a/0001.cls", b" wolf\n"),
        ("0001.json", json.dumps({"caption": "-", "class": "dog"}).encode()),
        ("a/0001.json", b'{"label": 4}'),
        ("0001.webp", b"bb"),
        ("0002.seg.png", b"-"),
        ("0002.png", b"-"),
        ("0002.jpg", b"ccc"),
        ("0002.cls.txt", b"cat"),
        ("._0002.jpg", b"-"),
        ("a/.DS_Store", b"-"),
        ("README", b"-"),
    ]
    found, problems = read(tar(tmp_path / "x.tar", members, format=1))
    assert found == rows(["wolf", "dog", "cat"], ["a/0001", "0001", "0002"])
    assert problems == ["NAME: a/b: no image (.jpg, .jpeg, .png, .webp, .bmp, .gif, .tif, .tiff, .ppm)"]
    # GNU and pax tars store long names in members of their own.
    name = f"{'folder/' * 30}ümlaut"
    for format in (1, 2):
        path = tar(tmp_path / f"{format}.tar", [(f"{name}.jpg", b"a"), (f"{name}.cls", b"0")], format=format)
        assert read(path) == ([{"image": b"a", "label": 0, "key": name}], [])


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("0.cls", b"1")], "no image"),
        ([("0.jpg", b"-")], "no label"),
        ([("0.jpg", b"-"), ("0.cls", b"")], "label '' is neither a number nor a name"),
        ([("0.jpg", b"-"), ("0.json", b'{"label": 1.5}')], "label 1.5 is neither"),
        ([("0.jpg", b"-"), ("0.json", b'["label"]')], "no label"),
        ([("0.jpg", b"-"), ("0.json", b"{")], "Expecting property name"),
    ],
)
def test_members_that_are_not_a_sample(
    members: list[tuple[str, bytes]], problem: str, tmp_path: Path
) -> None:
    found, problems = read(tar(tmp_path / "x.tar", [*members, *samples(5, 1)]))
    assert [row["key"] for row in found] == ["0005"]
    assert len(problems) == 1
    assert problems[0].startswith("NAME: 0: ")
    assert problem in problems[0]


def test_repeated_members_and_mixed_labels(tmp_path: Path) -> None:
    found, problems = read(tar(tmp_path / "x.tar", [("0.jpg", b"a"), ("0.cls", b"0"), ("0.jpg", b"bb")]))
    assert found == [{"image": b"a", "label": 0, "key": "0"}]
    assert problems == ["NAME: 0: two members .jpg, the first is taken"]
    with pytest.raises(UsageError, match="NAME: some labels are numbers, some are names"):
        read(tar(tmp_path / "x.tar", [*samples(0, 3), ("x.jpg", b"-"), ("x.cls", b"cat")]))


def test_files_that_are_cut_short(tmp_path: Path) -> None:
    """A tar is cut at and between members, a parquet file at any byte."""
    whole = tar(tmp_path / "x.tar", samples(0, 4)).read_bytes()
    end = whole.rstrip(b"\0")
    for size in range(0, len(end) // 512 * 512 + 512, 256):
        with pytest.raises(UsageError, match="NAME is not a whole uncompressed tar"):
            read_samples(pa.py_buffer(whole[:size]), "webdataset", "NAME")
    whole = parquet(tmp_path / "x.parquet", {"image": BYTES, "label": [0, 1, 2]}).read_bytes()
    for size in range(0, len(whole), 7):
        with pytest.raises(UsageError, match="NAME is not a whole parquet file"):
            read_samples(pa.py_buffer(whole[:size]), "parquet", "NAME")


def test_damaged_and_compressed_tars(tmp_path: Path) -> None:
    whole = bytearray(tar(tmp_path / "x.tar", samples(0, 4)).read_bytes())
    header = next(at for at in range(1024, len(whole), 512) if whole[at : at + 4] == b"0001")
    whole[header] ^= 1
    with pytest.raises(UsageError, match=r"NAME is not a whole uncompressed tar: .*damaged at byte"):
        read_samples(pa.py_buffer(bytes(whole)), "webdataset", "NAME")
    with pytest.raises(UsageError, match="NAME is not a whole uncompressed tar"):
        read_samples(pa.py_buffer(gzip.compress(bytes(whole))), "webdataset", "NAME")


def test_our_own_shards(tmp_path: Path) -> None:
    """They hold images verbatim, for readers of offsets."""
    mine = [Sample(bytes([n]) * 50, n % 7, f"k{n}") for n in range(200)]
    write_shards(str(tmp_path), "abcdefg", {"train": mine})
    path = tmp_path / "train" / "000000.parquet"
    found, problems = read(path)
    assert [tuple(row.values()) for row in found] == [sample[:3] for sample in mine]
    assert problems == []
    content, at = path.read_bytes(), 0
    for sample in mine:
        at = content.index(sample.image, at) + 50
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)] == [64, 64, 64, 8]
    image = metadata.row_group(0).column(0)
    assert image.statistics is None
    assert (image.compression, image.encodings) == ("UNCOMPRESSED", ("RLE", "PLAIN"))


def write_parquet(path: Path, labels: Sequence[Any], **options) -> Path:
    return parquet(path, {"image": [numbered(n) for n in range(len(labels))], "label": labels}, **options)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Two tars for training, one for validation."""
    tar(tmp_path / "theirs" / "train-0.tar", samples(0, 6, classes=3))
    tar(tmp_path / "theirs" / "train-1.tar", samples(6, 4, classes=3))
    return tar(tmp_path / "theirs" / "val-0.tar", samples(10, 2, classes=5)).parent


def test_tars_in_place(theirs: Path, tmp_path: Path) -> None:
    path = index_external_shards(str(theirs), str(tmp_path / "root"))
    assert path.startswith(f"{tmp_path}/root/data/adopted/theirs-")
    manifest = open_manifest(path)
    assert manifest.classes == ("0", "1", "2")
    rows = {split: [shard.rows for shard in shards] for split, shards in manifest.splits.items()}
    assert rows == {"train": [6, 4], "val": [2]}
    for shard in (*manifest.splits["train"], *manifest.splits["val"]):
        content = Path(shard.path).read_bytes()
        assert (shard.bytes, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert shard.format == "webdataset"


def test_a_changed_listing_is_another_data_set(theirs: Path, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    first = index_external_shards(str(theirs), root)
    assert index_external_shards(f"{theirs}/", root) == first
    tar(theirs / "train-2.tar", samples(20, 2))
    second = index_external_shards(str(theirs), root)
    assert second != first
    assert open_manifest(second).rows("train") == 12
    assert open_manifest(first).rows("train") == 10


def test_names_of_classes(tmp_path: Path) -> None:
    """Names are sorted over all files, unless the files name their numbers; all must name them alike."""
    write_parquet(tmp_path / "named" / "train" / "0.parquet", ["dog", "cat"])
    write_parquet(tmp_path / "named" / "test" / "0.parquet", ["ape", "dog", "dog"])
    manifest = open_manifest(index_external_shards(str(tmp_path / "named"), str(tmp_path)))
    assert manifest.classes == ("ape", "cat", "dog")
    (shard,) = manifest.splits["val"]
    expected = (f"{tmp_path}/named/test/0.parquet", 3, "parquet")
    assert (shard.path, shard.rows, shard.format) == expected
    assert manifest.val_majority == 2
    assert class_names(pq.read_schema(shard.path)) is None
    for n in range(3):
        write_parquet(tmp_path / "them" / f"{n}.parquet", [1, 0], names=["zebra", "ape", "none of it"])
    manifest = open_manifest(index_external_shards(str(tmp_path / "them"), str(tmp_path)))
    assert manifest.classes == ("zebra", "ape", "none of it")
    write_parquet(tmp_path / "them" / "3.parquet", [1, 0], names=["ape", "zebra"])
    with pytest.raises(UsageError, match=r"0.parquet and .*3.parquet name their labels differently"):
        index_external_shards(str(tmp_path / "them"), str(tmp_path))


def test_a_tenth_of_the_files_validates(tmp_path: Path) -> None:
    for n in range(20):
        tar(tmp_path / "them" / f"{n}.tar", samples(2 * n, 2))
    manifest = open_manifest(index_external_shards(str(tmp_path / "them"), str(tmp_path)))
    hashes = {f"{n}.tar": hashlib.sha256(f"{n}.tar".encode()).hexdigest() for n in range(20)}
    lowest = sorted(hashes, key=lambda name: hashes[name])[:2]
    assert {Path(shard.path).name for shard in manifest.splits["val"]} == {*lowest}
    assert len(manifest.splits["train"]) == 18


def test_incomplete_samples_are_left_out_and_named(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tar(theirs / "train-1.tar", [*samples(0, 3), ("lost.jpg", b"-"), ("0007.cls", b"1")])
    tar(theirs / "train-2.tar", [("0.cls", b"0")])
    with caplog.at_level(logging.INFO):
        manifest = open_manifest(index_external_shards(str(theirs), str(tmp_path)))
    assert [shard.rows for shard in manifest.splits["train"]] == [6, 3]
    assert f"{theirs}/train-1.tar: 2 samples left out: {theirs}/train-1.tar: lost: no label" in caplog.text
    assert f"{theirs}/train-0.tar: 6 samples" in caplog.messages
    images = [numbered(0), None, numbered(2), numbered(3)]
    for name in ("train-0", "val-0"):
        parquet(tmp_path / "them" / f"{name}.parquet", {"image": images, "label": [0, 1, None, 1]})
    path = index_external_shards(str(tmp_path / "them"), str(tmp_path))
    manifest = open_manifest(path)
    check_shards(path, manifest)
    rows = DataSet(path=path, manifest=manifest, cache_bytes=10**9).open("train", 0)
    assert [rows.image(n) for n in range(2)] == [numbered(0), numbered(3)]
    assert rows.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([-1, 0], "label -1 of .*1.parquet:0: classes are numbered 0 to"),
        (["a", "b"], "some labels are numbers .*, some are names"),
        (pa.array([None, None], pa.int64()), "no val sample with an image and a label"),
    ],
)
def test_labels_that_do_not_fit(labels: Sequence[Any], message: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "them" / "train" / "0.parquet", [0, 1])
    write_parquet(tmp_path / "them" / "val" / "1.parquet", labels)
    with pytest.raises(UsageError, match=message):
        index_external_shards(str(tmp_path / "them"), str(tmp_path))
    assert not (tmp_path / "data").exists()


def test_places_that_cannot_be_indexed(theirs: Path, tmp_path: Path) -> None:
    def refused(path: Path | str, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            index_external_shards(str(path), str(tmp_path))

    refused("/not/there", "no data set at /not/there: no manifest.json, and no folder")
    refused(theirs / "train-0.tar", r"no data set at .*train-0.tar: it is a file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    refused(tmp_path / "other", r"no .parquet or .tar files at .*/other; there are notes.txt")
    tar(tmp_path / "single" / "0.tar", samples(0, 4))
    refused(tmp_path / "single", "/single has one shard, none for validation: pack it with jobs/pack_sh")
    write_parquet(theirs / "train-9.parquet", [0, 1])
    refused(theirs, "holds tars and parquet files")
    (theirs / "train-9.parquet").unlink()
    (theirs / "train-1.tar").write_bytes(b"nothing")
    refused(theirs, "train-1.tar is not a whole uncompressed tar")


def test_shards_in_place_on_s3(bucket, theirs: Path) -> None:
    for path in theirs.iterdir():
        storage.write_bytes(bucket.uri("theirs", path.name), path.read_bytes())
    path = index_external_shards(bucket.uri("theirs"), bucket.uri("root"))
    assert path.startswith(bucket.uri("root", "data", "adopted", "theirs-"))
    manifest = open_manifest(path)
    assert [shard.path for shard in manifest.splits["val"]] == [bucket.uri("theirs", "val-0.tar")]
    bucket.proxy.requests.clear()
    assert index_external_shards(bucket.uri("theirs"), bucket.uri("root")) == path
    assert not any(request.startswith("GET") and ".tar" in request for request in bucket.proxy.requests)
