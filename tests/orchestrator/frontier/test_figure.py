"""The panels as plotly reads them, without a browser."""

from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest

from orchestrator.frontier.figure import frontier_panel
from orchestrator.frontier.points import Frontier, panel
from tests.orchestrator.frontier.samples import FRONTIER, many

SEEDS = replace(
    FRONTIER,
    points=tuple(replace(p, qualities=(p.quality - 0.02, p.quality + 0.02)) for p in FRONTIER.points),
)
DAYS = replace(FRONTIER, cost_name="cost/tpuv3_days", quality_name="imagenet/acc_10shot")


def traces(frontier: Frontier) -> list[dict[str, Any]]:
    return frontier_panel(frontier)["traces"]  # type: ignore[return-value]


def of_role(frontier: Frontier, role: str) -> dict[str, list[float]]:
    """Family -> what its markers number, or the costs of its line."""
    mine = [trace for trace in traces(frontier) if trace["meta"]["role"] == role]
    return {trace["meta"]["family"]: trace.get("customdata", trace["x"]) for trace in mine}


@pytest.mark.parametrize(
    "frontier",
    [FRONTIER, SEEDS, DAYS, many(50), panel(many(50), "cost/device_s"), replace(FRONTIER, points=())],
)
def test_plotly_knows_every_property(frontier: Frontier) -> None:
    drawn = frontier_panel(frontier)
    go.Figure(drawn["traces"], drawn["layout"])


def test_each_complete_point_is_in_one_cloud() -> None:
    """The stopped, running and failed are nowhere: their quality is not final. Places as in `points`."""
    assert of_role(FRONTIER, "frontier") == {"dense": [0], "soft": [2, 3], "expert_choice": [5]}
    assert of_role(FRONTIER, "dominated") == {"dense": [1], "token_choice": [4], "hash": [6]}
    assert of_role(FRONTIER, "diverged") == {"token_choice": [7]}
    assert of_role(FRONTIER, "confirm") == {"soft": [11]}


def test_lines_of_the_front_and_of_the_families() -> None:
    assert of_role(FRONTIER, "front") == {"": [2e10, 3e10, 9e10, 8e11]}
    assert of_role(FRONTIER, "dense") == {"dense": [2e10, 3e11]}
    assert of_role(FRONTIER, "family")["soft"] == [3e10, 9e10]
    alone = replace(FRONTIER, points=FRONTIER.points[:2], rest=())
    assert of_role(alone, "dense") == of_role(alone, "family") == {}


def test_seeds_have_bars_and_a_band() -> None:
    assert of_role(FRONTIER, "band") == {}
    assert list(of_role(SEEDS, "band")) == [""]
    bars = [trace["error_y"] for trace in traces(SEEDS) if "error_y" in trace]
    assert {round(length, 6) for bar in bars for length in bar["array"] + bar["arrayminus"]} == {0.02}


def test_papers_are_drawn_where_the_metrics_agree() -> None:
    assert of_role(FRONTIER, "published") == {}
    assert set(of_role(DAYS, "published")) >= {"dense", "soft", "sinkhorn_token_choice"}
    assert of_role(replace(DAYS, published=False), "published") == {}
