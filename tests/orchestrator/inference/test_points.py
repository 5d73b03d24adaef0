"""What was measured becomes costs of the arms, with their ends."""

import math
from typing import Any

from orchestrator.costs import MS, MS_P95
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point
from orchestrator.inference.points import with_inference

BATCH = "infer/batch_ms_per_image"
FLOPS, ACC = "cost/train_flops_6mac", "val/acc1"


def arm(name: str) -> Point:
    return Point(arm=name, family="dense", cost=1.0, quality=0.5, size=1.0, run_id=name, status="finished")


def row(name: str, **changes: Any) -> dict[str, Any]:
    times = {"p50": 1.0, "q25": 0.5, "q75": 2.0, "p95": 3.0, "p95_high": 4.0}
    rest = {"memory_mib": 60.0, "file_mb": 0.2, "rounds": 20, "quiet": True, "machine": "a machine"}
    how = {"runtime": "onnx", "batch": 1, "threads": 1, "precision": "float32", "why_not": ""}
    return {"arm": name, **times, **rest, **how, **changes}


def frontier(cost_name: str = FLOPS) -> Frontier:
    points = (arm("a"), arm("b"), arm("c"))
    return Frontier(
        name="s", cost_name=cost_name, quality_name=ACC, points=points, reference={cost_name: 9.0, ACC: 0.1}
    )


def test_costs_ends_and_panels() -> None:
    rows = [row("a"), row("b", p50=8.0, q25=8.0, q75=8.0), row("c")]
    found = with_inference(frontier(), rows, [row("a", batch=32, p50=64.0, q25=32.0, q75=96.0)])
    a, b, _ = found.points
    assert (a.costs[MS], a.spreads[MS]) == (1.0, (0.5, 2.0))
    assert (a.costs[MS_P95], a.spreads[MS_P95]) == (3.0, (3.0, 4.0))
    assert (a.costs[BATCH], a.spreads[BATCH]) == (2.0, (1.0, 3.0))
    assert (a.costs["infer/memory_mib"], a.costs["infer/file_mb"]) == (60.0, 0.2)
    assert MS not in b.spreads
    assert found.reference[MS] == 1.1 * 8.0
    assert found.panels == (MS,), "a page draws what all arms have"
    assert "ONNX files in onnxruntime, 1 thread, float32, on a machine" in found.note
    assert "Other work disturbed them" in with_inference(frontier(), [row("a", quiet=False)]).note
    assert with_inference(frontier(), []) == frontier()


def test_an_arm_that_could_not_be_written_has_no_times() -> None:
    found = with_inference(frontier(), [row("a", p50=math.nan, why_not="no operator"), row("b"), row("c")])
    assert MS not in found.points[0].costs
    assert found.answer(max_ms=10).unknown == ("a",)
    assert "Not judged, because a cost is unknown: a." in found.answer(max_ms=10).lines()


def test_a_sweep_may_minimise_it() -> None:
    found = with_inference(frontier(MS), [row("a", p50=2.0), row("b", p50=4.0), row("c", p50=8.0)])
    assert [point.cost for point in found.points] == [2.0, 4.0, 8.0]
    assert found.bound[0] == 1.1 * 8.0


def test_a_measurement_replaces_another_as_a_whole() -> None:
    """Nothing of an earlier one is left, as the time of an arm by a runtime that this one is not."""
    first = with_inference(frontier(), [row("a"), row("b"), row("c")], [row("a", batch=32)])
    again = with_inference(first, [row("a", why_not="no operator"), row("b", p50=5.0), row("c")])
    assert not {MS, BATCH} & again.points[0].costs.keys()
    assert not {MS, BATCH} & again.points[0].spreads.keys()
    assert again.points[1].costs[MS] == 5.0
