"""A frontier's numbers, table and figure, and operating points beside trained models, with areas by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier, gains, operating_costs, operating_front
from orchestrator.frontier.points import Point
from tests.orchestrator.frontier.samples import ACC, FLOPS, FRONTIER, NAN, SECONDS, point

GFLOPS, TIME = "cost/forward_gflops_2mac", "perf/ms_per_image"


def test_numbers_and_table() -> None:
    """Area: .7 x log10(50) + .1 x log10(33.3) + .03 x log10(11.1) + .02 x log10(1.25)."""
    assert [p.arm for p in FRONTIER.front] == ["dense-s", "soft-1", "soft-2", "ec-2"]
    assert FRONTIER.knee.arm == "soft-1"
    assert FRONTIER.hypervolume == pytest.approx(1.37488, abs=1e-5)
    seeds = replace(FRONTIER.points[0], qualities=(0.7, 0.9), runs=(("second", None),))
    table = replace(FRONTIER, points=(seeds, *FRONTIER.points[1:])).to_dataframe()
    numbers = [FLOPS, ACC, "standard_error", "images_per_group", "seeds"]
    assert list(table.columns) == ["arm", "family", "status", *numbers, SECONDS, "run"]
    assert {*table["images_per_group"]} == {1}
    assert dict(zip(table["arm"], table["status"], strict=True)) == {
        "dense-s": "frontier",
        "soft-1": "frontier, knee",
        "soft-2": "frontier",
        "ec-2": "frontier",
        **dict.fromkeys(("dense-l", "tc-1", "hash-1"), "dominated"),
        "tc-burnt": "diverged",
        "soft-oom": "failed",
        "ec-young": "running",
        "ec-early": "stopped",
        "soft-2-long": "retrained",
    }
    first = table.iloc[0]
    assert (first["standard_error"], first["seeds"]) == (pytest.approx(0.1), 2)
    assert first["run"] == "dense-s-0123456789abcdef, second"


def test_a_part_has_the_families_and_the_cost_that_are_asked_for() -> None:
    """Without other families, dominated arms may be on the frontier. The table has router statistics."""
    statistics = {"moe/dropped_frac": 0.25}
    points = [replace(p, statistics=statistics) if p.family == "token_choice" else p for p in FRONTIER.points]
    whole = replace(FRONTIER, points=tuple(points), baselines={"linear": 0.8})
    part = whole.part(families=["dense", "token_choice"])
    assert [point.arm for point in part.front] == ["dense-s", "tc-1", "dense-l"]
    assert (part.retrained, part.baselines) == ((), whole.baselines)
    table = part.to_dataframe().set_index("arm")
    assert table.loc["tc-1", "moe/dropped_frac"] == 0.25
    assert math.isnan(table.loc["dense-s", "moe/dropped_frac"])
    timed = whole.part(cost=SECONDS, baselines=False)
    assert (timed.cost_name, timed["dense-s"].cost, timed.baselines) == (SECONDS, 50, {})
    assert whole.part(cost=FLOPS) == whole
    with pytest.raises(
        UsageError, match=r"routers has no cost 'x'; known: cost/device_s, cost/train_flops_6mac$"
    ):
        whole.part(cost="x")
    with pytest.raises(UsageError, match=r"no family 'sotf'; known: dense, expert_choice, hash, soft, token"):
        whole.part(families=["soft", "sotf"])


def test_shown_in_a_line(tmp_path: Path) -> None:
    assert repr(FRONTIER) == "Frontier('routers': 11 arms, 4 on the frontier, knee 'soft-1')"
    rich = replace(FRONTIER.knee, details={"steps": 1.0}, costs={SECONDS: 2.0}, settings={"k": 1.0})
    assert repr(rich) == (
        f"Point(arm='soft-1', family='soft', cost={rich.cost}, quality={rich.quality}, size={rich.size},"
        " status='finished')"
    )
    FRONTIER.save_picture(f"{tmp_path}/frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_a_frontier_of_nothing() -> None:
    empty = replace(FRONTIER, points=(point("a", "soft", NAN, NAN, "failed"),), retrained=())
    assert (empty.front, empty.hypervolume, empty.statuses()) == ((), 0, ("failed",))
    (message,) = empty.figure().layout.annotations
    assert message.text == "No finished trial with a known cost and quality"
    with pytest.raises(ValueError, match="no finite point"):
        _ = empty.knee


def test_hypervolume_does_not_depend_on_which_trials_have_ended() -> None:
    """A dear trial that only runs, or one that is dominated, changes neither the area nor that over time."""
    few = replace(FRONTIER, reference={**FRONTIER.reference, SECONDS: 100.0})
    dear = point("dear", "soft", 9e11, 0.3, costs={SECONDS: 90.0})
    running = point("young", "soft", 5e12, NAN, "running", costs={SECONDS: 1e6})
    more = replace(few, points=(*few.points, dear, running))
    assert more.hypervolume == few.hypervolume
    assert more.at_cost(SECONDS).hypervolume == few.at_cost(SECONDS).hypervolume > 0


@pytest.mark.parametrize("cost", [0.0, NAN, math.inf, None])
def test_a_useless_reference_is_refused(cost: float | None) -> None:
    reference = {ACC: 0.1} if cost is None else {ACC: 0.1, FLOPS: cost}
    with pytest.raises(ValueError, match="reference needs a finite cost above 0 for 'cost/train_flops_6mac'"):
        replace(FRONTIER, reference=reference)
    with pytest.raises(ValueError, match="and a finite 'val/acc1'"):
        replace(FRONTIER, reference={FLOPS: 1.0})


def test_the_same_points_under_another_cost() -> None:
    """By time the larger model is the cheaper one, hence alone on the front; an untimed point is out."""
    small = point("small", "soft", 10, 0.5, costs={SECONDS: 8.0})
    large = point("large", "soft", 100, 0.6, costs={SECONDS: 4.0})
    reference = {**FRONTIER.reference, SECONDS: 10.0, GFLOPS: 1.0}
    found = replace(FRONTIER, points=(small, large), retrained=(small,), reference=reference)
    assert found.panels == (SECONDS,)  # no point has GFLOPs
    assert list(found.to_dataframe()[SECONDS]) == [8, 4, 8]
    other = found.at_cost(SECONDS)
    assert ([p.arm for p in other.front], other.bound) == (["large"], (10.0, 0.1))
    assert [p.cost for p in other.retrained] == [8]
    untimed = replace(found, points=(*found.points, point("untimed", "soft", 1, 0.9, costs={})))
    assert [p.arm for p in untimed.at_cost(SECONDS).front] == ["large"]
    assert untimed.panels == ()


def trained(arm: str, family: str, cost: float, quality: float) -> Point:
    return point(arm, family, 1e10, quality, costs={GFLOPS: cost})


def setting(arm: str, cost: float, quality: float) -> Point:
    return replace(trained(arm, "soft", cost, quality), cost=NAN)


POINTS = Frontier(
    name="points",
    cost_name=FLOPS,
    quality_name=ACC,
    points=(trained("dense", "dense", 10, 0.5), trained("soft", "soft", 100, 0.8)),
    operating=(setting("soft: experts=2", 10, 0.6), setting("soft: experts=1", 1, 0.3)),
    reference={FLOPS: 1e11, ACC: 0.0, GFLOPS: 110.0},
)


def test_gain_by_hand() -> None:
    """The reference is at 110 GFLOP and quality 0; area is decades of cost times quality.

    All models: dense (10, .5) is the front up to soft (100, .8): 1 * .5 + log10(1.1) * .8. With points: 1 to
    10 .3, from 10 to 100 .6, then .8. MoE alone without: log10(1.1) * .8.
    """
    last = math.log10(1.1) * 0.8
    everyone, moe = gains(POINTS)
    assert (everyone.models, moe.models) == ("all models", "MoE models alone")
    assert everyone.without == pytest.approx(0.5 + last)
    assert everyone.with_points == moe.with_points == pytest.approx(0.3 + 0.6 + last)
    assert moe.without == pytest.approx(last)
    assert str(replace(moe, without=0.5, with_points=0.6)) == "0.5000 → 0.6000 (+20.0%)"
    assert [gain.models for gain in gains(replace(POINTS, points=POINTS.points[1:]))] == ["all models"]


def test_operating_points_count_in_panels_of_inference_alone() -> None:
    """The training cost of an operating point is that of its model: it has no place on that axis."""
    assert operating_costs(POINTS) == (GFLOPS,)
    assert operating_front(POINTS) == ()
    front = [p.arm for p in operating_front(POINTS.at_cost(GFLOPS))]
    assert front == ["soft: experts=1", "soft: experts=2", "soft"]
    assert POINTS.statuses()[2:] == ("operating", "operating")


def timed(arm: str, quality: float, low: float, median: float, high: float) -> Point:
    return replace(trained(arm, "soft", 1, quality), costs={TIME: median}, spreads={TIME: (low, high)})


def times(*operating: Point) -> Frontier:
    """A model of quality 0.8 that takes 100 ms, quartiles 80 and 120; the reference is 110 ms, quality 0."""
    reference = {FLOPS: 1e11, ACC: 0.0, TIME: 110.0}
    return replace(
        POINTS, points=(timed("soft", 0.8, 80, 100, 120),), operating=operating, reference=reference
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        # Faster by the medians, but its upper quartile, 90, is above the model's lower one, 80.
        (timed("a", 0.8, 70, 85, 90), "none: within the spread of the times"),
        # More than twice the hypervolume by the medians, all of it noise of the clock.
        (timed("b", 0.82, 75, 90, 130), "none: within the spread of the times"),
        (timed("c", 0.6, NAN, 10, NAN), "none: the spread of the times is unknown"),
        (timed("d", 0.6, 90, 105, 120), "0.0331 → 0.0331 (+0.0%)"),
        # Adds .6 from 10 to 100 ms. By the quartiles: .6 from 20 to 110 ms, against .8 from 80 to 110 ms.
        (
            timed("e", 0.6, 9, 10, 20),
            "0.0331 → 0.6331 (+1811.9%, at least +301.5% by the quartiles of the times)",
        ),
    ],
)
def test_a_gain_in_time_counts_beyond_the_spread_alone(setting: Point, text: str) -> None:
    frontier = times(setting)
    if "unknown" in text:
        frontier = replace(frontier, points=(timed("soft", 0.8, NAN, 100, NAN),))
    (gain,) = gains(frontier)
    assert str(gain) == text
    assert (gain.with_points == gain.without) == text.startswith(("none", "0.0331 → 0.0331"))
