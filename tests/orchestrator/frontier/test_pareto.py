"""Dominance, hypervolume and knee: by hand, against their definitions, and on the 34 published runs."""

import csv
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchestrator.frontier.pareto import hypervolume_2d, knee, pareto_front

FIXTURE = Path(__file__).parents[2] / "fixtures" / "paper001_runs.csv"
NAN, INF = float("nan"), float("inf")

entry = st.one_of(st.integers(0, 4).map(float), st.sampled_from([NAN, INF, -INF, -0.0]))


@st.composite
def tables(draw: st.DrawFn) -> NDArray[np.float64]:
    """(0..12 points, 1..4 objectives) with many ties and some non-finite entries."""
    num_objectives = draw(st.integers(1, 4))
    row = st.lists(entry, min_size=num_objectives, max_size=num_objectives)
    return np.array(draw(st.lists(row, max_size=12)), dtype=np.float64).reshape(-1, num_objectives)


def dominates(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    return bool(np.isfinite(a).all() and (a <= b).all() and (a < b).any())


def test_front_by_hand() -> None:
    """Extremes (1, 3) and (3, 1); (2, 3) and (3, 2) are as good as one in one objective; (2, 2) twice."""
    costs = np.array([(1, 3), (2, 3), (2, 2), (3, 2), (3, 1), (2, 2), (4, 4)], dtype=np.float64)
    assert pareto_front(costs).tolist() == [True, False, True, False, True, True, False]


@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_front_of_nothing(objectives: int) -> None:
    assert pareto_front(np.zeros((0, objectives))).tolist() == []
    assert pareto_front(np.full((2, objectives), NAN)).tolist() == [False, False]


def test_not_finite_rows_are_out_and_dominate_nothing() -> None:
    costs = np.array([(1, 1), (-INF, -INF), (0, NAN), (0, INF)], dtype=np.float64)
    assert pareto_front(costs).tolist() == [True, False, False, False]


def test_front_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        pareto_front(np.zeros(3))


@given(tables())
def test_front_is_its_definition(costs: NDArray[np.float64]) -> None:
    expected = [bool(np.isfinite(b).all() and not any(dominates(a, b) for a in costs)) for b in costs]
    assert pareto_front(costs).tolist() == expected


def test_front_of_many_points() -> None:
    """Slow if the two-dimensional case were quadratic: 300 000 points would be 9e10 comparisons."""
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


def test_hypervolume_of_nothing() -> None:
    reference = np.ones(2)
    assert hypervolume_2d(np.zeros((0, 2)), reference) == 0
    assert hypervolume_2d(np.ones((1, 2)), reference) == 0


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=10))
def test_hypervolume_counts_dominated_cells(corners: list[tuple[int, int]]) -> None:
    cells = sum(any(x <= i and y <= j for x, y in corners) for i, j in product(range(7), range(7)))
    costs = np.array(corners, dtype=np.float64).reshape(-1, 2)
    assert hypervolume_2d(costs, np.array([7.0, 7.0])) == cells


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
        ([(0, 10), (9, 9), (10, 0)], 2),
    ],
    ids=["one", "two", "twice the same", "straight", "inward"],
)
def test_knee_without_a_bulge_is_the_best_second_objective(
    costs: list[tuple[float, float]], expected: int
) -> None:
    assert knee(np.array(costs, dtype=np.float64)) == expected


def test_no_knee_without_points() -> None:
    with pytest.raises(ValueError, match="no finite point among 2"):
        knee(np.full((2, 2), NAN))


RUNS = list(csv.DictReader(FIXTURE.open()))
QUALITIES = ("jft_prec_at_1_percent", "imagenet_10shot_percent")


def published(quality: str, family: str = "") -> tuple[list[str], NDArray[np.float64]]:
    """Names, and (runs, 2) of TPUv3-days and quality in percent, of routers whose name ends in `family`."""
    runs = [run for run in RUNS if run["router"].endswith(family)]
    names = [f"{run['architecture']} {run['router']} {run['capacity']}" for run in runs]
    return names, np.array([(run["train_tpuv3_days"], run[quality]) for run in runs], dtype=np.float64)


@pytest.mark.parametrize("log_cost", [True, False])
@pytest.mark.parametrize(
    ("quality", "front"),
    [
        (
            "jft_prec_at_1_percent",
            {
                "B32 softmax_expert_choice 1",
                "B32 soft 1",
                "B32 soft 2",
                "B16 soft 1",
                "B16 soft 2",
                "L16 soft 1",
                "L16 sinkhorn_expert_choice 2",
            },
        ),
        (
            "imagenet_10shot_percent",
            {
                "B32 softmax_expert_choice 1",
                "B32 sinkhorn_expert_choice 1",
                "B32 soft 1",
                "B32 soft 2",
                "B16 soft 1",
                "B16 soft 2",
                "L16 soft 1",
            },
        ),
    ],
)
def test_published_fronts(quality: str, front: set[str], log_cost: bool) -> None:
    names, runs = published(quality)
    assert len(runs) == 34
    days = np.log10(runs[:, 0]) if log_cost else runs[:, 0]
    on_front = pareto_front(np.stack([days, -runs[:, 1]], axis=1))
    assert {name for name, on in zip(names, on_front, strict=True) if on} == front


@pytest.mark.parametrize(
    ("quality", "worst_percent", "family", "log_cost", "expected", "digits"),
    [
        ("jft_prec_at_1_percent", 40, "", True, 19.053822, 6),
        ("jft_prec_at_1_percent", 40, "token_choice", True, 16.78703, 5),
        ("jft_prec_at_1_percent", 40, "expert_choice", True, 18.2496, 4),
        ("jft_prec_at_1_percent", 40, "soft", True, 18.79523, 5),
        ("jft_prec_at_1_percent", 40, "", False, 30260.1015, 4),
        ("imagenet_10shot_percent", 60, "", True, 22.621250, 6),
        ("imagenet_10shot_percent", 60, "token_choice", True, 19.9094, 4),
        ("imagenet_10shot_percent", 60, "expert_choice", True, 21.21399, 5),
        ("imagenet_10shot_percent", 60, "soft", True, 22.41279, 5),
        ("imagenet_10shot_percent", 60, "", False, 32204.4591, 4),
    ],
)
def test_published_hypervolumes(
    quality: str, worst_percent: float, family: str, log_cost: bool, expected: float, digits: int
) -> None:
    """To the printed digits, reference 2000 days."""
    _, runs = published(quality, family)
    costs, reference = runs * (1, -1), np.array([2000.0, -worst_percent])
    if log_cost:
        costs[:, 0], reference[0] = np.log10(costs[:, 0]), np.log10(reference[0])
    assert hypervolume_2d(costs, reference) == pytest.approx(expected, abs=0.5 * 10**-digits)


@pytest.mark.parametrize(
    ("cheaper", "dearer", "percent"),
    [
        ("B16 softmax_expert_choice 1", "B16 sinkhorn_expert_choice 1", 48.64),
        ("B32 sinkhorn_expert_choice 2", "B32 sparse_expert_choice 2", 44.30),
    ],
)
def test_published_ties_in_quality_go_to_the_cheaper(cheaper: str, dearer: str, percent: float) -> None:
    names, runs = published("jft_prec_at_1_percent")
    pair = runs[[names.index(cheaper), names.index(dearer)]]
    assert pair[:, 1].tolist() == [percent, percent]
    assert pareto_front(pair * (1, -1)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("quality", "expected"),
    [("jft_prec_at_1_percent", "B32 soft 1"), ("imagenet_10shot_percent", "B16 soft 1")],
)
def test_published_knees(quality: str, expected: str) -> None:
    """In log10 cost: .066 below the chord against .052 (L16 Soft c1), and .179 against .144 (B32 Soft c1)."""
    names, runs = published(quality)
    assert names[knee(np.stack([np.log10(runs[:, 0]), -runs[:, 1]], axis=1))] == expected
