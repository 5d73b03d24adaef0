"""Folders of MDSWriter, as the library itself wrote them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.data.parquet import Columns
from orchestrator.data.text import TEXT
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.record_shards import decompress
from tests.orchestrator.data.images import everything
from tests.orchestrator.data.record_sets import ROWS, WORDS, check_pixels, extracted, images, in_order


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted("mds", tmp_path_factory.mktemp("sets"))


@pytest.fixture
def plain(root: Path, tmp_path: Path) -> Path:
    """A set that the test may damage."""
    return shutil.copytree(root / "plain", tmp_path / "set")


@pytest.mark.parametrize("name", ["plain", "zstd", "gz", "br", "bz2", "snappy"])
def test_every_compression(root: Path, name: str) -> None:
    found = in_order(f"mds:{root / name}")
    assert [taken.image for taken in found] == images(root, "jpeg")
    assert [taken.label for taken in found] == [n % 3 for n in range(ROWS)]


def test_only_compressed_shards_keep_their_order(root: Path) -> None:
    """Images of others are read by their ranges, so that packing can mix them."""
    keys = {}
    for name in ("plain", "zstd"):
        source = open_source(f"mds:{root / name}")
        keys[name] = [sample.key for sample in source.splits["train"]]
        assert {sample.image.packed for sample in source.splits["train"]} == {name == "zstd"}
    assert keys["zstd"] == sorted(keys["plain"]) != keys["plain"]
    assert keys["zstd"][0] == "shard.00000.mds:0"


@pytest.mark.parametrize(
    "encoding",
    ["jpeg", "png", "bytes", "pil", "ndarray", "ndarray:uint8", "ndarray:uint8:4,5,3"],
)
def test_every_encoding_of_images(root: Path, encoding: str) -> None:
    """Pixels that were not encoded become PNG; arrays may have their channels first."""
    found = in_order(f"mds:{root}/every", Columns(column(root, encoding), column(root, "int")))
    if encoding == "jpeg":
        assert [taken.image for taken in found] == images(root, "jpeg")
    elif encoding in ("png", "bytes"):
        assert [taken.image for taken in found] == images(root, "png")
    else:
        check_pixels(found)


def column(root: Path, encoding: str) -> str:
    """Returns the name of the column of the set of all encodings."""
    shard = json.loads((root / "every/index.json").read_text())["shards"][0]
    return shard["column_names"][shard["column_encodings"].index(encoding)]


def test_every_encoding_of_labels(root: Path) -> None:
    whole = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    floats = ["float16", "float32", "float64", "str_float"]
    png = column(root, "png")
    for encoding in (*whole, *floats, "int", "str_int", "str"):
        found = in_order(f"mds:{root}/every", Columns(png, column(root, encoding)))
        assert [taken.label for taken in found] == [n % 3 for n in range(ROWS)], encoding
    assert open_source(f"mds:{root}/every", columns=Columns(png, column(root, "str"))).classes == WORDS
    for encoding in ("json", "ndarray:int64"):
        source = open_source(f"mds:{root}/every", columns=Columns(png, column(root, encoding)))
        labels = [(s.label, s.others) for part in source.splits.values() for s in part]
        assert sorted(labels) == [(c, (5,)) for c in (0, 0, 0, 1, 1, 2, 2)], encoding


def test_splits_keys_and_a_merged_index(root: Path) -> None:
    """The index above those of the splits names the same shards; test images are left out."""
    source = open_source(f"mds:{root}/splits")
    assert source.classes == WORDS
    found, bad = everything(source)
    assert bad == []
    png = images(root, "png")
    assert found == {f"{n}.png": ("train" if n < 4 else "val", n % 3, png[n]) for n in range(6)}
    one, _ = everything(open_source(f"mds:{root}/splits/train", val_frac=0.5))
    assert {*one} == {f"{n}.png" for n in range(4)}


def test_captions(root: Path) -> None:
    source = open_source(f"mds:{root}/captions", captions=True)
    samples = [sample for part in source.splits.values() for sample in part]
    texts = sorted(sample.fields[TEXT] for sample in samples)
    assert texts == [f"a cat\nnumber {n}".encode() for n in range(ROWS)]
    found, _ = everything(source)
    assert sorted(taken.image for taken in found.values()) == sorted(images(root, "jpeg"))
    assert source.classes == ("image",)


def test_on_s3(root: Path, bucket) -> None:
    for name in ("plain", "zstd"):
        for path in (root / name).iterdir():
            storage.write_bytes(bucket.uri(name, path.name), path.read_bytes())
        found = in_order(f"mds:{bucket.uri(name)}")
        assert [taken.image for taken in found] == images(root, "jpeg")


@pytest.mark.parametrize(
    ("image", "label", "message"),
    [
        ("png", "pkl", r"column as_\d+ is pkl, which is not read; pickled values are never read"),
        ("pkl", "int", r"column as_\d+ is pkl, which is not read as an image; pickled values"),
        ("jpegarray", "int", r"column as_\d+ is jpegarray, which is not read as an image"),
        (None, "int", r"has no image column \(image, .*\); it has as_0 \(jpeg\), as_1 \(png\), "),
        ("png", None, r"has no label column \(label, .*\); it has as_0 .* \(pkl\), .*; pickled values are"),
    ],
)
def test_columns_that_are_refused(root: Path, image: str | None, label: str | None, message: str) -> None:
    named = Columns(*(each and column(root, each) for each in (image, label)))
    with pytest.raises(UsageError, match=rf"every/shard\.00000\.mds.*{message}"):
        open_source(f"mds:{root}/every", columns=named)


def test_damage_is_named(plain: Path) -> None:
    index, shard = plain / "index.json", plain / "shard.00001.mds"
    tree, content = json.loads(index.read_text()), shard.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(UsageError, match=message):
            open_source(f"mds:{plain}")

    shard.write_bytes(content[:-1])
    refused(r"shard.00001.mds has 1120 bytes, and 1121 in .*/index.json: it is cut short or damaged")
    shard.write_bytes(content[:-1] + b"?")
    refused(r"shard.00001.mds cannot be read: its sha1 differs from that in index.json; copy it again")
    shard.unlink()
    refused(r"index.json names shard.00001.mds, which is not there")
    shard.write_bytes(content)
    tree["shards"][1]["raw_data"]["hashes"] = {}
    index.write_text(json.dumps(tree))
    sizes = int.from_bytes(content[4:8], "little")  # of the columns of the first sample
    for offset, value in ((0, b"\xff\xff\xff"), (0, b"\x02"), (8, b"\x01"), (sizes, b"\xff")):
        shard.write_bytes(content[:offset] + value + content[offset + len(value) :])
        refused(r"shard.00001.mds cannot be read: it .*; copy it again")


def test_compressed_damage_is_named(root: Path, tmp_path: Path) -> None:
    for name in ("zstd", "gz", "br", "bz2", "snappy"):
        folder = shutil.copytree(root / name, tmp_path / name)
        text = re.sub(r'"hashes": \{[^}]*\}', '"hashes": {}', (folder / "index.json").read_text())
        (folder / "index.json").write_text(text)
        (shard,) = folder.glob("shard.00000.mds*")
        content = shard.read_bytes()
        shard.write_bytes(content[:60] + bytes(40) + content[100:])
        with pytest.raises(UsageError, match=rf"{shard} cannot be read: .*; copy it again"):
            open_source(f"mds:{folder}")


def test_other_indexes(plain: Path) -> None:
    index = plain / "index.json"
    tree = json.loads(index.read_text())
    shard = tree["shards"][0]
    for changed, message in (
        ("{", "index.json is not an index of MDSWriter: "),
        ('{"version": 2}', r"is not an index of MDSWriter: KeyError\('shards'\)"),
        ('{"chunks": []}', "index.json: LitData wrote it: give litdata:PATH as the source"),
        ('{"shards": []}', "has no index.json that names a shard: give the folder that MDSWriter wrote"),
        ({"version": 3}, "shards of format 'mds', version 3, are not read"),
        ({"format": "json"}, "shards of format 'json', version 2, are not read"),
    ):
        text = changed if isinstance(changed, str) else json.dumps({"shards": [shard | changed]})
        index.write_text(text)
        with pytest.raises(UsageError, match=message):
            open_source(f"mds:{plain}")
    packed = {"compression": "lzma", "zip_data": shard["raw_data"] | {"basename": "shard.00000.mds.lzma"}}
    (plain / "shard.00000.mds").rename(plain / "shard.00000.mds.lzma")
    index.write_text(json.dumps({"shards": [shard | packed]}))
    with pytest.raises(UsageError, match="compression 'lzma' is not read; known: zstd, gz, br, bz2, snappy"):
        open_source(f"mds:{plain}")


def test_unpacked_beside_compressed(root: Path, tmp_path: Path) -> None:
    """Reading with streaming leaves unpacked shards beside the compressed ones, or instead of them."""
    folder = shutil.copytree(root / "zstd", tmp_path / "set")
    size = json.loads((folder / "index.json").read_text())["shards"][0]["raw_data"]["bytes"]
    packed = folder / "shard.00000.mds.zstd"
    (folder / "shard.00000.mds").write_bytes(decompress(packed.read_bytes(), "zstd", size))
    for _ in range(2):
        assert [taken.image for taken in in_order(f"mds:{folder}")] == images(root, "jpeg")
        packed.unlink(missing_ok=True)
