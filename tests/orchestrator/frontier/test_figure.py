"""What a plot shows: traces, styles, numbers and the papers' points."""

from dataclasses import replace

import plotly.graph_objects as go
import pytest

from orchestrator.costs import TIMES
from orchestrator.frontier.drawing import frontier_picture
from orchestrator.frontier.figure import (
    Json,
    budget_plot,
    cost_text,
    facts,
    family_styles,
    key_sizes,
    marker_px,
    web_link,
)
from orchestrator.frontier.points import hypervolume_by_budget
from tests.orchestrator.frontier.samples import EVIL, FLOPS, FRONTIER, LINK, NAN, many, point

QUALITY, TPU_DAYS = "imagenet/acc_10shot", "cost/tpuv3_days"
WITHOUT = replace(
    FRONTIER, cost_name=TPU_DAYS, quality_name=QUALITY, reference={TPU_DAYS: 1e12, QUALITY: 0.1}
)
PAPERS = (point("theirs", "dense", 1e10, 0.9), point("theirs, soft", "soft", 1e11, 0.99))
DAYS = replace(WITHOUT, papers=PAPERS)


def of_role(plot: Json, role: str, mode: str = "markers") -> dict[str, Json]:
    traces = [trace for trace in plot["data"] if (trace["meta"]["role"], trace["mode"]) == (role, mode)]
    return {trace["meta"]["family"]: trace for trace in traces}


def names(plot: Json, role: str) -> dict[str, list[str]]:
    return {
        family: [text.split("</b>")[0].removeprefix("<b>") for text in trace["hovertext"]]
        for family, trace in of_role(plot, role).items()
    }


def test_each_complete_point_is_drawn_once() -> None:
    """Stopped, running and failed trials are not drawn: their quality is not final."""
    plot = FRONTIER.plot()
    assert names(plot, "frontier") == {
        "dense": ["dense-s"],
        "soft": ["soft-1", "soft-2"],
        "expert_choice": ["ec-2"],
    }
    assert names(plot, "dominated") == {"dense": ["dense-l"], "token_choice": ["tc-1"], "hash": ["hash-1"]}
    assert names(plot, "diverged") == {"token_choice": ["tc-burnt"]}
    assert names(plot, "retrained") == {"soft": ["soft-2-long"]}
    assert of_role(plot, "diverged")["token_choice"]["yaxis"] == "y2"
    meta = plot["layout"]["meta"]
    assert [front["name"] for front in meta["front"]] == ["soft-1", "dense-s", "soft-2", "ec-2"]
    assert meta["sizes"] == (1, 2)


def test_lines_of_the_front_and_of_the_families() -> None:
    plot = FRONTIER.plot()
    front = of_role(plot, "frontier", "lines")[""]
    assert (front["x"], front["line"]["shape"]) == ([20, 30, 90, 800], "hv")
    assert of_role(plot, "dense", "lines")["dense"]["x"] == [20, 300]
    soft = of_role(plot, "family", "lines")["soft"]
    assert (soft["x"], soft["visible"]) == ([30, 90], "legendonly")
    alone = replace(FRONTIER, points=FRONTIER.points[:2], retrained=()).plot()
    assert of_role(alone, "dense", "lines") == of_role(alone, "family", "lines") == {}


def test_an_axis_of_likelihoods_has_ticks_in_bits() -> None:
    """Between 2 and 3 bits; all points lie between the outer ticks, and the picture has the same."""
    likelihood = "val/likelihood"
    points = tuple(
        replace(point(f"{bits}", "dense", 1e9 * cost, 2**-bits), quality_name=likelihood)
        for cost, bits in ((1, 2.97), (2, 2.5), (4, 2.05))
    )
    reference = {FLOPS: 1e12, likelihood: 1 / 256}
    frontier = replace(FRONTIER, quality_name=likelihood, points=points, retrained=(), reference=reference)
    axis = frontier.plot()["layout"]["yaxis"]
    assert axis["ticktext"] == ["2", "2.2", "2.4", "2.6", "2.8", "3"]
    assert axis["tickvals"] == pytest.approx([2**-2, 2**-2.2, 2**-2.4, 2**-2.6, 2**-2.8, 2**-3])
    assert axis["title"]["text"] == "Validation bits per byte"
    drawn = frontier_picture(frontier.plot()).axes[0]
    assert [label.get_text() for label in drawn.get_yticklabels()] == axis["ticktext"]
    assert "tickvals" not in FRONTIER.plot()["layout"]["yaxis"]


def test_a_baseline_is_a_labelled_line_that_does_not_count() -> None:
    linear = replace(FRONTIER, baselines={"<linear>": 0.8765})
    trace = of_role(linear.plot(), "baseline", "lines+text")[""]
    assert (trace["x"], trace["y"]) == ([20, 900], [0.8765, 0.8765])
    assert (trace["text"][0], trace["line"]["dash"]) == ("&lt;linear&gt;: 0.876", "dot")
    assert (linear.front, linear.hypervolume) == (FRONTIER.front, FRONTIER.hypervolume)
    assert of_role(replace(linear, points=(), retrained=()).plot(), "baseline", "lines+text") == {}


def test_a_baseline_is_labelled_where_no_point_covers_it() -> None:
    """The cheapest point has a quality of 0.8, the dearest one of 0.95."""
    for quality, texts, side in ((0.8, ["", "b: 0.800"], "left"), (0.95, ["b: 0.950", ""], "right")):
        (trace,) = of_role(
            replace(FRONTIER, baselines={"b": quality}).plot(), "baseline", "lines+text"
        ).values()
        assert (trace["text"], trace["textposition"]) == (texts, f"top {side}")


def test_bars_over_seeds_and_over_quartiles_of_measured_costs() -> None:
    seeds = replace(FRONTIER.points[0], qualities=(0.7, 0.9), spreads={FLOPS: (1e10, 3e10)})
    plot = replace(FRONTIER, points=(seeds, *FRONTIER.points[1:])).plot()
    dense, soft = (of_role(plot, "frontier")[family] for family in ("dense", "soft"))
    for bars, length in ((dense["error_x"], 10), (dense["error_y"], 0.1)):
        assert (bars["array"], bars["arrayminus"]) == ([pytest.approx(length)], [pytest.approx(length)])
    assert soft["error_x"] == soft["error_y"] == {"visible": False}
    assert cost_text(seeds, FLOPS) == f"2.00{TIMES}10¹⁰ (1.00{TIMES}10¹⁰ - 3.00{TIMES}10¹⁰)"
    assert cost_text(FRONTIER.points[0], FLOPS) == f"2.00{TIMES}10¹⁰"
    assert facts(seeds) == {
        "k": "2",
        "affinity": "softmax",
        "family": "dense",
        "capacity": "2",
        "seeds": "2, from 0.7000 to 0.9000",
    }
    assert "Validation accuracy @1: 0.8000 ± 0.1000" in dense["hovertext"][0]


def test_budget_is_drawn_from_nothing_to_the_whole() -> None:
    found = many(30)
    curve = hypervolume_by_budget(found.points, found.bound, found.spending)
    (trace,) = go.Figure(budget_plot(curve)).data
    assert (trace.x[0], trace.y[0]) == (0, 0)
    assert trace.y[-1] == pytest.approx(found.hypervolume)
    for scale, title in ((1, "Device hours spent"), (1e-6, "Device seconds spent")):
        assert budget_plot(curve * scale)["layout"]["xaxis"]["title"]["text"] == title


def test_a_notebook_shows_the_figure() -> None:
    """Plotly knows every property. A label stands in the legend once, and text of users is not markup."""
    figure = replace(DAYS, name=EVIL, points=(*DAYS.points, *many(30).points)).figure()
    assert figure.layout.title.text.startswith("&lt;img")
    explained = [trace.name for trace in figure.data if trace.showlegend]
    assert len(explained) == len(set(explained))
    assert {"Frontier", "Dense alone", "Soft", "Token choice", "Retrained, not counted"} <= {*explained}


def test_published_points_are_drawn_hollow_and_not_counted() -> None:
    assert of_role(FRONTIER.plot(), "published") == {}
    papers = of_role(DAYS.plot(), "published")
    assert names(DAYS.plot(), "published") == {"dense": ["theirs"], "soft": ["theirs, soft"]}
    assert all(trace["marker"]["symbol"].endswith("-open") for trace in papers.values())
    assert (DAYS.front, DAYS.hypervolume) == (WITHOUT.front, WITHOUT.hypervolume)


def test_families_have_looks_of_their_own() -> None:
    """Known families always have the same style and come first; the style of another depends on its name."""
    styles = family_styles(("dense", "soft", "spare"))
    assert family_styles({"spare"})["spare"] == styles["spare"]
    later = family_styles(("zeta", "soft", "hash", "dense", "mixture"))
    assert list(later) == ["dense", "soft", "hash", "mixture", "zeta"]
    assert len({style.colour for style in later.values()}) == 5


def test_sizes_are_areas_within_bounds() -> None:
    assert marker_px(2) ** 2 == pytest.approx(2 * marker_px(1) ** 2)
    assert marker_px(NAN) == marker_px(0) == marker_px(0.01) < marker_px(1)
    assert marker_px(100) == marker_px(200)
    points = [replace(point("x", "soft", 1, 0.5), size=size) for size in range(1, 11)]
    assert key_sizes(points) == (1, 4, 7, 10)
    assert key_sizes(points[:1] * 2) == ()


def test_links() -> None:
    assert web_link(LINK) == LINK
    assert web_link("javascript:alert(1)") is web_link(None) is None


def test_the_steps_of_one_model_are_joined() -> None:
    """Other models, and one that was trained once, have no line of this kind."""
    points = tuple(
        replace(point(arm, "soft", cost, 0.5 + cost / 100), settings={"size": size, "steps": steps})
        for arm, cost, size, steps in (
            ("long", 9.0, "S", 900.0),
            ("short", 1.0, "S", 100.0),
            ("middle", 3.0, "S", 300.0),
            ("once", 2.0, "B", 100.0),
        )
    )
    (line,) = of_role(replace(FRONTIER, points=points).plot(), "longer", "lines").values()
    assert line["x"] == [1.0, 3.0, 9.0]
    assert line["line"]["shape"] == "linear"
    assert not of_role(FRONTIER.plot(), "longer", "lines")
