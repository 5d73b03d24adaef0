"""Differences at equal cost by hand: interpolation, intervals, Holm, and what a claim makes of them."""

import math
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from scipy import stats

from orchestrator.frontier.claims import check_claim, comparisons, parse_claim, why_nothing
from orchestrator.frontier.paired import (
    decide,
    equivalence_p_value,
    holm,
    interval,
    meets,
    p_value,
    paired_differences,
)
from orchestrator.frontier.points import Point
from tests.orchestrator.frontier import samples

CLAIM = "kind=soft|hash beats kind=dense at equal cost"


def point(arm: str, cost: float, *qualities: float, **settings: Any) -> Point:
    return samples.point(
        arm, arm.split("-")[-1], cost, fmean(qualities), qualities=qualities, settings=settings
    )


DENSE = [point("w2-dense", 1e13, 0.7, 0.8), point("w1-dense", 1e11, 0.5, 0.6)]


@pytest.mark.parametrize(
    ("cost", "qualities", "found"),
    [
        (1e12, (0.7, 0.65), (0.1, -0.05)),  # halfway on a log scale: .6 and .7 there
        (1e11, (0.5, 0.7), (0.0, 0.1)),
        (10**13.05, (0.8, 0.9), (0.095, 0.095)),  # beyond the ends, on the line of the two
        (10**10.95, (0.5, 0.6), (0.005, 0.005)),
    ],
)
def test_differences_by_hand(cost: float, qualities: tuple[float, ...], found: tuple[float, ...]) -> None:
    soft = point("w1-soft", cost, *qualities)
    assert meets(DENSE, soft)
    assert paired_differences(soft, DENSE) == pytest.approx(found)


def test_a_curve_ends() -> None:
    """A fifth beyond its ends, at one point, and at another number of seeds."""
    assert not meets(DENSE, point("w3-soft", 1.21e13, 0.9, 0.9))
    assert not meets(DENSE, point("w0-soft", 1e11 / 1.21, 0.9, 0.9))
    assert not meets(DENSE[:1], point("w1-soft", 1e13, 0.9, 0.9))
    assert not meets(DENSE, point("w1-soft", 1e12, 0.9, 0.9, 0.9))
    assert meets(DENSE, point("w1-soft", math.nan, 0.9, 0.9))  # before anything is trained


def test_intervals_and_p_values_are_students() -> None:
    found = interval([0.1, 0.2, 0.3])  # t of 2 degrees: 4.3027; standard error .1 / sqrt(3)
    assert (found.mean, found.half) == pytest.approx((0.2, 0.24842), abs=1e-4)
    values = np.random.default_rng(0).normal(0.01, 0.02, 5).tolist()
    assert p_value(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert (p_value([0.1]), p_value([0.1, 0.1]), p_value([0.0, 0.0])) == (0, 0, 1)


def test_equivalence_is_two_one_sided_tests() -> None:
    """.001 to .003 has a standard error of .001 / sqrt(3): .003 - .002 has t = 1.732, p = .1127 with 2
    degrees.
    """
    assert equivalence_p_value([0.001, 0.002, 0.003]) == pytest.approx(0.1127, abs=1e-4)
    assert equivalence_p_value([-0.001, -0.002, -0.003]) == pytest.approx(0.1127, abs=1e-4)
    values = np.random.default_rng(0).normal(0.001, 0.002, 5)
    above, below = (
        stats.ttest_1samp(values, bound, alternative=side).pvalue
        for bound, side in ((-0.003, "greater"), (0.003, "less"))
    )
    assert equivalence_p_value(values.tolist()) == pytest.approx(max(above, below))
    assert (equivalence_p_value([0.001, 0.001]), equivalence_p_value([0.003, 0.003])) == (0, 1)
    assert equivalence_p_value([0.0]) == 1  # its error is not known


def test_equal_is_corrected_for_the_number_of_comparisons() -> None:
    same = [-0.0016, 0.0005, 0.0018, -0.0006]
    assert equivalence_p_value(same) == pytest.approx(0.01337, abs=1e-5)  # 3.7 times as much is 5 %
    assert decide([same] * 3) == ["equal"] * 3
    assert decide([same] * 4) == ["undecided"] * 4


def test_holm_by_hand() -> None:
    """The least p is multiplied by 4, the next by 3, ..; none gets below the one before it."""
    assert holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([]) == []


def three(arm: str, cost: float, mean: float, spread: float, **settings: Any) -> Point:
    return point(arm, cost, mean - spread, mean, mean + spread, **settings)


def test_outcomes_of_a_claim_by_hand() -> None:
    """Three dense seeds without a spread, so that the differences have the spread of the arms: t is
    mean / (spread / sqrt(3)), and 4.30 is 5 % of two degrees.
    """
    dense = [three("w1-dense", 1e10, 0.6, 0), three("w2-dense", 1e12, 0.8, 0)]
    arms = [
        three("w1-soft", 1e11, 0.71, 0.003, size="w1"),  # +.01, t = 5.8, p = .029; twice is above 5 %
        three("w1-hash", 1e11, 0.71, 0.003, size="w1"),
        three("w2-soft", 1e12, 0.75, 0.005, size="w2"),  # -.05, t = 17.3, p = .0033
        three("w2-hash", 1e12, 0.801, 0.0004, size="w2"),  # +.001, though t = 4.33
        three("w3-hash", 1e11, 0.71, 0.003, size="w3"),  # the same, but alone at its size
    ]
    verdict = check_claim(CLAIM, dense + arms)
    of = {
        name: [each.split(", ")[1].split()[0] for each in verdict.of(name)]
        for name in ("better", "worse", "equal", "undecided")
    }
    assert of == {
        "better": ["w3-hash"],
        "worse": ["w2-soft"],
        "equal": ["w2-hash"],
        "undecided": ["w1-soft", "w1-hash"],
    }
    assert str(verdict) == "false: 1 of 5 comparisons hold, 1 equal, 2 undecided"
    assert verdict.of("equal") == (
        "difference 0.0010 +- 0.0010, w2-hash 0.8010 ± 0.0002,"
        " w1-dense 0.6000 ± 0.0000, w2-dense 0.8000 ± 0.0000",
    )
    alone = check_claim(CLAIM, [*dense, arms[4]])
    assert (str(alone), alone.by_values_alone) == ("true: 1 of 1 comparisons hold", False)
    only_equal = check_claim(CLAIM, [*dense, arms[3]])
    assert (str(only_equal), only_equal.by_values_alone) == (
        "false: 0 of 1 comparisons hold, 1 equal",
        False,
    )


def test_single_seeds_are_of_the_mean_values() -> None:
    points = [point("w1-dense", 1e10, 0.6), point("w2-dense", 1e12, 0.8), point("w1-soft", 1e11, 0.75)]
    assert str(check_claim(CLAIM, points)) == (
        "true of the mean values: 1 of 1 comparisons hold; 1 comparison has one seed, so it is not decided"
    )


def test_each_kind_of_the_second_side_is_a_curve() -> None:
    """Its own kind is none, cells of further settings are apart, and arms of one size are no curve."""
    points = [
        point(f"{size}-{kind}", cost, 0.5, 0.6, steps=steps)
        for kind in ("dense", "soft", "hash")
        for size, cost, steps in (("w1", 1e10, 1), ("w2", 1.1e10, 1), ("w3", 1e10, 2))
    ]
    found = comparisons(parse_claim("kind=soft beats kind!=soft at equal cost"), points)
    assert [(each.more[0].arm, [p.arm for p in each.less]) for each in found] == [
        (f"{size}-soft", [f"w{i}-{kind}" for i in (1, 2, 3)])
        for size in ("w1", "w2", "w3")
        for kind in ("dense", "hash")
    ]
    found = comparisons(parse_claim("kind!=dense beats kind=dense at equal cost, steps"), points)
    assert [each.more[0].arm for each in found] == ["w1-soft", "w2-soft", "w1-hash", "w2-hash"]
    assert found[0].where == "steps=1"
    claim = parse_claim(CLAIM)
    assert why_nothing(claim, [points[0], *points[3:6]]) == (
        "no kind with kind=dense has two arms around the cost of one with kind=soft|hash"
    )


def test_the_best_at_equal_cost_is_refused() -> None:
    for text in (
        "best kind=soft beats kind=dense at equal cost",
        "kind=soft loses less than kind=dense at equal cost as k falls",
    ):
        with pytest.raises(ValueError, match="at equal cost all points are compared"):
            parse_claim(text)
