"""Points of cost and quality: who may be on the front, and in which space they are judged."""

from dataclasses import replace
from math import log10

import pytest

from orchestrator.frontier.points import (
    Frontier,
    Point,
    Status,
    front_points,
    hypervolume,
    knee_point,
    on_front,
)

NAN = float("nan")


def point(arm: str, cost: float, quality: float, status: Status = "finished") -> Point:
    return Point(arm=arm, family="soft", cost=cost, quality=quality, size=1, run_id=arm, status=status)


def frontier(
    *points: Point, rest: tuple[Point, ...] = (), reference: tuple[float, float] = (1e4, 0.0)
) -> Frontier:
    names = {"name": "test", "cost_name": "cost/device_s", "quality_name": "val/acc1"}
    return Frontier(**names, points=points, rest=rest, reference=reference)


def test_cheap_and_good_are_on_the_front() -> None:
    small, large, poor, dear = (
        point("small", 10, 0.5),
        point("large", 1000, 0.9),
        point("poor", 100, 0.4),
        point("dear", 2000, 0.9),
    )
    found = frontier(large, poor, small, dear)
    assert on_front(found) == (True, False, True, False)
    assert front_points(found) == (small, large)


@pytest.mark.parametrize(
    "best",
    [
        point("x", 1, 0.99, "diverged"),
        point("x", 1, 0.99, "failed"),
        point("x", 1, 0.99, "running"),
        point("x", NAN, 0.99),
        point("x", 1, NAN),
        point("x", 0, 0.99),
        point("x", -1, 0.99),
        point("x", float("inf"), 0.99),
    ],
    ids=["diverged", "failed", "running", "cost nan", "quality nan", "cost 0", "cost negative", "cost inf"],
)
def test_an_incomplete_point_is_not_on_the_front_and_dominates_nothing(best: Point) -> None:
    found = frontier(best, point("y", 10, 0.5))
    assert on_front(found) == (False, True)
    assert hypervolume(found) == hypervolume(frontier(point("y", 10, 0.5)))
    assert knee_point(found.points).arm == "y"


def test_hypervolume_by_hand() -> None:
    """Reference (1e4, 0): at cost 10, 3 decades x .5; from cost 1000 on, 1 decade x (.9 - .5) more."""
    points = (point("a", 10, 0.5), point("b", 1000, 0.9), point("beyond", 2e4, 0.99))
    assert hypervolume(frontier(*points)) == pytest.approx(3 * 0.5 + 1 * 0.4)
    assert hypervolume(frontier(*points, reference=(1e4, 0.5))) == pytest.approx(0.4)


def test_confirmation_runs_count_nowhere() -> None:
    counted = frontier(point("a", 10, 0.5))
    confirmed = replace(counted, rest=(point("a x10", 5, 0.9),))
    assert hypervolume(confirmed) == hypervolume(counted)
    assert front_points(confirmed) == counted.points


def test_nothing_finished() -> None:
    empty = frontier(point("a", NAN, NAN, "failed"))
    assert on_front(empty) == (False,)
    assert hypervolume(empty) == 0
    assert on_front(frontier()) == ()
    with pytest.raises(ValueError, match="no finite point among 1"):
        knee_point(empty.points)


def test_knee_is_judged_in_log_cost() -> None:
    """By decades "middle" lies (.5, .4) and far below the chord; by linear cost "low" would be the knee."""
    points = (
        point("first", 1, 0.1),
        point("low", 1e2, 0.35),
        point("middle", 1e4, 0.7),
        point("last", 1e8, 0.9),
    )
    assert log10(points[2].cost) == 4
    assert knee_point(points).arm == "middle"


@pytest.mark.parametrize("reference", [(0.0, 0.1), (NAN, 0.1), (float("inf"), 0.1), (1e9, NAN)])
def test_a_useless_reference_is_refused(reference: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="reference needs a finite cost above 0"):
        frontier(reference=reference)
