"""A data set says the same in every dialect: read back, its images have their classes and splits."""

import csv
import io
import json
import tempfile
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st

from orchestrator.packing import open_source
from orchestrator.packing.labels import listed_labels, name_of
from orchestrator.packing.listing import is_hidden
from orchestrator.packing.samples import Source
from orchestrator.packing.splits import split_named
from tests.orchestrator.data.images import numbered, parquet, tar, write

TEXT = st.text(st.sampled_from("abcXYZ 019.,;|'\"[](){}=&+-_éßЖ猫\u0301\ufeff\t"), min_size=1, max_size=8)


def is_plain(name: str) -> bool:
    """Returns whether a text is a name and nothing else: no number, list, split or hidden folder."""
    try:
        meant = all(listed_labels(name, typed=typed) == [name_of(name)] for typed in (True, False))
    except ValueError:
        return False
    return meant and bool(name_of(name)) and not split_named(name) and not is_hidden(f"{name}/x")


class Data(NamedTuple):
    """The classes of each image, and whether the split is said: then the first half is for training."""

    classes: list[list[str]]
    is_split: bool

    def split(self, n: int) -> str:
        return ("train" if n < len(self.classes) // 2 else "validation") if self.is_split else "all"

    def parts(self) -> Mapping[str, list[int]]:
        numbers = range(len(self.classes))
        return {
            s: [n for n in numbers if self.split(n) == s] for s in dict.fromkeys(map(self.split, numbers))
        }


def by_columns(data: Data, numbers: Sequence[int], labels: Callable[[list[str]], object]) -> dict[str, list]:
    return {"image": [numbered(n) for n in numbers], "label": [labels(data.classes[n]) for n in numbers]}


def as_folder(data: Data, root: Path, of: Callable[[str], object]) -> str:
    top = (lambda n: f"{data.split(n)}/") if data.is_split else lambda _: ""
    write(root, {f"{top(n)}{first[0]}/{n:03}.png": numbered(n) for n, first in enumerate(data.classes)})
    return f"folder:{root}"


def as_parquet(data: Data, root: Path, of: Callable[[str], object]) -> str:
    for split, numbers in data.parts().items():
        parquet(root / f"{split}-0.parquet", by_columns(data, numbers, lambda names: [*map(of, names)]))
    return f"parquet:{root}"


def as_parquet_with_splits(data: Data, root: Path, of: Callable[[str], object]) -> str:
    numbers = range(len(data.classes))
    columns = by_columns(data, numbers, lambda names: [*map(of, names)])
    parquet(root / "x.parquet", columns | {"split": [data.split(n) for n in numbers]})
    return f"parquet:{root}"


def as_json_in_tars(data: Data, root: Path, of: Callable[[str], object]) -> str:
    for split, numbers in data.parts().items():
        labels = {n: json.dumps({"label": [*map(of, data.classes[n])]}).encode() for n in numbers}
        tar(
            root / f"{split}.tar",
            [m for n in numbers for m in ((f"{n}.png", numbered(n)), (f"{n}.json", labels[n]))],
        )
    return f"webdataset:{root}"


def as_cls_in_tars(data: Data, root: Path, of: Callable[[str], object]) -> str:
    for split, numbers in data.parts().items():
        texts = {n: f"\ufeff{of(data.classes[n][0])}\r\n".encode() for n in numbers}
        tar(
            root / f"{split}.tar",
            [m for n in numbers for m in ((f"{n}.png", numbered(n)), (f"{n}.cls", texts[n]))],
        )
    return f"webdataset:{root}"


def as_csv(delimiter: str, encoding: str) -> Callable[[Data, Path, Callable[[str], object]], str]:
    def written(data: Data, root: Path, of: Callable[[str], object]) -> str:
        write(root, {f"img/{n}.png": numbered(n) for n in range(len(data.classes))})
        text = io.StringIO()
        table = csv.writer(text, delimiter=delimiter)
        table.writerow(["Path", " Label", "Subset"])
        for n, names in enumerate(data.classes):
            table.writerows([f"img/{n}.png", of(name), data.split(n)] for name in names)
        write(root, {"list.csv": text.getvalue().encode(encoding)})
        return f"csv:{root}/list.csv"

    return written


def as_jsonl(data: Data, root: Path, of: Callable[[str], object]) -> str:
    write(root, {f"img/{n}.png": numbered(n) for n in range(len(data.classes))})
    rows = [
        {"file_name": f"img/{n}.png", "label": [*map(of, names)], "split": data.split(n)}
        for n, names in enumerate(data.classes)
    ]
    write(root, {"metadata.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows).encode()})
    return f"csv:{root}/metadata.jsonl"


DIALECTS = {
    "folders": as_folder,
    "parquet": as_parquet,
    "parquet with a column of splits": as_parquet_with_splits,
    "json in tars": as_json_in_tars,
    "cls in tars": as_cls_in_tars,
    "csv": as_csv(",", "utf-8"),
    "csv of Excel": as_csv(";", "utf-16"),
    "jsonl": as_jsonl,
}
ONE_LABEL = ("folders", "cls in tars")


def read(source: Source) -> dict[int, tuple[str, set[str]]]:
    """Returns the split and the classes of each image by its number."""
    number = {numbered(n): n for n in range(256)}
    return {
        number[content]: (split, {source.classes[label] for label in (sample.label, *sample.others)})
        for split, samples in source.splits.items()
        for sample, content in zip(samples, source.fetch([s.image for s in samples]), strict=True)
        if isinstance(content, bytes)
    }


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[Data, bool]:
    numbers = draw(st.booleans())
    name = st.integers(0, 12).map(str) if numbers else TEXT.filter(is_plain)
    meant = unicodedata.normalize
    classes = draw(st.lists(name, min_size=2, max_size=5, unique_by=lambda n: name_of(meant("NFC", n))))
    some = st.lists(st.sampled_from(classes), min_size=1, max_size=3, unique=True)
    half = [[name] for name in classes] + draw(st.lists(some, max_size=3))
    return Data(half + half, draw(st.booleans())), numbers


@pytest.mark.parametrize("dialect", DIALECTS)
@given(drawn=data_sets())
def test_read_back(dialect: str, drawn: tuple[Data, bool]) -> None:
    data, numbers = drawn
    if dialect in ONE_LABEL:
        data = data._replace(classes=[names[:1] for names in data.classes])
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(
            DIALECTS[dialect](data, Path(folder, "x"), int if numbers else str), val_frac=0.4
        )
        found = read(source)
    assert {n: classes for n, (_, classes) in found.items()} == {
        n: {*map(name_of, names)} for n, names in enumerate(data.classes)
    }
    if data.is_split:
        named = {"train": "train", "validation": "val"}
        assert {n: split for n, (split, _) in found.items()} == {
            n: named[data.split(n)] for n in range(len(data.classes))
        }
    if numbers:
        assert source.classes == (
            tuple(sorted({n for names in data.classes for n in names}, key=int))
            if dialect == "folders"
            else tuple(map(str, range(len(source.classes))))
        )
