"""What a plot shows, as data: series, styles, numbers and the papers' points."""

from dataclasses import replace

import pytest

from orchestrator.frontier.figure import (
    TIMES,
    UNKNOWN,
    FigureData,
    Series,
    axis_title,
    budget_data,
    cost_text,
    facts,
    family_styles,
    key_sizes,
    marker_px,
    number,
    published,
    web_link,
)
from orchestrator.frontier.points import hypervolume_by_budget
from orchestrator.sweeps.catalog import make_sweep
from tests.orchestrator.frontier.samples import FLOPS, FRONTIER, LINK, NAN, many, point

DAYS = replace(
    FRONTIER,
    cost_name="cost/tpuv3_days",
    quality_name="imagenet/acc_10shot",
    reference={"cost/tpuv3_days": 1e12, "imagenet/acc_10shot": 0.1},
)


def of_role(data: FigureData, role: str, *, lines: bool = False) -> dict[str, Series]:
    return {s.family: s for s in data.series if s.role == role and (s.shape is None) == lines}


def names(data: FigureData, role: str) -> dict[str, list[str]]:
    return {family: [text[0] for text in series.texts] for family, series in of_role(data, role).items()}


def test_each_complete_point_is_drawn_once() -> None:
    """Stopped, running and failed trials are not drawn: their quality is not final."""
    data = FRONTIER.figure_data()
    assert names(data, "frontier") == {
        "dense": ["dense-s"],
        "soft": ["soft-1", "soft-2"],
        "expert_choice": ["ec-2"],
    }
    assert names(data, "dominated") == {"dense": ["dense-l"], "token_choice": ["tc-1"], "hash": ["hash-1"]}
    assert names(data, "diverged") == {"token_choice": ["tc-burnt"]}
    assert names(data, "retrained") == {"soft": ["soft-2-long"]}
    assert of_role(data, "diverged")["token_choice"].on_axis
    assert [p.arm for p in data.named] == ["soft-1", "dense-s", "soft-2", "ec-2"]
    assert data.sizes == (1, 2)


def test_lines_of_the_front_and_of_the_families() -> None:
    data = FRONTIER.figure_data()
    assert of_role(data, "frontier", lines=True)[""].x == (2e10, 3e10, 9e10, 8e11)
    assert of_role(data, "dense", lines=True)["dense"].x == (2e10, 3e11)
    soft = of_role(data, "family", lines=True)["soft"]
    assert (soft.x, soft.optional) == ((3e10, 9e10), True)
    alone = replace(FRONTIER, points=FRONTIER.points[:2], retrained=()).figure_data()
    assert of_role(alone, "dense", lines=True) == of_role(alone, "family", lines=True) == {}


def test_bars_over_seeds_and_over_quartiles_of_measured_costs() -> None:
    seeds = replace(FRONTIER.points[0], qualities=(0.7, 0.9), spreads={FLOPS: (1e10, 3e10)})
    data = replace(FRONTIER, points=(seeds, *FRONTIER.points[1:])).figure_data()
    dense = of_role(data, "frontier")["dense"]
    assert (dense.y_bars, dense.x_bars) == (((0.7, 0.9),), ((1e10, 3e10),))
    assert of_role(data, "frontier")["soft"].y_bars == of_role(data, "frontier")["soft"].x_bars == ()
    assert cost_text(seeds, FLOPS) == f"2.00{TIMES}10¹⁰ (1.00{TIMES}10¹⁰ - 3.00{TIMES}10¹⁰)"
    assert cost_text(FRONTIER.points[0], FLOPS) == f"2.00{TIMES}10¹⁰"
    assert facts(seeds) == {
        "k": "2",
        "affinity": "softmax",
        "family": "dense",
        "capacity": "2",
        "seeds": "2, from 0.7000 to 0.9000",
    }
    assert "Validation accuracy @1: 0.8000 ± 0.1000" in dense.texts[0]


def test_budget_is_drawn_from_nothing_to_the_whole() -> None:
    found = many(30)
    curve = hypervolume_by_budget(found.points, found.bound, found.spending)
    data = budget_data(curve)
    assert data.x_title == "Device hours spent"
    assert (data.series[0].x[0], data.series[0].y[0]) == (0, 0)
    assert data.series[0].y[-1] == pytest.approx(found.hypervolume)
    assert budget_data(curve / 1e6).x_title == "Device seconds spent"


def test_papers_are_drawn_where_the_metrics_agree() -> None:
    assert of_role(FRONTIER.figure_data(), "published") == {}
    papers = of_role(DAYS.figure_data(), "published")
    assert set(papers) >= {"dense", "soft", "sinkhorn_token_choice"}
    assert sum(len(series.x) for series in papers.values()) == 8 + 34 + 5
    assert "source: Soft MoE (2024), table 1" in papers["dense"].texts[0]


def test_published_points_in_our_metrics() -> None:
    """Soft MoE, table 1, prints 1769.5 exaFLOP at 3 per multiply-add; V-MoE, table 2, 4.27k at 6.

    V-MoE prints 2.38k core-days for ViT-H/14; the other two papers print days of chips.
    """
    three, six, days, jft = (
        {point.arm: point for point in published(quality, cost)}
        for quality, cost in (
            ("imagenet/acc_10shot", "cost/train_flops_3mac"),
            ("imagenet/acc_10shot", "cost/train_flops_6mac"),
            ("imagenet/acc_10shot", "cost/tpuv3_days"),
            ("jft300m/prec1", "cost/tpuv3_days"),
        )
    )
    assert three["Soft MoE B/16 128E 9M steps"].cost == pytest.approx(1769.5e18)
    assert six["Soft MoE B/16 128E 9M steps"].cost == pytest.approx(2 * 1769.5e18)
    assert (six["ViT-H/14"].cost, three["ViT-H/14"].cost) == (pytest.approx(4270e18), pytest.approx(2135e18))
    assert (days["ViT-H/14"].cost, days["ViT S/16 4M steps"].cost) == (1190, 153.5)
    assert len(three) == len(six) == 13
    assert (jft["B/32 soft c=1"].quality, jft["B/32 soft c=1"].family) == (0.4523, "soft")
    assert len(jft) == 34 + 4  # V-MoE-15B has none
    assert len(published("jft4b/prec1", "cost/forward_gflops_2mac")) == 8
    assert published("val/acc1", "cost/tpuv3_days") == published("imagenet/acc1", "cost/device_s") == ()


def test_families_of_the_routers_and_of_the_papers_have_the_same_looks() -> None:
    """No family gets a spare style, so that our arms look like the paper's points of the same router."""
    ours = {run.model.family() for run in make_sweep("routers", "tiny").runs().values()}
    theirs = {point.family for point in published("jft300m/prec1", "cost/tpuv3_days")}
    assert len(ours) == 7
    assert ours <= theirs
    styles = family_styles(ours | theirs | {"spare"})
    assert list(styles)[-1] == "spare"
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


def test_numbers() -> None:
    values = (1.234e10, -2e-7, 9.999e9, 818.95, 43590.0, 0.0, 1.25, NAN)
    texts = (
        f"1.23{TIMES}10¹⁰",
        f"-2.00{TIMES}10⁻⁷",
        f"1.00{TIMES}10¹⁰",
        "819",
        "43590",
        "0",
        "1.25",
        UNKNOWN,
    )
    assert tuple(map(number, values)) == texts


def test_titles_and_links() -> None:
    assert axis_title("val/acc1") == "Validation accuracy @1"
    assert axis_title("cost/price_usd") == "cost/price_usd"
    assert web_link(LINK) == LINK
    assert web_link("javascript:alert(1)") is web_link(None) is None
