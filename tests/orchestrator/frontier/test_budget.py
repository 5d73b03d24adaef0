"""Hypervolume against budget, by hand."""

from dataclasses import replace

import pytest

from orchestrator.frontier.budget import hypervolume_by_budget
from orchestrator.frontier.points import Frontier, Point, Status, hypervolume

NAN = float("nan")


def point(cost: float, quality: float, ended: float, spent: float, status: Status = "finished") -> Point:
    return Point(
        arm="x",
        family="soft",
        cost=cost,
        quality=quality,
        size=1,
        run_id="x",
        status=status,
        spent=spent,
        ended=ended,
    )


POINTS = (
    point(1000, 0.9, ended=30, spent=5),
    point(10, 0.5, ended=10, spent=2),
    point(10, 0.99, ended=20, spent=1, status="stopped"),
    point(500, 0.4, ended=40, spent=4),
    point(1, 0.99, ended=NAN, spent=100, status="running"),
)
FOUND = Frontier(name="x", cost_name="c", quality_name="q", points=POINTS, reference=(1e4, 0.0))


def test_curve_by_hand() -> None:
    """Reference (1e4, 0). First 3 decades x .5; a stopped trial only costs; then 1 decade x .4 more."""
    curve = hypervolume_by_budget(FOUND)
    assert curve[:, 0].tolist() == [2, 3, 8, 12]
    assert curve[:, 1].tolist() == pytest.approx([1.5, 1.5, 1.9, 1.9])
    assert curve[-1, 1] == pytest.approx(hypervolume(FOUND))


def test_no_times_no_curve() -> None:
    assert hypervolume_by_budget(replace(FOUND, points=POINTS[-1:])).shape == (0, 2)
