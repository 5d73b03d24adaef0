"""Points of cost and quality: which may be on the front, and in which space they are judged."""

import math
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.errors import UsageError
from orchestrator.frontier.points import (
    Point,
    as_shown,
    front_points,
    hypervolume,
    hypervolume_by_budget,
    knee_point,
    knee_points,
    on_front,
)
from tests.orchestrator.frontier.samples import NAN, point

REFERENCE = (1e4, 0.0)


def soft(arm: str, cost: float, quality: float, status: str = "finished") -> Point:
    return replace(point(arm, "soft", cost, quality), status=status, run_id=arm)


def test_cheap_and_good_points_are_on_the_front() -> None:
    small, large = soft("small", 10, 0.5), soft("large", 1000, 0.9)
    points = (large, soft("poor", 100, 0.4), small, soft("dear", 2000, 0.9))
    assert on_front(points) == (True, False, True, False)
    assert front_points(points) == (small, large)
    assert on_front(()) == ()


@pytest.mark.parametrize(
    "best",
    [
        *(soft("x", 1, 0.99, status) for status in ("diverged", "failed", "running", "stopped")),
        *(soft("x", cost, 0.99) for cost in (NAN, 0, -1, float("inf"))),
        soft("x", 1, NAN),
    ],
)
def test_an_incomplete_point_is_not_on_the_front_and_dominates_nothing(best: Point) -> None:
    points = (best, soft("y", 10, 0.5))
    assert on_front(points) == (False, True)
    assert hypervolume(points, REFERENCE) == hypervolume(points[1:], REFERENCE)
    assert knee_point(points).arm == "y"
    with pytest.raises(ValueError, match="no finite point among 1"):
        knee_point([best])


def test_hypervolume_by_hand() -> None:
    """Reference (1e4, 0): at cost 10, 3 decades x .5; from cost 1000 on, 1 decade x (.9 - .5) more."""
    points = (soft("a", 10, 0.5), soft("b", 1000, 0.9), soft("beyond", 2e4, 0.99))
    assert hypervolume(points, REFERENCE) == pytest.approx(3 * 0.5 + 1 * 0.4)
    assert hypervolume(points, (1e4, 0.5)) == pytest.approx(0.4)


def test_knee_is_judged_in_log_cost() -> None:
    """By decades "middle" is at (.5, .4), far below the chord; by linear cost "low" would be the knee."""
    points = [soft("first", 1, 0.1), soft("low", 1e2, 0.35), soft("middle", 1e4, 0.7), soft("last", 1e8, 0.9)]
    assert knee_point(points).arm == "middle"


def test_the_knee_and_then_the_knee_of_the_others() -> None:
    """A diverged point is left out, a dense point is not."""
    burnt = soft("burnt", 1e9, 0.99, "diverged")
    points = [soft("a", 1e9, 0.2), point("b", "dense", 2e9, 0.8), soft("c", 4e9, 0.9)]
    assert [p.arm for p in knee_points([burnt, *points], 1)] == ["b"]
    assert {p.arm for p in knee_points([burnt, *points], 9)} == {"a", "b", "c"}


def test_standard_error_and_quality_text() -> None:
    """Of .1, .2 and .3: standard deviation .1, divided by the root of 3."""
    seeds = replace(soft("a", 1, 0.2), qualities=(0.1, 0.2, 0.3))
    assert seeds.standard_error == pytest.approx(0.1 / 3**0.5)
    assert seeds.quality_text == "0.2000 \N{PLUS-MINUS SIGN} 0.0577"
    assert np.isnan(soft("a", 1, 0.2).standard_error)
    assert (soft("a", 1, 0.2).quality_text, soft("a", 1, NAN).quality_text) == ("0.2000", "\N{EN DASH}")


def test_a_likelihood_is_shown_in_bits() -> None:
    """2^-2 are 2 bits; d bits / d quality is 1 / (quality ln 2)."""
    seeds = replace(soft("a", 1, 0.25), quality_name="val/likelihood", qualities=(0.15, 0.25, 0.35))
    assert seeds.quality_text == f"2.0000 \N{PLUS-MINUS SIGN} {0.1 / 3**0.5 / 0.25 / math.log(2):.4f}"
    assert replace(seeds, quality=NAN).quality_text == "\N{EN DASH}"
    assert as_shown("val/likelihood", 0.5) == ("val/bits_per_byte", 1.0)
    assert as_shown("val/acc1", 0.5) == ("val/acc1", 0.5)


def test_hypervolume_by_budget_by_hand() -> None:
    """Reference (1e4, 0): first 3 decades x .5, then 1 decade x .4 more. A stopped trial only costs."""
    points = [
        soft("large", 1000, 0.9),
        soft("small", 10, 0.5),
        soft("early", 10, 0.99, "stopped"),
        soft("poor", 500, 0.4),
    ]
    spending = [("small", 2.0), ("early", 1.0), ("large", 5.0), ("poor", 4.0), ("unlisted", 1.0)]
    curve = hypervolume_by_budget(points, REFERENCE, spending)
    assert curve[:, 0].tolist() == [2, 3, 8, 12, 13]
    assert curve[:, 1].tolist() == pytest.approx([1.5, 1.5, 1.9, 1.9, 1.9])
    assert curve[-1, 1] == pytest.approx(hypervolume(points, REFERENCE))


def test_a_point_is_known_with_the_last_entry_of_its_last_seed() -> None:
    two_seeds = replace(soft("a", 10, 0.5), run_id="a0", runs=(("a1", None),))
    spending = [("a0", 1.0), ("a1", 1.0), ("a0", 3.0)]
    assert hypervolume_by_budget([two_seeds], REFERENCE, spending).tolist() == [[1, 0], [2, 0], [5, 1.5]]
    assert hypervolume_by_budget([two_seeds], REFERENCE, spending[:1])[-1].tolist() == [1, 0]


def test_a_point_loads_the_seed_nearest_to_its_mean() -> None:
    """0.8 of 0.7, 0.8 and 0.92, whose mean is 0.807. An arm that is not finished has no model."""
    seeds = replace(
        soft("a", 10, 0.807),
        qualities=(0.7, 0.8, 0.92),
        runs=(("a1", None), ("a2", None)),
        load_run="the model of {}".format,
    )
    assert (seeds.typical_run, seeds.load()) == ("a1", "the model of a1")
    with pytest.raises(UsageError, match="arm 'a' is running, not finished: it has no trained model yet"):
        replace(seeds, status="running").load()
    with pytest.raises(UsageError, match="'b' is a point without weights of its own"):
        soft("b", 10, 0.5).load()
