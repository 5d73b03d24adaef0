"""Which samples validate, and tables of parts in any order."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from orchestrator.data.index import sample_ids
from orchestrator.errors import UsageError
from orchestrator.packing.samples import Part, Table, choose_validation, warn_if_sorted


def chosen(keys: Sequence[str], labels: Sequence[int], val_frac: float) -> set[str]:
    is_val = choose_validation(sample_ids(keys), np.array(labels), val_frac)
    return {key for key, val in zip(keys, is_val, strict=True) if val}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.sampled_from([0.01, 0.2, 0.5, 0.99]))
def test_validation_by_definition(labels: list[int], val_frac: float) -> None:
    """Splits go by the hash of the key; a class of two or more samples has some in each split."""
    keys = [f"key-{n}" for n in range(len(labels))]
    ids = dict(zip(keys, sample_ids(keys).tolist(), strict=True))
    expected = set()
    for label in set(labels):
        mine = sorted(
            (key for key, its in zip(keys, labels, strict=True) if its == label), key=ids.__getitem__
        )
        val = [key for key in mine if ids[key] < val_frac * 2**63] or mine[:1]
        expected |= {*val[: len(mine) - 1]}
    assert chosen(keys, labels, val_frac) == expected


def part(name: str, *labels: int | str) -> Part:
    keys = [f"{n}" for n in range(len(labels))]
    return Part(name, labels, keys, [(n, 1) for n in range(len(labels))])


def test_parts_come_in_any_order() -> None:
    """Classes, keys and splits are the same; parts follow their names."""
    parts = [part("b", "cat", "ape", "cat"), part("a", "dog", "ape"), part("c", "dog", "dog")]
    splits = {"a": "train", "b": "train", "c": "val"}
    tables = [Table(each, splits, 0.1) for each in (parts, parts[::-1])]
    for table in tables:
        assert table.classes == ("ape", "cat", "dog")
        assert table.labels.tolist() == [2, 0, 1, 0, 1, 2, 2]
        found = [(p.name, p.labels, p.keys) for split in ("train", "val") for p in table.parts(split)]
        assert found == [
            ("a", [2, 0], ["0", "1"]),
            ("b", [1, 0, 1], ["0#2", "1#2", "2"]),
            ("c", [2, 2], ["0#3", "1#3"]),
        ]
        assert [sample.image for sample in table.samples("val", mixed=False)] == [("c", 0, 1), ("c", 1, 1)]


def test_keys_that_begin_anew_in_each_part_are_not_one_sample() -> None:
    """Otherwise all samples of a key would go to one split."""
    names = [f"{n:03}" for n in range(100)]
    table = Table([part(name, 0, 1, 0) for name in names], dict.fromkeys(names), 0.3)
    assert 0.2 < table.is_val.mean() < 0.4


def test_numbers_beside_names() -> None:
    with pytest.raises(UsageError, match=r"some labels are numbers .*, some are names"):
        Table([part("a", 0, 1), part("b", "cat")], {"a": None, "b": None}, 0.1)


def test_random_order_raises_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Rare classes, and few samples per block, are no sorting; blocks of two classes out of a hundred are."""
    rng = np.random.default_rng(0)
    for weights in (np.ones(1000), 0.5 ** np.arange(12)):
        labels = rng.choice(len(weights), 4000, p=weights / weights.sum())
        for size in (2, 50, 512, 4000):
            warn_if_sorted(np.split(labels, range(size, 4000, size)), "x", "hint")
    assert not caplog.records
    warn_if_sorted(np.split(np.repeat(range(100), 40), range(80, 4000, 80)), "x", "hint")
    assert "x is sorted by class: 80 neighbouring samples hold 2.0 classes on average" in caplog.text
