"""The papers' figures: transcribed, in our metrics, and drawn where a sweep measures the same."""

import math
from dataclasses import replace

import pytest

from moe.cost import train_flops_6mac
from moe.presets import PRESETS
from orchestrator.frontier.claims import check_claim
from orchestrator.frontier.figure import family_styles
from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.points import Point
from orchestrator.frontier.published import DRAWABLE, published, published_frontier
from orchestrator.sweeps.catalog import make_sweep
from tests.orchestrator.frontier.samples import FLOPS
from tests.orchestrator.frontier.test_figure import QUALITY, TPU_DAYS, WITHOUT, of_role

DAYS = replace(WITHOUT, papers=published(QUALITY, TPU_DAYS))


def by_arm(quality: str, cost: str) -> dict[str, Point]:
    return {point.arm: point for point in published(quality, cost) if point.cost > 0}


def test_published_points_in_our_metrics() -> None:
    """Soft MoE, table 1, prints 1769.5 exaFLOP at 3 per multiply-add; V-MoE, table 2, 4.27k at 6.

    V-MoE prints 2.38k core-days for ViT-H/14; the other two papers print days of chips.
    """
    three, six, days, jft = (
        by_arm(quality, cost)
        for quality, cost in (
            ("imagenet/acc_10shot", "cost/train_flops_3mac"),
            ("imagenet/acc_10shot", "cost/train_flops_6mac"),
            ("imagenet/acc_10shot", "cost/tpuv3_days"),
            ("jft300m/prec1", "cost/tpuv3_days"),
        )
    )
    soft = "Soft MoE B/16 128E 9M steps, cooldown 500k"
    assert three[soft].cost == pytest.approx(1769.5e18)
    assert six[soft].cost == pytest.approx(2 * 1769.5e18)
    assert (six["ViT-H/14"].cost, three["ViT-H/14"].cost) == (pytest.approx(4270e18), pytest.approx(2135e18))
    assert (days["ViT-H/14"].cost, days["ViT S/16 4M steps, cooldown 50k"].cost) == (1190, 153.5)
    assert (jft["B/32 soft c=1"].quality, jft["B/32 soft c=1"].family) == (0.4523, "soft")
    assert len(jft) == 34 + 4  # V-MoE-15B has none
    # Table 8 has the 5 dense models of table 1 again, and 12 of Soft MoE.
    assert len(by_arm("jft4b/prec1", "perf/tpuv3_ms_per_image")) == 8 + 12
    assert len(published("vtab/score", "cost/tpuv3_days")) == 4
    assert len(published("imagenet/acc_1shot", "cost/params")) == 5
    assert by_arm("imagenet/acc_5shot", "cost/params")["V-MoE-15B Every-2"].quality == 0.8278
    assert len(published("cifar100/acc_0shot", "cost/params")) == 10
    assert all(point.details["source"] for point in published("imagenet/acc_10shot", "cost/params"))


def test_costs_of_table_9_are_those_of_our_models() -> None:
    """300,000 steps of 4096 images in 29k classes. Of H/14 the paper itself has 10 % less in table 1."""
    for name in ("S/32", "S/16", "B/32", "B/16", "L/32", "L/16"):
        printed = by_arm("jft4b/prec1", "cost/train_flops_6mac")[f"{name} Dense"].cost
        model = replace(PRESETS[name], num_classes=29_000)
        assert printed == pytest.approx(train_flops_6mac(model, 300_000 * 4096), rel=0.01), name


@pytest.mark.parametrize("name", DRAWABLE)
def test_each_figure_is_a_page(name: str) -> None:
    frontier = published_frontier(name)
    assert len(frontier.points) >= 4
    assert all(math.isfinite(point.cost) for point in frontier.points)
    assert frontier.hypervolume > 0
    assert "Nothing of it was trained here." in frontier_page(frontier)


def test_figure_3_is_the_papers() -> None:
    """ "Soft MoE dominates both ViTs (dense) and popular MoEs": from S/32 on the frontier is of Soft MoE."""
    frontier = published_frontier("softmoe-figure3")
    assert {point.arm[0]: point.size for point in frontier.points} == {"S": 0.3, "B": 1.0, "L": 3.1, "H": 6.2}
    assert len(frontier.points) == 107
    assert [point.family for point in frontier.front] == ["dense", "expert_choice", *["soft"] * 12]
    assert frontier.panels == ("cost/train_flops_3mac",)
    verdict = check_claim("arm=H/14 Soft MoE 128E beats family!=soft", frontier.points)
    assert (verdict.holds, verdict.by_values_alone) == (True, True)


def test_they_are_drawn_at_every_cost_that_is_printed() -> None:
    papers = of_role(DAYS.plot(), "published")
    assert set(papers) >= {"dense", "soft", "sinkhorn_token_choice"}
    assert "source: Soft MoE (2024), table 1" in papers["dense"]["hovertext"][0]
    known = [point for point in published(QUALITY, FLOPS) if point.cost > 0]
    at_flops = of_role(
        replace(DAYS, reference={**DAYS.reference, FLOPS: 1e23}).at_cost(FLOPS).plot(), "published"
    )
    assert sum(len(trace["x"]) for trace in at_flops.values()) == len(known) > 100


def test_families_of_the_routers_and_of_the_papers_have_the_same_looks() -> None:
    """No family gets a spare style, so that our arms look like the paper's points of the same router."""
    ours = {run.model.family() for run in make_sweep("routers", "tiny").runs().values()}
    theirs = {point.family for point in published("jft300m/prec1", "cost/tpuv3_days")}
    assert len(ours) == 7
    assert ours <= theirs
    styles = family_styles(ours | theirs | {"spare"})
    assert list(styles)[-1] == "spare"
