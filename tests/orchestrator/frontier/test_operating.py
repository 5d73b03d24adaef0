"""Operating points beside trained models, with areas by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.frontier.figure import frontier_panel
from orchestrator.frontier.operating import gains, operating_costs, operating_front
from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.points import Frontier, Point, panel, standings
from tests.orchestrator.frontier.samples import FRONTIER, point

COST = "cost/forward_gflops_2mac"


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
