"""Dominance, hypervolume and knee: by hand, by their definitions, and on the runs that a paper printed."""

import csv
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from optuna._hypervolume import compute_hypervolume

from orchestrator.frontier.pareto import hypervolume_2d, knee, pareto_front

NAN, INF = float("nan"), float("inf")
RUNS = list(csv.DictReader((Path(__file__).parents[2] / "fixtures" / "paper001_runs.csv").open()))

entry = st.one_of(st.integers(0, 4).map(float), st.sampled_from([NAN, INF, -INF, -0.0]))


def dominates(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    return bool(np.isfinite(a).all() and (a <= b).all() and (a < b).any())


def test_front_by_hand() -> None:
    """Extremes (1, 3) and (3, 1); (2, 3) and (3, 2) are as good as one in one objective; (2, 2) twice."""
    costs = np.array([(1, 3), (2, 3), (2, 2), (3, 2), (3, 1), (2, 2), (4, 4)], dtype=np.float64)
    assert pareto_front(costs).tolist() == [True, False, True, False, True, True, False]


def test_front_of_nothing_and_of_other_shapes() -> None:
    assert pareto_front(np.zeros((0, 2))).tolist() == []
    assert pareto_front(np.full((2, 2), NAN)).tolist() == [False, False]
    for shape in ((3,), (3, 3)):
        with pytest.raises(ValueError, match=r"must be \(points, 2\), got shape \(3,"):
            pareto_front(np.zeros(shape))


@given(st.lists(st.tuples(entry, entry), max_size=12))
def test_front_is_its_definition(rows: list[tuple[float, float]]) -> None:
    """With many ties and some entries that are not finite, which are out and dominate nothing."""
    costs = np.array(rows, dtype=np.float64).reshape(-1, 2)
    expected = [bool(np.isfinite(b).all() and not any(dominates(a, b) for a in costs)) for b in costs]
    assert pareto_front(costs).tolist() == expected


def test_hypervolume_by_hand() -> None:
    """(1, 3): 3 x 1, (2, 1): 2 x 2 more, below the reference (4, 4); the others add nothing."""
    costs = np.array([(1, 3), (2, 1), (3, 3), (1, 4), (0, 5), (NAN, 0), (2, 1)], dtype=np.float64)
    assert hypervolume_2d(costs, np.array([4.0, 4.0])) == 7
    assert hypervolume_2d(np.zeros((0, 2)), np.ones(2)) == 0
    assert hypervolume_2d(np.ones((1, 2)), np.ones(2)) == 0


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=10))
def test_hypervolume_counts_dominated_cells_and_agrees_with_optuna(corners: list[tuple[int, int]]) -> None:
    cells = sum(any(x <= i and y <= j for x, y in corners) for i, j in product(range(9), range(9)))
    costs, reference = np.array(corners, dtype=np.float64).reshape(-1, 2), np.array([9.0, 9.0])
    assert hypervolume_2d(costs, reference) == cells
    if corners:
        assert compute_hypervolume(costs, reference) == cells


def test_knee_by_hand() -> None:
    """Scaled to 0..1, (2, 20) is (.1, .1) and .8 below x + y = 1; (6, 12) is (.5, .02) and .48 below."""
    costs = np.array([(9, 99), (1, 110), (6, 12), (2, 20), (11, 10), (2, 20)], dtype=np.float64)
    assert knee(costs) == 3


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([(5, 5)], 0),
        ([(1, 2), (2, 1)], 1),
        ([(1, 1), (1, 1), (NAN, 0)], 0),
        ([(0, 1), (0.1, 0.9), (0.3, 0.7), (1, 0)], 3),
        ([(0, 0.4), (0.1, 0.3), (0.4, 0)], 2),
        ([(0, 10), (9, 9), (10, 0)], 2),
    ],
    ids=["one", "two", "twice the same", "straight", "straight but for rounding", "inward"],
)
def test_knee_without_a_bulge_is_the_best_second_objective(
    costs: list[tuple[float, float]], expected: int
) -> None:
    assert knee(np.array(costs, dtype=np.float64)) == expected


def test_no_knee_without_points() -> None:
    with pytest.raises(ValueError, match="no finite point among 2"):
        knee(np.full((2, 2), NAN))


def test_published_front_knee_and_hypervolume() -> None:
    """In (log10 TPUv3-days, negative percent). The knee lies .179 below the chord, the next point .144."""
    names = [f"{run['architecture']} {run['router']} {run['capacity']}" for run in RUNS]
    rows = [
        (np.log10(float(run["train_tpuv3_days"])), -float(run["imagenet_10shot_percent"])) for run in RUNS
    ]
    costs = np.array(rows)
    assert {name for name, on in zip(names, pareto_front(costs), strict=True) if on} == {
        "B32 softmax_expert_choice 1",
        "B32 sinkhorn_expert_choice 1",
        *(f"{size} soft {capacity}" for size in ("B32", "B16") for capacity in (1, 2)),
        "L16 soft 1",
    }
    assert names[knee(costs)] == "B16 soft 1"
    assert hypervolume_2d(costs, np.array([np.log10(2000), -60])) == pytest.approx(22.621250, abs=5e-7)
