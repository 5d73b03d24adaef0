"""Images with several labels: lists in files, packed or in place, become columns of the field `label`."""

import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from orchestrator import storage
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.data.images import encode_png
from orchestrator.data.index import RECORD, record_type, records_of, sample_ids
from orchestrator.data.manifest import Manifest, check_shards, open_manifest
from orchestrator.data.parquet import class_names
from orchestrator.data.stream import Split, in_order, in_process, open_stream
from orchestrator.errors import UsageError
from orchestrator.packing import open_source, pack as packing
from orchestrator.packing.in_place import index_external_shards, index_file
from orchestrator.packing.labels import (
    MAX_CLASSES,
    MAX_LABELS,
    Labels,
    class_numbers,
    listed_labels,
    notes_on_classes,
    read_labels,
)
from orchestrator.packing.pack import Sample, pack, write_shards
from tests.orchestrator.data.images import numbered, parquet, tar

SETS = [[2, 0], [1], [0, 2, 0, 1], [], [1, 1], [0, 1]]  # as files list them
SPLITS: tuple[Split, ...] = ("train", "val")
KEPT = {0: (2, 0), 1: (1,), 2: (0, 2, 1), 4: (1,), 5: (0, 1)}  # by image
NAMES = ["ape", "bee", "cat"]


def named(labels: Sequence[int]) -> list[str]:
    return [NAMES[label] for label in labels]


def members(extension: str, content: Callable[[Sequence[int]], str]) -> list[tuple[str, bytes]]:
    """Returns the members of a tar: images, and files of their labels."""
    files = ({"png": numbered(n), extension: content(labels).encode()} for n, labels in enumerate(SETS))
    return [(f"{n}.{name}", content) for n, of in enumerate(files) for name, content in of.items()]


def by_cls(separator: str) -> list[tuple[str, bytes]]:
    return members("cls", lambda labels: separator.join(map(str, labels)))


def by_json(field: str, of: Callable[[Sequence[int]], Any] = list) -> list[tuple[str, bytes]]:
    return members("json", lambda labels: json.dumps({field: of(labels)}))


def columns(labels: Any) -> dict[str, Any]:
    numbers = range(len(SETS))
    return {"image": [numbered(n) for n in numbers], "label": labels, "key": [f"{n}" for n in numbers]}


LISTS = {
    "parquet": lambda path: parquet(path / "x.parquet", columns(SETS)),
    "verbatim": lambda path: parquet(
        path / "x.parquet", columns(SETS), compression="none", use_dictionary=False
    ),
    "large": lambda path: parquet(
        path / "x.parquet", columns(pa.array(SETS, pa.large_list(pa.uint16()))), row_group_size=4
    ),
    "names": lambda path: parquet(path / "x.parquet", columns([named(labels) for labels in SETS])),
    "null": lambda path: parquet(path / "x.parquet", columns([*SETS[:3], None, *SETS[4:]])),
    "json": lambda path: tar(path / "x.tar", by_json("label")),
    "json labels": lambda path: tar(path / "x.tar", by_json("labels")),
    "json names": lambda path: tar(path / "x.tar", by_json("class", named)),
    "cls, spaces": lambda path: tar(path / "x.tar", by_cls(" ")),
    "cls, commas": lambda path: tar(path / "x.tar", by_cls(", ")),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_in_files(kind: str, tmp_path: Path) -> None:
    """Labels keep their order, a label that comes twice counts once, an image without labels is left out."""
    part = index_file(str(LISTS[kind](tmp_path)))
    found = {
        int(key): (label, *others)
        for key, label, others in zip(part.keys, part.labels, part.others, strict=True)
    }
    is_named = isinstance(part.labels[0], str)
    assert found == {n: tuple(named(labels)) if is_named else labels for n, labels in KEPT.items()}
    (problem,) = part.skipped
    assert ": 3: no label" in problem or ": 3: label '' is neither" in problem


def test_lists_of_one_label_are_one_label(tmp_path: Path) -> None:
    labels = pa.array([[n % 2] for n in range(6)], pa.list_(pa.int64(), 1))
    part = index_file(str(parquet(tmp_path / "x.parquet", columns(labels))))
    assert (list(part.labels), list(part.others)) == ([0, 1, 0, 1, 0, 1], [])


def test_names_of_listed_labels(tmp_path: Path) -> None:
    """Hugging Face's `datasets` describes a list by the feature that it is a list of."""
    for feature in ({"feature": {"names": NAMES}, "_type": "List"}, {"names": NAMES}):
        metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature}}})}
        assert class_names(pa.schema([("label", pa.list_(pa.int64()))], metadata)) == NAMES


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda path: parquet(path / "x.parquet", columns([*SETS[:5], [0, 2] * 40])),
            rf"x.parquet: 5 lists 80 labels, more than {MAX_LABELS}: list the classes that the image has",
        ),
        (
            lambda path: tar(path / "x.tar", [("a.png", b"-"), ("a.cls", b"2 " * 65)]),
            rf"x.tar: a lists 65 labels, more than {MAX_LABELS}",
        ),
        (
            lambda path: parquet(path / "x.parquet", columns([[0.5]] * 6)),
            r"label 0.5 of 0 is not a whole number: a label is the number or name of a class",
        ),
    ],
)
def test_lists_that_are_refused(write: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        index_file(str(write(tmp_path)))


def labels_of(data_set: str, split: Split) -> dict[str, tuple[int, ...]]:
    """Returns the labels of every image by its key, as the index has them."""
    manifest = open_manifest(data_set)
    check_shards(data_set, manifest, verify=True)
    stream = in_order(override(RunConfig(), {"data.path": data_set}), split)
    places = stream.data.places(split, np.arange(manifest.rows(split)))
    records = stream.data.records(split, *places)
    keys = [key for n in range(len(manifest.splits[split])) for key in stream.data.keys(split, n)]
    assert records["sample"].tolist() == sample_ids(keys).tolist()
    assert records["others"].shape == (len(keys), manifest.labels - 1)
    return {
        key: (int(record["label"]), *(int(n) for n in record["others"] if n >= 0))
        for key, record in zip(keys, records, strict=True)
    }


def write_sets(root: str, files: Mapping[str, Path]) -> str:
    """Puts files below `root` and returns their folder."""
    for name, path in files.items():
        storage.write_bytes(storage.join(root, "theirs", name), path.read_bytes())
    return storage.join(root, "theirs")


def test_packed_and_in_place(root: str, tmp_path: Path) -> None:
    """The labels of both are those of the files; packed shards hold lists, which can be packed again."""
    train = parquet(tmp_path / "made" / "train.parquet", columns(SETS))
    val = tar(tmp_path / "made" / "val.tar", [("v.png", numbered(9)), ("v.cls", b"1")])
    theirs = write_sets(root, {"train-0.parquet": train, "val-0.tar": val})
    expected = {f"{n}": labels for n, labels in KEPT.items()}
    in_place = index_external_shards(theirs, storage.join(root, "home"))
    assert open_manifest(in_place).labels == 3
    assert labels_of(in_place, "train") == expected
    assert labels_of(in_place, "val") == {"v": (1,)}
    out = storage.join(root, "out")
    report = pack(out, open_source(f"parquet:{theirs}/train-0.parquet", val_frac=0.3))
    assert report.manifest == open_manifest(out)
    assert report.manifest.labels == 3
    assert labels_of(out, "train") | labels_of(out, "val") == expected
    assert report.labels["train"] + report.labels["val"] == Counter({0: 3, 1: 4, 2: 2})
    assert report.skipped == (f"{theirs}/train-0.parquet: 3: no label",)
    again = storage.join(root, "again")
    assert pack(again, open_source(f"parquet:{out}")).manifest.labels == 3
    assert [labels_of(again, split) for split in SPLITS] == [labels_of(out, split) for split in SPLITS]


def test_classes_that_come_second(tmp_path: Path) -> None:
    """The majority counts all labels; a class that training images have as a further label is learned."""
    images = [numbered(n) for n in range(3)]
    parquet(tmp_path / "them" / "train.parquet", {"image": images, "label": [[0, 2], [1], [1, 0]]})
    parquet(tmp_path / "them" / "val.parquet", {"image": images, "label": [[2, 1], [1, 2], [0, 2]]})
    manifest = open_manifest(index_external_shards(str(tmp_path / "them"), str(tmp_path)))
    assert manifest.val_majority == 3
    packed = pack(str(tmp_path / "out"), open_source(f"parquet:{tmp_path}/them")).manifest
    assert packed.val_majority == 3
    parquet(tmp_path / "them" / "val.parquet", {"image": images, "label": [[3, 1], [1, 2], [0, 2]]})
    with pytest.raises(UsageError, match=r"validation has images of 1 classes without training images \(3\)"):
        index_external_shards(str(tmp_path / "them"), str(tmp_path))


def test_single_labels_are_stored_as_ever(tmp_path: Path) -> None:
    """Records, manifest and a shard's column are those written by hand, without a number of labels."""
    keys = ["a", "b"]
    by_hand = b"".join(
        struct.pack("<QIIiq", *fields)
        for fields in zip([0, 5], [5, 7], [9, 2**32 - 1], [1, 0], sample_ids(keys).tolist(), strict=True)
    )
    assert records_of([0, 5], [5, 7], [9, 2**32 - 1], [1, 0], keys).tobytes() == by_hand
    assert record_type(1) == RECORD
    assert record_type(3).itemsize == 28 + 8
    splits = {"train": [Sample(b"0", 0, "a")], "val": [Sample(b"1", 1, "b")]}
    manifest = write_shards(str(tmp_path / "one"), "xy", splits)
    tree = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert tree.keys() == {"classes", "format", "splits", "index", "val_majority"}
    assert (open_manifest(str(tmp_path / "one")), manifest.labels) == (manifest, 1)
    assert pq.read_schema(tmp_path / "one" / "train" / "000000.parquet") == packing.SCHEMA
    splits["val"] = [Sample(b"1", 1, "b", others=(0,))]
    two = write_shards(str(tmp_path / "two"), "xy", splits)
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["labels"] == two.labels == 2
    assert two.digest() != manifest.digest()


def pack_sets(path: str, monkeypatch: pytest.MonkeyPatch, *, count: int = 20) -> Manifest:
    """Packs images whose grey is their number n, with label n and the n % 3 that follow it, modulo 10."""
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 4)
    samples = [
        Sample(
            encode_png(np.full((8, 8, 3), n, np.uint8)),
            n % 10,
            f"{n}",
            others=tuple((n + i) % 10 for i in range(1, n % 3 + 1)),
        )
        for n in range(count)
    ]
    splits = {"train": samples[: count - 7], "val": samples[count - 7 :]}
    return write_shards(path, map(str, range(10)), splits)


def check_sets(batch: Batch) -> int:
    """Checks the labels of images of `pack_sets`, and returns how many are valid."""
    valid = batch.valid.bool()
    grey = batch["image"][:, 0, 0, 0].long()
    assert batch["label"].dtype == torch.int64
    assert batch["label"].shape == (len(grey), 3)
    for n, labels in zip(grey[valid].tolist(), batch["label"][valid].tolist(), strict=True):
        assert labels == [n % 10] + [(n + i) % 10 if i <= n % 3 else -1 for i in (1, 2)]
    assert (batch["label"][~valid, 1:] == -1).all()
    return int(valid.sum())


def test_from_files_to_batches(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, and in validation, whose last batch is padded; microbatches split them too."""
    pack_sets(storage.join(root, "sets"), monkeypatch)
    changes = {"data.path": storage.join(root, "sets"), "data.batch_size": 4, "data.lanes": 4}
    run = override(RunConfig(), changes | {"model.image_size": 8, "model.patch_size": 4})
    for batch in in_process(open_stream(run, "train", 0, 1), range(5)):
        assert check_sets(batch) == 4
        assert [check_sets(part) for part in batch.split(3)] == [3, 1]
    val = open_stream(run, "val", 0, 1)
    assert [check_sets(batch) for batch in in_process(val, val.steps())] == [4, 3]


def test_an_image_that_takes_the_slot_of_another_brings_its_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 4)
    good = [Sample(encode_png(np.full((8, 8, 3), n, np.uint8)), n, f"{n}", others=(n + 1,)) for n in range(5)]
    bad = Sample(b"torn", 7, "7", others=(8,))
    write_shards(str(tmp_path), map(str, range(10)), {"train": [*good[:3], bad, *good[3:]], "val": [bad]})
    changes = {"data.path": str(tmp_path), "data.batch_size": 6, "model.image_size": 8, "data.lanes": 1}
    run = override(RunConfig(), changes | {"model.patch_size": 4})
    (batch,) = in_process(open_stream(run, "train", 0, 1), range(1))
    grey = batch["image"][:, 0, 0, 0].long()
    assert len(batch.bad) == 1
    assert batch["label"].tolist() == [[n, n + 1] for n in grey.tolist()]
    (batch,) = in_process(open_stream(run, "val", 0, 1), range(1))
    assert (batch["label"][:, 1:] == -1).all()


WRITTEN = {  # the text of a .cls member -> its label
    "3": 3,
    "\ufeff3\r\n": 3,
    "3.0": 3,
    "3.000000000000000000e+00": 3,
    '"3"': 3,
    "tensor(3)": 3,
    "tensor([3], device='cuda:0')": 3,
    "np.int64(3)": 3,
    "[3]": 3,
    "b'cat'": "cat",
    " cat\n": "cat",
    "cafe\u0301": "caf\u00e9",
    "\u0663": 3,
    "3e0": 3,
}


@pytest.mark.parametrize("text", WRITTEN)
def test_whatever_wrote_a_label(text: str) -> None:
    found = read_labels([listed_labels(text, typed=False)], ["a"], "x")
    assert found == Labels([WRITTEN[text]], [], 0)
    # In a column or in JSON, a text is a name, also if it is a number's.
    name = read_labels([listed_labels(text)], ["a"], "x").first[0]
    assert name == (3 if "[" in text else text if text == "\u0663" else str(WRITTEN[text]))


@pytest.mark.parametrize(
    "value", [None, "", " ", "nan", "NaN", "<NA>", -1, -1.0, "-1", float("nan"), b"", []]
)
@pytest.mark.parametrize("typed", [True, False])
def test_no_label(value: Any, typed: bool) -> None:
    assert read_labels([listed_labels(value, typed=typed)], ["a"], "x").first == [None]


@pytest.mark.parametrize("value", [0.5, float("inf"), [1, 2.5]])
def test_numbers_that_are_no_class(value: Any) -> None:
    with pytest.raises(UsageError, match="of a is not a whole number"):
        read_labels([listed_labels(value)], ["a"], "x")


LEFT_OVER = ["(0, 1)", "[ True False]", "1;0;0", "1|0|0", "True False False", "1,0,0", "[0 1\n 0]"]


@pytest.mark.parametrize("text", LEFT_OVER)
@pytest.mark.parametrize("typed", [True, False])
def test_lists_as_programs_print_them(text: str, typed: bool) -> None:
    found = listed_labels(text, typed=typed)
    assert len(found) == text.count("0") + text.count("1") + text.count("True") + text.count("False")
    assert {*map(int, found)} == {0, 1}


@pytest.mark.parametrize(
    "text", ["[0 0 ... 0 1]", '{"label": 1}', "cat\ndog", "label\n0", "\x01\0\0", "1,000"]
)
@pytest.mark.parametrize("typed", [True, False])
def test_texts_that_are_no_label(text: str, typed: bool) -> None:
    with pytest.raises(ValueError, match="label "):
        listed_labels(text, typed=typed)


@pytest.mark.parametrize("none", [None, [], [None], ""])
def test_an_image_without_a_label_among_lists_of_0_and_1(none: Any) -> None:
    sets = [[1, 0, 1, 0], [0, 1, 0, 0], listed_labels(none)]
    assert read_labels(sets, ["a", "b", "c"], "x") == Labels([0, 1, None], [(2,), (), ()], 4)


@pytest.mark.parametrize("odd", [[1, 0], [2, 0, 0, 1], [3], [0, 0, 2]])
def test_a_list_that_is_not_as_the_others(odd: list[int]) -> None:
    with pytest.raises(UsageError, match=r"\[1, 0, 1, 0\] has a 0 or 1 for every class, but not all lists"):
        read_labels([[1, 0, 1, 0], [0, 1, 0, 0], odd], ["a", "b", "c"], "x")


def test_names_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    names = [str(n) for n in range(12)]
    labels = dict.fromkeys(sorted(names), "key")
    assert class_numbers(labels) == (tuple(names), {name: int(name) for name in sorted(names)})
    assert class_numbers({"2.5": "", "10": ""})[0] == ("2.5", "10")
    assert class_numbers({"3": "a", 0: "b"})[1] == {"3": 3, 0: 0}  # text in one file, numbers in another


HOT = [[0, 0, 1, 0], [1, 0, 0, 1], [0, 1, 0, 0]] * 3
FORMS: dict[str, Callable[[Path], Path]] = {
    "ints": lambda path: parquet(path / "x.parquet", hot(HOT)),
    "bools": lambda path: parquet(path / "x.parquet", hot([[*map(bool, row)] for row in HOT])),
    "floats": lambda path: parquet(path / "x.parquet", hot([[*map(float, row)] for row in HOT])),
    "fixed size": lambda path: parquet(path / "x.parquet", hot(pa.array(HOT, pa.list_(pa.int8(), 4)))),
    "text": lambda path: parquet(path / "x.parquet", hot([str(row) for row in HOT])),
    "quoted": lambda path: parquet(path / "x.parquet", hot([[*map(str, row)] for row in HOT])),
    "cls": lambda path: tar(path / "x.tar", hot_members("cls", lambda row: " ".join(map(str, row)))),
    "cls of numpy": lambda path: tar(path / "x.tar", hot_members("cls", lambda row: f"{np.array(row)}")),
    "json": lambda path: tar(path / "x.tar", hot_members("json", lambda row: json.dumps({"label": row}))),
}


def hot(labels: Any) -> dict[str, Any]:
    return {"image": [numbered(n) for n in range(len(HOT))], "label": labels}


def hot_members(extension: str, text: Callable[[list[int]], str]) -> list[tuple[str, bytes]]:
    files = ((numbered(n), text(row).encode()) for n, row in enumerate(HOT))
    return [
        m for n, (png, label) in enumerate(files) for m in ((f"{n}.png", png), (f"{n}.{extension}", label))
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("door", ["packed", "in place"])
def test_a_number_for_every_class(
    form: str, door: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read as the classes that are 1, and said; never as the classes 0 and 1."""
    file = FORMS[form](tmp_path / "them")
    said = "every list has a 0 or 1 for each of 4 classes"
    if door == "in place":
        manifest = open_manifest(index_external_shards(str(tmp_path / "them"), str(tmp_path)))
        assert (manifest.classes, manifest.labels) == (("0", "1", "2", "3"), 2)
        assert said in caplog.text
        return
    source = open_source(f"{'webdataset' if file.suffix == '.tar' else 'parquet'}:{file}")
    found = sorted((s.label, *s.others) for samples in source.splits.values() for s in samples)
    assert found == sorted(tuple(n for n, each in enumerate(row) if each) for row in HOT)
    assert said in source.notes[0]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[0, 1, -1], [1, 0, 0]], r"a number for each of 3 classes, such as \[1, 0, 0\]"),
        ([[0.2, 0.8, 0.0], [0.5, 0.5, 0.0]], "a number for each of 3 classes"),
        ([[0, 1, None], [0, 0, 1]], "a number for each of 3 classes"),
    ],
)
def test_other_numbers_for_every_class(lists: list[list[Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_labels(lists, ["a", "b"], "x")


def test_lists_of_class_numbers_are_none() -> None:
    """A list of classes names no class twice, so two equal numbers in a list of 0 and 1 are the proof."""
    assert read_labels([[0, 1], [1, 0]], ["a", "b"], "x").hot == 0
    assert read_labels([[0, 1], [1, 1]], ["a", "b"], "x") == Labels([1, 0], [(), (1,)], 2)
    assert read_labels([[True, False]], ["a"], "x") == Labels([0], [], 2)
    assert read_labels([[0], [1]], ["a", "b"], "x").hot == 0


def test_two_classes_of_which_every_image_has_both(tmp_path: Path) -> None:
    file = parquet(tmp_path / "x.parquet", hot([[0, 1], [1, 0], [1, 0]] * 3))
    assert "every image has both classes" in open_source(f"parquet:{file}").notes[0]


def test_files_that_differ_in_what_their_lists_are(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", hot(HOT))
    parquet(tmp_path / "b.parquet", hot([[3, 2]] * 9))
    with pytest.raises(
        UsageError, match=r"lists of 4 times 0 or 1 in .*a.parquet, and the numbers of classes in"
    ):
        open_source(f"parquet:{tmp_path}")


def test_names_that_may_be_one_class() -> None:
    notes = notes_on_classes(["Cat", "cat", "sea lion", "sealion", "a|b", "a", "b"], 0)
    assert notes == [
        "classes differ in case, blanks or zeros alone: 'Cat' and 'cat', 'sea lion' and 'sealion'",
        "'a|b' is one class, not the classes that it names: list them, one in a row",
    ]


def test_names_in_one_of_several_files(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", hot([n % 3 for n in range(9)]))
    parquet(tmp_path / "b.parquet", hot([n % 3 for n in range(9)]), names=NAMES)
    assert open_source(f"parquet:{tmp_path}").classes == tuple(NAMES)


def test_names_that_are_joined_by_semicolons() -> None:
    assert notes_on_classes(["a;b", "a", "b"], 0) == [
        "'a;b' is one class, not the classes that it names: list them, one in a row"
    ]


def test_a_label_beyond_all_classes() -> None:
    message = f"label {MAX_CLASSES} of 1.png: classes are numbered 0 to {MAX_CLASSES - 1}"
    with pytest.raises(UsageError, match=message):
        class_numbers({MAX_CLASSES: "1.png"})
