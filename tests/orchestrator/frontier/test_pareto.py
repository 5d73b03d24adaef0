"""Dominance, ranks, hypervolume and knee: by hand, against their definitions and other libraries."""

from itertools import product

import moocore
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from optuna._hypervolume import compute_hypervolume

from orchestrator.frontier.pareto import epsilon_front, hypervolume_2d, knee, pareto_front, ranks

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


def test_ranks_by_hand() -> None:
    """(1, 2) and (2, 1) first, then (2, 2) twice, then (3, 3); what is not finite comes last."""
    costs = np.array([(3, 3), (2, 2), (1, 2), (2, 1), (NAN, 0), (2, 2), (INF, 0)], dtype=np.float64)
    assert ranks(costs).tolist() == [2, 1, 0, 0, 3, 1, 3]
    assert ranks(np.zeros((0, 2))).tolist() == []
    assert ranks(np.full((1, 2), NAN)).tolist() == [0]


@given(tables())
def test_ranks_peel_fronts(costs: NDArray[np.float64]) -> None:
    left, expected, rank = costs.copy(), np.full(len(costs), -1), 0
    while (front := pareto_front(left)).any():
        expected[front], left[front], rank = rank, NAN, rank + 1
    expected[expected < 0] = rank
    assert ranks(costs).tolist() == expected.tolist()


def test_ranks_of_a_long_chain_and_of_many_points() -> None:
    chain = np.repeat(np.arange(2000.0), 3).reshape(-1, 3)
    assert ranks(chain).tolist() == list(range(2000))
    costs = np.random.default_rng(0).random((3000, 2))
    assert ((ranks(costs) == 0) == pareto_front(costs)).all()


def test_epsilon_front_by_hand() -> None:
    """Within (.5, .5): (1, 3) covers (1.5, 2.9); (2, 1) then covers (2.4, .6), .4 better, and its double."""
    costs = np.array([(1.5, 2.9), (1, 3), (2.4, 0.6), (2, 1), (2, 1), (3, 3)])
    assert epsilon_front(costs, np.full(2, 0.5)).tolist() == [False, True, False, True, False, False]
    assert epsilon_front(costs, np.zeros(2)).tolist() == [True, True, True, True, False, False]
    assert epsilon_front(np.zeros((0, 2)), np.zeros(2)).tolist() == []


@given(tables(), st.integers(0, 3))
def test_epsilon_front_covers_every_point(costs: NDArray[np.float64], epsilon: int) -> None:
    kept = epsilon_front(costs, np.full(costs.shape[1], float(epsilon)))
    assert not (kept & ~pareto_front(costs)).any()
    for row in costs[np.isfinite(costs).all(axis=1)]:
        assert (costs[kept] - epsilon <= row).all(axis=1).any()
    members = sorted(map(tuple, costs[kept].tolist()))
    for index, later in enumerate(members):
        assert not any(all(a - epsilon <= b for a, b in zip(m, later, strict=True)) for m in members[:index])


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


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_hypervolume_agrees_with_optuna(corners: list[tuple[int, int]]) -> None:
    costs, reference = np.array(corners, dtype=np.float64), np.array([9.0, 9.0])
    assert hypervolume_2d(costs, reference) == pytest.approx(compute_hypervolume(costs, reference))


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=12))
def test_fronts_and_ranks_agree_with_moocore(rows: list[tuple[int, ...]]) -> None:
    costs = np.array(rows, dtype=np.float64)
    assert pareto_front(costs).tolist() == moocore.is_nondominated(costs, keep_weakly=True).tolist()
    distinct = np.unique(costs, axis=0)  # theirs puts equal points on different ranks
    assert ranks(distinct).tolist() == moocore.pareto_rank(distinct).tolist()


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
