"""Lists of image files and labels: CSV, JSON lines, parquet."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.data.sources import open_source
from orchestrator.errors import UsageError
from tests.orchestrator.data.foreign import parquet
from tests.orchestrator.data.images import PNG, everything, numbered, write

Rows = list[dict[str, str | int]]


def write_csv(folder: Path, rows: Rows) -> str:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    (folder / "list.csv").write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8")
    return f"csv:{folder}/list.csv"


def write_jsonl(folder: Path, rows: Rows) -> str:
    (folder / "list.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    return f"jsonl:{folder}/list.jsonl"


def write_parquet(folder: Path, rows: Rows) -> str:
    parquet(folder / "list.parquet", {name: [row[name] for row in rows] for name in rows[0]})
    return f"parquet:{folder}/list.parquet"


EVERY_LIST = pytest.mark.parametrize("write_list", [write_csv, write_jsonl, write_parquet])
Write = Callable[[Path, Rows], str]


@EVERY_LIST
def test_paths_and_names(write_list: Write, tmp_path: Path) -> None:
    """Relative to the list, absolute or missing; order and split are those of the names."""
    write(tmp_path, {f"images/{n}.png": numbered(n) for n in range(40)})
    paths = {f"images/{n}.png": n for n in range(20)} | {
        f"{tmp_path}/images/{n}.png": n for n in range(20, 40)
    }
    rows: Rows = [{"path": path, "label": "dog" if n % 2 else "cat"} for path, n in paths.items()]
    rows.append({"path": "images/gone.png", "label": "cat"})
    source = open_source(write_list(tmp_path, rows))
    found, skipped = everything(source)
    assert source.classes == ("cat", "dog")
    assert {key: (t.label, t.image) for key, t in found.items()} == {
        path: (n % 2, numbered(n)) for path, n in paths.items()
    }
    assert skipped == ["images/gone.png"]
    assert {taken.split for taken in found.values()} == {"train", "val"}
    again, _ = everything(open_source(write_list(tmp_path, rows[::-1])))
    assert list(again.items()) == list(found.items())


@pytest.mark.parametrize("write_list", [write_csv, write_jsonl])
def test_split_column(write_list: Write, tmp_path: Path) -> None:
    write(tmp_path, {f"{n}.png": numbered(n) for n in range(10)})
    rows: Rows = [
        {"path": f"{n}.png", "label": n % 2, "split": "validation" if n < 4 else "train"} for n in range(10)
    ]
    found, _ = everything(open_source(write_list(tmp_path, rows)))
    assert {key for key, taken in found.items() if taken.split == "val"} == {
        "0.png",
        "1.png",
        "2.png",
        "3.png",
    }
    with pytest.raises(UsageError, match=r"0.png is neither for training nor for validation, but others are"):
        open_source(
            write_list(tmp_path, [{**row, "split": ""} if n == 0 else row for n, row in enumerate(rows)])
        )
    with pytest.raises(UsageError, match="split 'dev' is none of train, val"):
        open_source(
            write_list(tmp_path, [{**row, "split": "dev"} if n == 0 else row for n, row in enumerate(rows)])
        )
    rows = [{**row, "split": "test" if n else "val"} for n, row in enumerate(rows)]
    with pytest.raises(UsageError, match="has images for test and val, none for train"):
        open_source(write_list(tmp_path, rows))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["3", "0", "3", "0"], ("0", "1", "2", "3")),
        (["10", "9", "10", "9"], tuple(map(str, range(11)))),
        (["007", "7", "007", "7"], ("007", "7")),
        (["3", "cat", "3", "cat"], ("3", "cat")),
        (["b", "a", "c", "a"], ("a", "b", "c")),
    ],
)
def test_numbers_are_class_numbers(labels: list[str], classes: tuple[str, ...], tmp_path: Path) -> None:
    rows: Rows = [
        {"path": f"{n}.png", "label": label, "split": "train" if n < 2 else "val"}
        for n, label in enumerate(labels)
    ]
    source = open_source(write_csv(tmp_path, rows))
    assert source.classes == classes
    assert {s.key: classes[s.label] for part in source.splits.values() for s in part} == {
        f"{n}.png": label for n, label in enumerate(labels)
    }


@EVERY_LIST
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"path": "a", "label": -1}, {"path": "b", "label": 0}],
            "label -1 of a: classes are numbered 0 to 0",
        ),
        (
            [{"path": "a", "label": 2**40}, {"path": "b", "label": 0}],
            "label 1099511627776 of a: .* 0 to 999999",
        ),
        ([{"path": "a", "label": "x"}, {"path": "a", "label": "y"}], "list.* lists a twice"),
        ([{"path": "a", "label": "x"}, {"path": "b", "label": "x"}], r"only one class \(x\)"),
    ],
)
def test_labels_that_cannot_be(write_list: Write, rows: Rows, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(write_list(tmp_path, rows))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("csv", "file,label\na,1\n", "list needs columns path and label; it has file, label"),
        ("csv", "", "list needs columns path and label; it has none"),
        ("csv", "path,label\n", "list lists no images"),
        ("csv", "path,label\na,1\nb\n", "list line 3: label None is neither a whole number nor a name"),
        ("csv", "path,label\n,1\n", "list line 2 has no path"),
        ("csv", "path,label\na,1.5\nb,2\n", "label 1.5 is not a whole number"),
        ("csv", b"path,label\n\xff,1\n", "list is not UTF-8"),
        ("jsonl", '{"path": "a", "label": 1}\n{"path', "list line 2 is no JSON object"),
        ("jsonl", "[1, 2]\n", "list line 1 is no JSON object"),
        ("jsonl", '{"file": "a", "label": 1}', "list line 1 has no path; its fields are file, label"),
        (
            "jsonl",
            '{"path": "a", "label": 1.5}',
            "list line 1: label 1.5 is neither a whole number nor a name",
        ),
        ("jsonl", '{"path": "a", "label": true}', "list line 1: label True is neither"),
    ],
)
def test_lists_of_another_make(kind: str, text: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message):
        open_source(f"{kind}:{tmp_path}/list")


def test_on_s3(bucket) -> None:
    for n in range(6):
        storage.write_bytes(bucket.uri("set", "images", f"{n}.png"), numbered(n))
    text = "path,label\n" + "".join(f"images/{n}.png,{n % 2}\n" for n in range(5))
    storage.write_bytes(bucket.uri("set", "list.csv"), f"{text}{bucket.uri('set/images/5.png')},1\n".encode())
    found, skipped = everything(open_source(f"csv:{bucket.uri('set/list.csv')}"))
    assert sorted(taken.image for taken in found.values()) == sorted(map(numbered, range(6)))
    assert skipped == []


def test_a_local_list_of_images_on_s3(bucket, tmp_path: Path) -> None:
    for n in range(4):
        storage.write_bytes(bucket.uri(f"{n}.png"), PNG)
    found, _ = everything(
        open_source(write_csv(tmp_path, [{"path": bucket.uri(f"{n}.png"), "label": n % 2} for n in range(4)]))
    )
    assert len(found) == 4
