"""Words for splits in names of files, folders and samples."""

import json
from pathlib import Path

import pytest

from orchestrator.data.parquet import Columns
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.splits import split_named, splits_in, splits_of, splits_of_rows
from tests.orchestrator.data.images import everything, numbered, parquet, tar, write

WORDS = {
    "train": [
        "train",
        "Training",
        "TRAIN",
        "seg_train",
        "train2017",
        "trainset",
        "Train_0",
        "x-training-001.tar",
    ],
    "val": ["val", "Valid", "validation", "dev", "valset", "val-000.parquet", "seg_dev"],
    "test": ["test", "Testing", "eval", "evaluation", "TestSet", "PublicTest", "test-00-of-01.tar"],
    None: [
        "latest.tar",
        "strain",
        "valley",
        "unittest",
        "devices",
        "medieval",
        "test_train",
        "0001",
        "validity",
    ],
}


@pytest.mark.parametrize(
    ("split", "name"), [(split, name) for split, names in WORDS.items() for name in names]
)
def test_words(split: str | None, name: str) -> None:
    assert split_named(name) == split


def test_the_uppermost_folder_that_differs_decides() -> None:
    names = ["my_test/train/valley/1.jpg", "my_test/dev/train_1.jpg", "my_test/x/test-2.tar"]
    assert splits_in(names) == ["train", "val", "test"]


def test_what_is_left_out_and_refused() -> None:
    named, notes = splits_of(["train-0.tar", "dev-0.tar", "eval-0.tar"], "here")
    assert (named, notes) == (
        {"train-0.tar": "train", "dev-0.tar": "val"},
        ["the test split is left out (1 file)"],
    )
    named, notes = splits_of(["train-0.tar", "testing-0.tar"], "here")
    assert (named["testing-0.tar"], notes) == (
        "val",
        ["validation is the test split, because there is no other"],
    )
    assert splits_of(["a.tar", "b.tar"], "here")[0] == {"a.tar": None, "b.tar": None}
    assert splits_of(["training-0.tar", "training-1.tar"], "here")[0]["training-0.tar"] is None
    for names, message in (
        (["train.tar", "more.tar"], "more.tar is neither for training nor for validation"),
        (["val.tar", "test.tar"], "images for test and val, none for train: .*`ignore_split_names`"),
    ):
        with pytest.raises(UsageError, match=message):
            splits_of(names, "here")


FOLDERS = {  # folders of images -> what becomes of them
    "Training/a Training/b Testing/a Testing/b": ("ab", "train"),
    "seg_train/seg_train/a seg_train/seg_train/b seg_test/seg_test/a seg_test/seg_test/b": ("ab", "train"),
    "Train/a Train/b Val/a Val/b Test/a": ("ab", "train"),
    "train/train/x train/bus/x dev/bus/x dev/train/x": (("bus", "train"), "train"),
    "a/train a/test b/train b/test": ("ab", "train"),
    "train bus": (("bus", "train"), None),
    "valid invalid": (("invalid", "valid"), None),
    "train/a train/b": ("ab", None),
    "train bus test": "are test and train splits, or classes beside bus",
    "train/a train/b unlabelled": "is train a class, or does it hold the training images of the classes a, b",
    "here/train/a here/test/a there/train/a there/test/a": "each of the folders .* name the one to take",
    "train/a train/b val": "the images for val are in no class folder",
    "archive/train/a archive/train/b archive/test/a archive/test/b": ("ab", "train"),
    "images/a images/b": ("ab", None),
    "a/2020/train a/2020/val b/2020/train b/2020/val": ("ab", "train"),
    "train_val/a train_val/b test/a test/b": ("ab", "train"),
}


@pytest.mark.parametrize("folders", FOLDERS)
def test_folders(folders: str, tmp_path: Path) -> None:
    """Folders of another spelling are splits or refused: never classes, and never trained on."""
    names = [f"{folder}/{n}.png" for folder in folders.split() for n in range(4)]
    write(tmp_path, {name: numbered(n) for n, name in enumerate(names)})
    expected = FOLDERS[folders]
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            open_source(f"folder:{tmp_path}")
        return
    classes, split = expected
    source = open_source(f"folder:{tmp_path}", val_frac=0.4)
    assert source.classes == tuple(classes)
    if split:
        for sample in source.splits["train"]:
            assert "train" in sample.key.lower()
        assert all("train/train" in s.key or "train" not in s.key.lower() for s in source.splits["val"]) or (
            "dev" in folders
        )


def test_names_may_say_nothing(tmp_path: Path) -> None:
    """Classes that are called like splits keep a way in, and so do files and samples."""
    write(tmp_path / "f", {f"{c}/{n}.png": numbered(n) for c in ("train", "test") for n in range(4)})
    with pytest.raises(UsageError, match="no class folder"):
        open_source(f"folder:{tmp_path}/f")
    assert open_source(f"folder:{tmp_path}/f", ignore_split_names=True).classes == ("test", "train")
    for name in ("train", "eval"):
        members = [
            m
            for n in range(8)
            for m in ((f"{name}{n}.png", numbered(n)), (f"{name}{n}.cls", b"%d" % (n % 2)))
        ]
        tar(tmp_path / "t" / f"{name}.tar", members)
    keys = {*everything(open_source(f"webdataset:{tmp_path}/t", ignore_split_names=True, val_frac=0.5))[0]}
    assert len(keys) == 16
    named = open_source(f"webdataset:{tmp_path}/t")
    assert {sample.key[:4] for sample in named.splits["val"]} == {"eval"}


@pytest.mark.parametrize("said", ["keys", "column"])
def test_one_file_of_several_splits(said: str, tmp_path: Path) -> None:
    """The folders in keys, or a column, say what each row is for; test rows are left out."""
    words = ["Training", "Val", "Test"] * 4
    columns = {"image": [numbered(n) for n in range(12)], "label": [n // 6 for n in range(12)]}
    names = [f"{word}/{n}" for n, word in enumerate(words)]
    columns |= {"key": names} if said == "keys" else {"Usage": words, "key": [f"{n}" for n in range(12)]}
    source = open_source(f"parquet:{parquet(tmp_path / 'x.parquet', columns)}")
    found = {
        split: {int(s.key.rpartition("/")[2]) % 3 for s in rows} for split, rows in source.splits.items()
    }
    assert found == {"train": {0}, "val": {1}}
    assert source.notes == ("the test split is left out (4 images)",)


def test_a_test_split_without_labels(tmp_path: Path) -> None:
    """As on the Hub: it cannot validate, so a part of the training images does."""
    parquet(tmp_path / "train.parquet", {"image": [numbered(n) for n in range(8)], "label": [0, 1] * 4})
    parquet(tmp_path / "test.parquet", {"image": [numbered(n) for n in range(8, 12)], "label": [-1] * 4})
    source = open_source(f"parquet:{tmp_path}", val_frac=0.25)
    assert sum(map(len, source.splits.values())) == 8
    assert "none of the 4 images for validation has a label: they are left out" in "; ".join(source.notes)


@pytest.mark.parametrize("value", ["", None, "holdout", "dev_test"])
def test_a_column_of_splits_that_does_not_say_all(value: str | None, tmp_path: Path) -> None:
    columns = {"image": [numbered(n) for n in range(9)], "label": [0, 1, 2] * 3}
    columns |= {"split": ["train"] * 3 + ["val"] * 3 + [value] * 3}
    file = parquet(tmp_path / "x.parquet", columns)
    with pytest.raises(
        UsageError, match=f"column split names splits, but {value!r}" if value else "names splits"
    ):
        open_source(f"parquet:{file}")
    assert len(open_source(f"parquet:{file}", ignore_split_names=True, val_frac=0.4).splits) == 2


def test_a_flag_for_training_is_said_to_say_nothing(tmp_path: Path) -> None:
    columns = {"image": [numbered(n) for n in range(8)], "label": [0, 1] * 4, "is_train": [1, 0] * 4}
    (note,) = open_source(f"parquet:{parquet(tmp_path / 'x.parquet', columns)}", val_frac=0.4).notes
    assert "column is_train says nothing here" in note


def test_a_column_that_is_read_for_something_else_names_no_splits(tmp_path: Path) -> None:
    """A label column that is called `type` or `test` is one of labels, whatever its texts are."""
    for label in ("type", "test", "group"):
        columns = Columns(label=label)
        texts = ["train", "bus"] if label == "test" else ["train", "test"]
        listed = {"image": [numbered(n) for n in range(8)], label: texts * 4}
        parquet(tmp_path / f"{label}.parquet", listed)
        rows = "".join(f"{n}.png,{texts[n % 2]}\n" for n in range(8))
        write(
            tmp_path,
            {f"{n}.png": numbered(n) for n in range(8)} | {"a.csv": f"path,{label}\n{rows}".encode()},
        )
        for name in (f"parquet:{tmp_path}/{label}.parquet", f"csv:{tmp_path}/a.csv"):
            source = open_source(name, columns=columns, val_frac=0.4)
            assert (source.classes, source.notes) == (tuple(sorted(texts)), ())


def test_a_field_of_json_and_keys_of_a_source(tmp_path: Path) -> None:
    def members(n: int) -> list[tuple[str, bytes]]:
        label = json.dumps({"label": n % 2, "split": "train" if n < 4 else "dev"}).encode()
        return [(f"{n}.png", numbered(n)), (f"{n}.json", label)]

    tar(tmp_path / "a.tar", [member for n in range(8) for member in members(n)])
    source = open_source(f"webdataset:{tmp_path}")
    assert {int(sample.key) >= 4 for sample in source.splits["val"]} == {True}
    keys = ["train/0", "train/1", "val/2", "val/3"]
    made = f"[Sample(image=b'-', label=n % 2, key=key) for n, key in enumerate({keys})]"
    own = f"from orchestrator import Sample\n\n\ndef make():\n    return {made}\n"
    (tmp_path / "own.py").write_text(own)
    source = open_source(f"{tmp_path}/own.py:make")
    assert [sample.key for sample in source.splits["val"]] == ["val/2", "val/3"]


NOTED = {  # folders -> what is said of them
    "color/a color/b grey/a grey/b": "the classes color, grey have the same folders, a, b",
    "COVID/images COVID/masks Normal/images Normal/masks": "have the same folders, images, masks",
    "cat dog augmented/cat augmented/dog": "the class augmented has folders that are called as other classes",
    "a a/val b": "folders inside of classes, val, say nothing about splits",
}


@pytest.mark.parametrize("folders", NOTED)
def test_folders_that_may_be_no_classes(folders: str, tmp_path: Path) -> None:
    write(tmp_path, {f"{folder}/{n}.png": numbered(n) for folder in folders.split() for n in range(4)})
    assert any(NOTED[folders] in note for note in open_source(f"folder:{tmp_path}").notes)


def test_a_column_of_splits_in_capitals_with_a_strange_word() -> None:
    _, doubt = splits_of_rows("Split", ["train", "val", "holdout"])
    assert "'holdout' is none" in doubt
