"""Rows of operating points as points of a sweep's frontier."""

import math
from dataclasses import replace

import pytest

from orchestrator.frontier.frontier import Frontier, gains
from orchestrator.runs.measurements import write_measurement
from orchestrator.sweeps.operating import (
    AS_TRAINED,
    COSTS,
    OPERATING,
    QUARTILES,
    PointRow,
    operating_rows,
    table_of,
    with_operating,
)
from tests.orchestrator.frontier.samples import FRONTIER, point

GFLOPS, MS = COSTS
LOW, HIGH = QUARTILES


def row(run: str, name: str, quality: float, ms: float, loss: float = 0.5) -> PointRow:
    return {
        "run": run,
        "point": name,
        "val/acc1": quality,
        "val/acc5": quality,
        "val/loss": loss,
        GFLOPS: 3.0,
        MS: ms,
        LOW: 0.9 * ms,
        HIGH: 1.5 * ms,
        "batch": 64,
        "device": "CPU, 1 thread",
        "rounds": 3,
        "repeats": 5,
    }


def two_seeds() -> Frontier:
    arm = point("soft-1", "soft", 3e10, 0.9)
    arm = replace(
        arm, run_id="first", runs=(("second", None),), qualities=(0.88, 0.92), costs={MS: 7.0, "a": 1}
    )
    return replace(FRONTIER, points=(arm, point("dense-s", "dense", 2e10, 0.8)), retrained=(arm,))


def test_the_newest_measurement_counts(tmp_path):
    for ms in (1.0, 2.0):
        write_measurement(str(tmp_path), {}, tables={OPERATING: table_of([row("a", "x", 0.5, ms)])})
    (newest,) = operating_rows(str(tmp_path))
    assert newest[MS] == 2.0


def test_a_point_is_the_mean_of_its_seeds():
    """`experts=4` is left out, since it is known for one seed alone."""
    rows = [
        row("first", AS_TRAINED, 0.88, 1.0),
        row("second", AS_TRAINED, 0.92, 3.0),
        row("first", "experts=2", 0.6, 0.5, loss=9.0),
        row("second", "experts=2", 0.8, 1.5, loss=1.0),
        row("first", "experts=4", 0.7, 0.5),
    ]
    found = with_operating(two_seeds(), rows)
    (one,) = found.operating
    assert (one.arm, round(one.quality, 9), one.costs) == ("soft-1: experts=2", 0.7, {GFLOPS: 3.0, MS: 1.0})
    assert one.settings["operating point"] == "experts=2"
    timed = {"timed batch": 64, "timed on": "CPU, 1 thread"}
    assert one.details == {"accuracy @5": pytest.approx(0.7), "loss": 5.0, **timed}
    assert math.isnan(one.cost)
    trained, untouched = found.points
    assert (trained.quality, trained.costs) == (0.9, {MS: 2.0, "a": 1, GFLOPS: 3.0})
    assert math.isnan(untouched.costs[MS])
    assert math.isnan(found.retrained[0].costs[MS])
    assert one.spreads == {MS: (0.9, 1.5)}
    assert trained.spreads == {MS: (1.8, 3.0)}
    assert untouched.spreads == {}
    assert found.note == (
        "Times per image are medians and quartiles over 3 rounds of 5 forward passes in which all models and"
        " settings take turns: batch 64, CPU, 1 thread."
    )


def test_a_point_may_route_fewer_images_together():
    arm = point("tc", "token_choice", 3e10, 0.9, run_id="first", settings={"images_per_group": 8.0})
    rows = [row("first", name, 0.8, 1.0) for name in (AS_TRAINED, "k=1 images_per_group=2", "k=1")]
    found = with_operating(replace(FRONTIER, points=(arm,), retrained=()), rows)
    assert [point.together for point in found.all_points] == [8, 2, 8]


def test_times_compare_where_they_are_the_cost_of_the_sweep():
    """Training's validation took 5 ms beside other trials. As trained the clock says 1.0 ms, and 1.1 ms for a
    worse setting, which must not be ahead of it; a model that the clock did not measure is not judged.
    """
    frontier = two_seeds()
    points = tuple(replace(p, cost=5.0, costs={MS: 5.0}) for p in frontier.points)
    reference = {**frontier.reference, MS: 5.5}
    frontier = replace(frontier, points=points, cost_name=MS, reference=reference)
    rows = [
        row(run, name, quality, ms)
        for run in ("first", "second")
        for name, quality, ms in ((AS_TRAINED, 0.9, 1.0), ("experts=2", 0.8, 1.1))
    ]
    found = with_operating(frontier, rows)
    trained, unmeasured = found.points
    (point,) = found.operating
    assert (trained.cost, trained.costs[MS], point.cost) == (1.0, 1.0, 1.1)
    assert math.isnan(unmeasured.cost)
    assert found.reference[MS] == 1.1
    (gain,) = gains(replace(found, points=(trained,)))
    assert gain.with_points == gain.without


def test_without_rows_or_of_another_quality_nothing_changes():
    assert with_operating(two_seeds(), []) == two_seeds()
    shots, known = "fewshot/acc_10shot", two_seeds()
    other = replace(known, quality_name=shots, reference={**known.reference, shots: 0.1})
    assert with_operating(other, [row("first", AS_TRAINED, 0.9, 1.0)]) == other
