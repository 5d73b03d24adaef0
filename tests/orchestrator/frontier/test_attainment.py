"""Attainment surfaces by hand and by definition; hypervolume by counting; both against moocore."""

import sys
from itertools import product

import moocore
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchestrator.frontier.attainment import attainment_2d, hypervolume
from orchestrator.frontier.pareto import hypervolume_2d

whole = st.integers(0, 6).map(float)
run = st.lists(st.tuples(whole, whole), min_size=1, max_size=5).map(np.array)


@pytest.mark.parametrize(
    ("share", "corners"),
    [(1 / 3, [[1, 3], [2, 2], [3, 1]]), (0.5, [[2, 3], [3, 2]]), (0.75, [[3, 3]]), (1, [[3, 3]])],
)
def test_surfaces_by_hand(share: float, corners: list[list[float]]) -> None:
    """Runs of one point each, (1, 3), (2, 2), (3, 1): two of three reach (2, 3) and (3, 2); all, (3, 3)."""
    runs = [np.array([point], dtype=np.float64) for point in ((1, 3), (2, 2), (3, 1))]
    assert attainment_2d(runs, share).tolist() == corners


@given(st.lists(run, min_size=1, max_size=5), st.sampled_from([0.25, 0.5, 0.75, 1.0]))
def test_a_surface_is_its_definition(runs: list[NDArray[np.float64]], share: float) -> None:
    """A place lies above the surface exactly where enough runs have a point at or below it."""
    corners = attainment_2d(runs, share)
    assert (np.diff(corners[:, 0]) > 0).all()
    assert (np.diff(corners[:, 1]) < 0).all()
    for place in product(range(8), repeat=2):
        reached = sum(bool((points <= place).all(axis=1).any()) for points in runs)
        assert bool((corners <= place).all(axis=1).any()) == (reached >= share * len(runs))


@given(st.lists(run, min_size=2, max_size=5))
def test_surfaces_agree_with_moocore(runs: list[NDArray[np.float64]]) -> None:
    sets = np.repeat(np.arange(len(runs)), [len(points) for points in runs])
    found = moocore.eaf(np.concatenate(runs), sets=sets, percentiles=[25, 50, 75])
    for percentile in (25, 50, 75):
        theirs = found[found[:, -1] == percentile, :2]
        assert attainment_2d(runs, percentile / 100).tolist() == theirs[theirs[:, 0].argsort()].tolist()


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=8))
def test_hypervolume_counts_dominated_cells(corners: list[tuple[int, ...]]) -> None:
    cells = sum(
        any(all(a <= b for a, b in zip(corner, cell, strict=True)) for corner in corners)
        for cell in product(range(4), repeat=3)
    )
    costs = np.array(corners, dtype=np.float64).reshape(-1, 3)
    assert hypervolume(costs, np.full(3, 4.0)) == pytest.approx(cells)


def test_not_finite_points_add_nothing() -> None:
    costs = np.array([(0, 0, 0), (np.nan, 0, 0), (-np.inf, 0, 0), (0, 2, 0)], dtype=np.float64)
    assert hypervolume(costs, np.array([1.0, 2.0, 3.0])) == 6
    assert hypervolume(costs[1:], np.array([1.0, 2.0, 3.0])) == 0


@given(st.lists(st.tuples(*[st.floats(0, 9)] * 2), min_size=1, max_size=20).map(np.array))
def test_two_objectives_agree_with_ours(costs: NDArray[np.float64]) -> None:
    reference = np.array([8.0, 9.0])
    assert hypervolume(costs, reference) == pytest.approx(hypervolume_2d(costs, reference))


def test_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moocore", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"3 objectives needs moocore: pip install 'moe-frontier\[fr"
    ):
        hypervolume(np.zeros((1, 3)), np.ones(3))
