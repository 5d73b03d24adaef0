"""Dominance, hypervolume and knee: by hand, by their definitions, and on the runs that a paper printed."""

import csv
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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


def test_front_of_many_points() -> None:
    """Slow if it were quadratic: 300 000 points would be 9e10 comparisons."""
    costs = np.random.default_rng(0).random((300_000, 2))
    front = costs[pareto_front(costs)]
    by_first = front[np.argsort(front[:, 0])]
    assert (np.diff(by_first[:, 1]) < 0).all()
    assert by_first[0, 0] == costs[:, 0].min()
    assert by_first[-1, 1] == costs[:, 1].min()


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


def published(quality: str, family: str = "") -> tuple[list[str], NDArray[np.float64]]:
    """Names, and (runs, 2): log10 TPUv3-days and negative percent; of routers whose name ends in `family`."""
    runs = [run for run in RUNS if run["router"].endswith(family)]
    names = [f"{run['architecture']} {run['router']} {run['capacity']}" for run in runs]
    costs = [(np.log10(float(run["train_tpuv3_days"])), -float(run[quality])) for run in runs]
    return names, np.array(costs)


def test_published_front_and_knee() -> None:
    """The knee lies .179 below the chord, the next point .144."""
    names, costs = published("imagenet_10shot_percent")
    assert {name for name, on in zip(names, pareto_front(costs), strict=True) if on} == {
        "B32 softmax_expert_choice 1",
        "B32 sinkhorn_expert_choice 1",
        *(f"{size} soft {capacity}" for size in ("B32", "B16") for capacity in (1, 2)),
        "L16 soft 1",
    }
    assert names[knee(costs)] == "B16 soft 1"


def test_published_hypervolumes() -> None:
    """To the printed digits; the reference is at 2000 days and 40 or 60 percent."""
    jft, shots = "jft_prec_at_1_percent", "imagenet_10shot_percent"
    for quality, worst_percent, family, expected, digits in (
        (jft, 40, "", 19.053822, 6),
        (jft, 40, "token_choice", 16.78703, 5),
        (shots, 60, "", 22.621250, 6),
        (shots, 60, "soft", 22.41279, 5),
    ):
        _, costs = published(quality, family)
        reference = np.array([np.log10(2000), -worst_percent])
        assert hypervolume_2d(costs, reference) == pytest.approx(expected, abs=0.5 * 10**-digits)
