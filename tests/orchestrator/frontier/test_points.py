"""Points of cost and quality: who may be on the front, and in which space they are judged."""

from dataclasses import replace
from math import log10

import pytest

from orchestrator.frontier.points import (
    Frontier,
    Point,
    Status,
    family_fronts,
    front_points,
    hypervolume,
    knee_point,
    on_front,
    panel,
    standings,
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
        point("x", 1, 0.99, "stopped"),
        point("x", NAN, 0.99),
        point("x", 1, NAN),
        point("x", 0, 0.99),
        point("x", -1, 0.99),
        point("x", float("inf"), 0.99),
    ],
    ids=[
        "diverged",
        "failed",
        "running",
        "stopped",
        "cost nan",
        "quality nan",
        "cost 0",
        "cost negative",
        "cost inf",
    ],
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


def test_standings_by_hand() -> None:
    """By decades (1, 0), (.5, .4), (0, 1) scaled: the middle lies below the chord. Equal points both stay."""
    points = (
        point("low", 1, 0.1),
        point("middle", 1e2, 0.6),
        point("high", 1e4, 0.9),
        point("same", 1e4, 0.9),
        point("poor", 1e4, 0.8),
        point("early", 1, 0.99, "stopped"),
    )
    found = frontier(*points, rest=(point("again", 5, 0.95), point("burnt", 5, NAN, "diverged")))
    places = (
        "frontier",
        "frontier, knee",
        "frontier",
        "frontier",
        "dominated",
        "stopped",
        "confirm",
        "diverged",
    )
    assert standings(found) == places
    assert standings(frontier(point("a", NAN, NAN, "failed"))) == ("failed",)


def test_each_family_has_its_own_front() -> None:
    small, large = point("small", 10, 0.5), point("large", 100, 0.6)
    beaten = replace(point("dense", 50, 0.4), family="dense")
    burnt = replace(point("burnt", 1, NAN, "diverged"), family="hash")
    found = family_fronts(frontier(large, beaten, burnt, small, point("poor", 200, 0.3)))
    assert found == {"soft": (small, large), "dense": (beaten,)}


def test_a_panel_judges_the_same_points_by_another_cost() -> None:
    """By time the larger is the cheaper, hence alone on the front; the one without a time is out."""
    small = replace(point("small", 10, 0.5), costs={"cost/device_s": 8.0})
    large = replace(point("large", 100, 0.6), costs={"cost/device_s": 4.0})
    found = panel(frontier(small, large, point("untimed", 1, 0.9), rest=(small,)), "cost/device_s")
    assert (found.cost_name, found.quality_name) == ("cost/device_s", "val/acc1")
    assert [p.arm for p in front_points(found)] == ["large"]
    assert [p.cost for p in found.rest] == [8]
    assert found.reference == (pytest.approx(8.8), 0)
    assert panel(frontier(), "cost/device_s").points == ()
