"""Rows of operating points as points of a sweep's frontier."""

import math
from dataclasses import replace

from orchestrator.frontier.points import Frontier
from orchestrator.sweeping.operating import AS_TRAINED, COSTS, Row, with_operating
from tests.orchestrator.frontier.samples import FRONTIER, point

GFLOPS, MS = COSTS


def row(run: str, name: str, quality: float, ms: float) -> Row:
    return {
        "run": run,
        "point": name,
        "val/acc1": quality,
        "val/acc5": 1.0,
        "val/loss": 0.5,
        GFLOPS: 3.0,
        MS: ms,
        "batch": 64,
        "device": "CPU, 1 threads",
    }


def two_seeds() -> Frontier:
    arm = point("soft-1", "soft", 3e10, 0.9)
    arm = replace(
        arm, run_id="first", runs=(("second", None),), qualities=(0.88, 0.92), costs={MS: 7.0, "a": 1}
    )
    return replace(FRONTIER, points=(arm, point("dense-s", "dense", 2e10, 0.8)), rest=(arm,))


def test_a_point_is_the_mean_of_its_seeds():
    """`experts=4` is known of one seed alone: it is none."""
    rows = [
        row("first", AS_TRAINED, 0.88, 1.0),
        row("second", AS_TRAINED, 0.92, 3.0),
        row("first", "experts=2", 0.6, 0.5),
        row("second", "experts=2", 0.8, 1.5),
        row("first", "experts=4", 0.7, 0.5),
    ]
    found = with_operating(two_seeds(), rows)
    (one,) = found.operating
    assert (one.arm, round(one.quality, 9), one.costs) == ("soft-1: experts=2", 0.7, {GFLOPS: 3.0, MS: 1.0})
    assert one.settings["operating point"] == "experts=2"
    assert math.isnan(one.cost)
    trained, untouched = found.points
    assert (trained.quality, trained.costs) == (0.9, {MS: 2.0, "a": 1, GFLOPS: 3.0})
    assert math.isnan(untouched.costs[MS])
    assert math.isnan(found.rest[0].costs[MS])


def test_without_rows_or_of_another_quality_nothing_changes():
    assert with_operating(two_seeds(), []) == two_seeds()
    other = replace(two_seeds(), quality_name="fewshot/acc_10shot")
    assert with_operating(other, [row("first", AS_TRAINED, 0.9, 1.0)]) == other
