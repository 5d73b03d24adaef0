"""Folders of LitData, as the library itself wrote them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from orchestrator import storage
from orchestrator.data.parquet import Columns
from orchestrator.data.text import TEXT
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.litdata import DECODERS
from orchestrator.packing.record_shards import decompress
from tests.orchestrator.data.images import everything
from tests.orchestrator.data.record_sets import ROWS, WORDS, check_pixels, extracted, images, in_order

LABELS = [n % 3 for n in range(ROWS)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted("litdata", tmp_path_factory.mktemp("sets"))


@pytest.mark.parametrize("name", ["plain", "batch", "chunk", "sample"])
def test_every_compression(root: Path, name: str) -> None:
    found = in_order(f"litdata:{root / name}")
    assert [taken.image for taken in found] == images(root, "jpeg")
    assert [taken.label for taken in found] == LABELS
    source = open_source(f"litdata:{root / name}")
    assert {sample.image.packed for sample in source.splits["train"]} == {name != "plain"}


@pytest.mark.parametrize("name", ["arrow", "arrow_zstd", "hub"])
def test_arrow_files_behind_chunks(root: Path, name: str) -> None:
    """Dictionaries of bytes, numbers, texts and lists lie in them, compressed if texts are most of it."""
    source = open_source(f"litdata:{root / name}")
    found, bad = everything(source)
    assert (source.skipped, bad) == ((), [])
    by_key = [found[key] for key in sorted(found)]
    assert [taken.image for taken in by_key] == images(root, "png")
    assert [taken.label for taken in by_key] == LABELS
    assert source.classes == (
        WORDS if name == "arrow" else tuple("012345" if name == "arrow_zstd" else "012")
    )
    assert {sample.image.packed for sample in source.splits["train"]} == {name == "arrow_zstd"}
    first = {"arrow": "chunk-0-0.bin:0", "arrow_zstd": "chunk-0-0.bin:0", "hub": "0.png"}
    assert min(found) == first[name]


def test_unpacked_in_place(root: Path, tmp_path: Path) -> None:
    """LitData's own reader replaces chunks that are compressed as a whole."""
    folder = shutil.copytree(root / "chunk", tmp_path / "set")
    before = in_order(f"litdata:{folder}")
    for chunk in folder.glob("*.bin"):
        (folder / chunk.name.replace(".zstd:3", "")).write_bytes(decompress(chunk.read_bytes(), "zstd", 0))
        chunk.unlink()
    assert in_order(f"litdata:{folder}") == before


def test_tuples(root: Path) -> None:
    """Of leaves without names, the image and the only number or name are taken."""
    found = in_order(f"litdata:{root}/tuple")
    check_pixels(found)
    assert [taken.label for taken in found] == LABELS
    assert in_order(f"litdata:{root}/tuple", Columns("0", "1")) == found


@pytest.mark.parametrize("leaf", ["jpeg", "bytes", "pil", "numpy", "tensor"])
def test_every_leaf_of_images(root: Path, leaf: str) -> None:
    found = in_order(f"litdata:{root}/every", Columns(leaf, "int"))
    if leaf in ("jpeg", "bytes"):
        assert [taken.image for taken in found] == images(root, "jpeg" if leaf == "jpeg" else "png")
    else:
        check_pixels(found)


@pytest.mark.parametrize(
    "leaf", ["int", "float", "str", "scalar", "json", "no_header_numpy", "no_header_tensor"]
)
def test_every_leaf_of_labels(root: Path, leaf: str) -> None:
    source = open_source(f"litdata:{root}/every", columns=Columns("jpeg", leaf))
    samples = sorted((s.key, s.label, s.others) for part in source.splits.values() for s in part)
    several = leaf in ("json", "no_header_numpy", "no_header_tensor")
    assert [label for _, label, _ in samples] == LABELS
    assert {others for _, _, others in samples} == {(5,) if several else ()}
    assert source.classes[:3] == (WORDS if leaf == "str" else ("0", "1", "2"))


def test_booleans(root: Path) -> None:
    found = in_order(f"litdata:{root}/every", Columns("jpeg", "bool"))
    assert [taken.label for taken in found] == [n % 2 for n in range(ROWS)]


def test_lists_of_old_versions(root: Path, tmp_path: Path) -> None:
    """They made a leaf of each element of a list, and wrote the header of tensors in little endian."""
    folder = shutil.copytree(root / "plain", tmp_path / "set")
    index = folder / "index.json"
    tree = json.loads(index.read_text())
    leaf = {"type": None, "context": None, "children_spec": []}
    pair = {"type": "builtins.list", "context": "null", "children_spec": [leaf, leaf]}
    spec = {"type": "builtins.dict", "context": '["img", "labels"]', "children_spec": [leaf, pair]}
    tree["config"] |= {"data_spec": json.dumps([1, spec])}
    index.write_text(json.dumps(tree))
    source = open_source(f"litdata:{folder}")
    samples = sorted((s.key, s.label, s.others) for part in source.splits.values() for s in part)
    assert [(label, others) for _, label, others in samples] == [
        (n % 3, (n,) if n != n % 3 else ()) for n in range(ROWS)
    ]
    folder = shutil.copytree(root / "every", tmp_path / "every")
    for chunk in folder.glob("*.bin"):
        content = chunk.read_bytes()
        old, new = ([n.to_bytes(4, order) for n in (11, 3, 3, 4, 5)] for order in ("little", "big"))
        assert content.count(b"".join(new)) in (1, 3)
        chunk.write_bytes(content.replace(b"".join(new), b"".join(old)))
    check_pixels(in_order(f"litdata:{folder}", Columns("tensor", "int")))


def test_splits_and_captions(root: Path) -> None:
    source = open_source(f"litdata:{root}/splits")
    assert source.classes == WORDS
    found, _ = everything(source)
    jpeg = images(root, "jpeg")
    expected = [("train" if n < 4 else "val", n % 3, jpeg[n]) for n in range(6)]
    assert sorted(found.values(), key=lambda taken: jpeg.index(taken.image)) == expected
    source = open_source(f"litdata:{root}/arrow_zstd", captions=True)
    texts = sorted(sample.fields[TEXT] for part in source.splits.values() for sample in part)
    assert texts == [("a cat " * 40 + str(n)).encode() for n in range(ROWS)]


def test_on_s3(root: Path, bucket) -> None:
    for name in ("plain", "arrow", "chunk"):
        for path in (root / name).iterdir():
            storage.write_bytes(bucket.uri(name, path.name), path.read_bytes())
        assert in_order(f"litdata:{bucket.uri(name)}") == in_order(f"litdata:{root / name}")


def test_what_is_refused(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "plain", tmp_path / "set")
    index = folder / "index.json"
    tree = json.loads(index.read_text())
    for changed, message in (
        ({"item_loader": "TokensLoader"}, "its chunks are those of a TokensLoader: they hold tokens of text"),
        ({"item_loader": "ParquetLoader"}, "ParquetLoader: give parquet:PATH as the source"),
        ({"compression": "lz4"}, "compression 'lz4' is not read; known"),
        ({"data_spec": "?"}, "index.json is not an index of LitData: "),
        (
            {"data_format": ["jpeg", "pickle", "int"]},
            "column class is pickle, which is not read; pickled values",
        ),
        (
            {"data_format": ["jpeg_array", "int", "int"]},
            "column image is jpeg_array, which is not read as an",
        ),
    ):
        index.write_text(json.dumps(tree | {"config": tree["config"] | changed}))
        with pytest.raises(UsageError, match=message):
            open_source(f"litdata:{folder}")
    with pytest.raises(UsageError, match=r"encrypted/index.json: its chunks are encrypted \(fernet\)"):
        open_source(f"litdata:{root}/encrypted")
    index.write_text('{"shards": []}')
    with pytest.raises(UsageError, match=r"MDSWriter of mosaicml-streaming wrote it: give mds:PATH"):
        open_source(f"litdata:{folder}")


@pytest.mark.parametrize("name", ["plain", "batch", "chunk", "sample", "arrow", "arrow_zstd"])
def test_damage_is_named(root: Path, name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(root / name, tmp_path / "set")
    chunk = next(folder.glob("chunk-0-0*"))
    content = chunk.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], b"", content[:40], bytes(4) + content[4:]):
        if name.startswith("arrow") and damaged[4:] == content[4:]:
            continue  # The Arrow file says itself how many samples it has.
        chunk.write_bytes(damaged)
        with pytest.raises(UsageError, match=rf"{chunk} cannot be read: .*; copy it again"):
            open_source(f"litdata:{folder}")
    chunk.unlink()
    with pytest.raises(UsageError, match=f"index.json names {chunk.name}, which is not there"):
        open_source(f"litdata:{folder}")


def test_damage_of_arrow_files_does_not_crash(root: Path, tmp_path: Path) -> None:
    """Arrow itself would read beyond its buffers."""
    folder = shutil.copytree(root / "arrow", tmp_path / "set")
    chunk = folder / "chunk-0-0.bin"
    content = chunk.read_bytes()
    refused = set[str]()
    for at in range(4, len(content), 24):
        chunk.write_bytes(content[:at] + b"\xff\xff\xff\x7f" + content[at + 4 :])
        try:
            everything(open_source(f"litdata:{folder}"))
        except UsageError as error:
            refused.add(str(error))
    assert len(refused) > 5
    assert all(str(chunk) in message for message in refused)


def test_a_list_of_floats() -> None:
    content = b"\3" + (2).to_bytes(4, "little") + np.array([0.0, 1.0], "<f8").tobytes()
    assert DECODERS["json"](content) == [0.0, 1.0]
