"""Operating points beside trained models, with areas by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.frontier.facts import point_facts
from orchestrator.frontier.figure import frontier_panel
from orchestrator.frontier.operating import gains, operating_costs, operating_front
from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.picture import frontier_picture
from orchestrator.frontier.points import Frontier, Point, panel, standings
from tests.orchestrator.frontier.samples import FRONTIER, point

COST = "cost/forward_gflops_2mac"
TIME = "perf/ms_per_image"


def trained(arm: str, family: str, cost: float, quality: float) -> Point:
    return replace(point(arm, family, 1e10, quality), costs={COST: cost})


def otherwise(arm: str, cost: float, quality: float) -> Point:
    return replace(trained(arm, "soft", cost, quality), cost=math.nan)


SOME = Frontier(
    name="points",
    cost_name="cost/train_flops_6mac",
    quality_name="val/acc1",
    points=(trained("dense", "dense", 10, 0.5), trained("soft", "soft", 100, 0.8)),
    operating=(otherwise("soft: experts=2", 10, 0.6), otherwise("soft: experts=1", 1, 0.3)),
    reference=(1e11, 0.0),
    panels=(COST,),
)


def test_gain_by_hand():
    """The reference is at 1.1 * 100 = 110 GFLOP and quality 0; area is decades of cost times quality.

    All models: dense (10, .5) is the front up to soft (100, .8): 1 * .5 + log10(1.1) * .8. With points: 1 to
    10 .3, from 10 to 100 .6, then .8. MoE alone without: log10(1.1) * .8.
    """
    last = math.log10(1.1) * 0.8
    everyone, moe = gains(SOME)
    assert (everyone.models, moe.models) == ("all models", "MoE models alone")
    assert everyone.without == pytest.approx(0.5 + last)
    assert everyone.with_points == moe.with_points == pytest.approx(0.3 + 0.6 + last)
    assert moe.without == pytest.approx(last)
    assert str(replace(moe, without=0.5, with_points=0.6)) == "0.5000 → 0.6000 (+20.0%)"


def test_without_a_dense_model_there_is_one_gain():
    assert [gain.models for gain in gains(replace(SOME, points=SOME.points[1:]))] == ["all models"]


def timed(arm: str, quality: float, low: float, median: float, high: float) -> Point:
    return replace(trained(arm, "soft", 1, quality), costs={TIME: median}, spreads={TIME: (low, high)})


def times(*operating: Point) -> Frontier:
    """A model of quality 0.8 that takes 100 ms, quartiles 80 and 120; the reference is 110 ms, quality 0."""
    return replace(SOME, points=(timed("soft", 0.8, 80, 100, 120),), operating=operating, panels=(TIME,))


def test_a_gain_within_the_spread_is_none():
    """At 85 ms it is faster by the medians; its upper quartile, 90, is above the model's lower one, 80."""
    (gain,) = gains(times(timed("soft: experts=2", 0.8, 70, 85, 90)))
    assert gain.with_points == gain.without == pytest.approx(math.log10(1.1) * 0.8)
    assert str(gain) == "none: within the spread of the times"


def test_a_gain_beyond_the_spread_has_a_lower_bound():
    """By the medians the point adds 0.6 from 10 to 100 ms. At the upper quartiles the point alone, at 20 ms,
    holds 0.6 from there to 110 ms; without it the model holds, at its lower quartile, 0.8 from 80 to 110 ms.
    """
    (gain,) = gains(times(timed("soft: experts=2", 0.6, 9, 10, 20)))
    assert gain.without == pytest.approx(math.log10(1.1) * 0.8)
    assert gain.with_points == pytest.approx(math.log10(1.1) * 0.8 + 0.6)
    assert gain.at_least == pytest.approx(0.6 * math.log10(5.5) / (0.8 * math.log10(11 / 8)) - 1)
    assert str(gain) == "0.0331 → 0.6331 (+1811.9%, at least +301.5% by the quartiles of the times)"


def test_a_little_more_quality_at_a_noisy_time_is_no_gain():
    """0.82 at 90 ms by the median, 75 to 130: more than twice the hypervolume, all of it the clock's."""
    (gain,) = gains(times(timed("soft: experts=2", 0.82, 75, 90, 130)))
    assert str(gain) == "none: within the spread of the times"


def test_a_gain_in_times_of_unknown_spread_is_none():
    """Of a table that was written before quartiles were."""
    unknown = times(timed("soft: experts=2", 0.6, math.nan, 10, math.nan))
    (gain,) = gains(replace(unknown, points=(timed("soft", 0.8, math.nan, 100, math.nan),)))
    assert gain.with_points == gain.without > 0
    assert str(gain) == "none: the spread of the times is unknown"


def test_no_gain_by_the_medians_is_no_matter_of_the_spread():
    (gain,) = gains(times(timed("soft: experts=2", 0.6, 90, 105, 120)))
    assert str(gain) == "0.0331 → 0.0331 (+0.0%)"


def test_quartiles_are_drawn_and_listed(tmp_path: Path):
    """Over times alone: over GFLOPs the same point has no bar."""
    some = times(
        timed("soft: experts=2", 0.6, 9, 10, 20), timed("soft: experts=1", 0.5, math.nan, 5, math.nan)
    )
    (cloud,) = drawn(panel(some, TIME), "operating")
    assert (cloud["error_x"]["array"], cloud["error_x"]["arrayminus"]) == ([10, 0], [1, 0])
    assert "error_x" not in drawn(panel(SOME, COST), "operating")[0]
    texts: list[Any] = [fact["texts"] for fact in point_facts(some)]
    assert [text[1] for text in texts] == ["100 (80 - 120)", "10 (9 - 20)", "5"]
    frontier_picture(panel(some, TIME), tmp_path / "bars.svg")
    assert (tmp_path / "bars.svg").read_text().count('id="LineCollection_') == 2  # of experts=1 none


def test_points_stand_in_panels_of_inference_alone():
    """The training cost of an operating point is that of its model: it is nowhere on that axis."""
    assert operating_costs(SOME) == (COST,)
    assert operating_front(SOME) == ()
    front = [p.arm for p in operating_front(panel(SOME, COST))]
    assert front == ["soft: experts=1", "soft: experts=2", "soft"]
    assert standings(SOME)[2:] == ("operating", "operating")


def drawn(frontier: Frontier, role: str) -> list[dict[str, Any]]:
    traces: Any = frontier_panel(frontier)["traces"]
    return [trace for trace in traces if trace["meta"]["role"] == role]


def test_marks_of_their_own():
    """Points are numbered after `points` and `rest`: 2 and 3 here."""
    (cloud,) = drawn(panel(SOME, COST), "operating")
    assert (cloud["customdata"], cloud["x"], cloud["y"]) == ([2, 3], [10, 1], [0.6, 0.3])
    (line,) = drawn(panel(SOME, COST), "operating_front")
    assert line["x"] == [1, 10, 100]
    assert drawn(SOME, "operating") == drawn(SOME, "operating_front") == []


def test_the_page_states_the_gain():
    page = frontier_page(SOME)
    assert "<h2>Operating points</h2>" in page
    assert f"all models: <b>{gains(SOME)[0]}</b>" in page
    assert "<h2>Operating points</h2>" not in frontier_page(FRONTIER)


def test_the_page_says_when_a_gain_in_time_counts():
    page = frontier_page(times(timed("soft: experts=2", 0.8, 70, 85, 90)))
    assert "all models: <b>none: within the spread of the times</b>" in page
    assert "A gain in time counts only if" in page
    assert "A gain in time counts only if" not in frontier_page(SOME)
