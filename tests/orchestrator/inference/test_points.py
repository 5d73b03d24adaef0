"""What was measured becomes costs of the arms, with their ends."""

import math
from typing import Any

import pytest

from orchestrator.costs import ENERGY, MS, MS_P95, USD
from orchestrator.errors import UsageError
from orchestrator.frontier.answer import upper
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.points import Point
from orchestrator.inference.points import INFERENCE, with_inference
from orchestrator.units import axis_title

ENERGIES = {"mj": 20.0, "mj_q25": 19.0, "mj_q75": 22.0}
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


BOUND = {
    MS_P95: "max_ms",
    BATCH: "max_batch_ms",
    "infer/memory_mib": "max_mib",
    "infer/file_mb": "max_mb",
    ENERGY: "max_mj",
    USD: "max_usd",
}


@pytest.mark.parametrize("cost", INFERENCE)
def test_each_may_be_the_cost_of_a_sweep_an_axis_and_a_bound(cost: str) -> None:
    """Each of the three arms takes twice as much as the arm before it."""
    rows = []
    for arm_name, times in (("a", 1), ("b", 2), ("c", 4)):
        values = {name: times * value for name, value in row("a", **ENERGIES).items() if type(value) is float}
        rows.append(row(arm_name, **values))
    priced = {"rows": rows, "batch_rows": [each | {"batch": 32} for each in rows], "usd_per_hour": 0.05}
    found = with_inference(frontier(cost), **priced)
    costs = [point.cost for point in found.points]
    assert costs == pytest.approx([costs[0], 2 * costs[0], 4 * costs[0]])
    assert found.bound[0] == pytest.approx(1.1 * costs[2])
    assert found.knee
    drawn = with_inference(frontier(), **priced)
    assert drawn.at_cost(cost).bound[0] == pytest.approx(1.1 * costs[2])
    title = axis_title(cost)
    assert frontier_page(drawn).count(f">{title}</option>") == 2, "as an axis and as a bound"
    assert [p.arm for p in drawn.within(cost, 1.01 * upper(drawn.points[1], cost)).points] == ["a", "b"]
    if cost in BOUND:
        bound = {BOUND[cost]: 1.01 * upper(drawn.points[1], cost)}
        answer = drawn.answer(**bound)
        assert answer.best
        assert (answer.best.arm, answer.others) == ("a", 1), "the cheapest of equal quality"


def test_energy_and_money_by_hand() -> None:
    """4 images in 8 ms: 2 ms each on two threads of .05 USD an hour, 2,000 s of both for a million. 40 mJ for
    all four are 10 for one.
    """
    rows = [row("a", p50=8.0, q25=8.0, q75=12.0, batch=4, threads=2, mj=40.0, mj_q25=36.0, mj_q75=44.0)]
    point = with_inference(frontier(), rows, usd_per_hour=0.05).points[0]
    usd = 2 * 0.05 * 2000 / 3600
    assert point.costs[USD] == pytest.approx(usd)
    assert point.spreads[USD] == pytest.approx((usd, 1.5 * usd))
    assert (point.costs[ENERGY], point.spreads[ENERGY]) == (10.0, (9.0, 11.0))


def test_what_is_not_known_is_absent() -> None:
    """Energy that no counter shows, also beside a row that has it, and money without a price."""
    found = with_inference(frontier(), [row("a"), row("b", **ENERGIES), row("c", mj=math.nan)])
    assert [ENERGY in point.costs for point in found.points] == [False, True, False]
    assert not any(USD in point.costs for point in found.points)
    assert "USD" not in found.note
    bare = with_inference(frontier(), [row("a"), row("b"), row("c")])
    assert ENERGY not in bare.to_dataframe()
    assert axis_title(ENERGY) not in frontier_page(bare)
    with pytest.raises(UsageError, match=r"infer/energy_mj was not measured: jobs/answer.py s"):
        bare.answer(max_mj=5)


def test_a_measurement_replaces_another_as_a_whole() -> None:
    """Nothing of an earlier one is left, as the time of an arm by a runtime that this one is not."""
    first = with_inference(frontier(), [row("a"), row("b"), row("c")], [row("a", batch=32)])
    again = with_inference(first, [row("a", why_not="no operator"), row("b", p50=5.0), row("c")])
    assert not {MS, BATCH} & again.points[0].costs.keys()
    assert not {MS, BATCH} & again.points[0].spreads.keys()
    assert again.points[1].costs[MS] == 5.0
