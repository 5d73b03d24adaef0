"""The page of the study says what its table of runs says."""

import json

import pytest

from bench.study import BLOCKS, COST, PAGE, TABLE, VAL, differences, interval, with_block


def table() -> dict[str, object]:
    return json.loads(TABLE.read_text())


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "replay"])  # which takes half a minute
def test_the_page_is_recomputed(name: str) -> None:
    page = PAGE.read_text()
    assert with_block(page, name, BLOCKS[name](table())) == page


def test_the_table_is_whole() -> None:
    arms = table()["arms"]
    assert len(arms) == 18
    for arm, entry in arms.items():
        assert all(len(values) == 5 for name, values in entry.items() if name != COST), arm
        assert all(len(curve) == 16 for curve in entry[VAL]), arm


def test_differences_by_hand() -> None:
    """1e12 is halfway between 1e11 and 1e13 on a log scale: dense models have 0.6 and 0.7 there, by seed."""
    dense = {"w1-dense": (1e11, [0.5, 0.6]), "w2-dense": (1e13, [0.7, 0.8])}
    arms = {**dense, "w1-soft": (1e12, [0.7, 0.65]), "w2-soft": (1e14, [0.8, 0.9])}
    made = {arm: {COST: cost, "q": values} for arm, (cost, values) in arms.items()}
    found = differences({"arms": {a: e | {VAL: [[0.0]]} for a, e in made.items()}}, "q")
    assert found["w1-soft"] == pytest.approx([0.1, -0.05])
    assert found["w2-soft"] == pytest.approx([0.0, 0.0])  # beyond the last width, on the line of the two
    low, high = interval([0.1, 0.2, 0.3])  # t of 2 degrees: 4.3027; standard error .1 / sqrt(3)
    assert (low, high) == pytest.approx((0.2 - 0.24842, 0.2 + 0.24842), abs=1e-4)
