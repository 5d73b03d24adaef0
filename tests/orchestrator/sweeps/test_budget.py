"""What trials need, by hand; the price table and what is wrong with one; a budget's bound."""

import math
from pathlib import Path
from typing import Any

import pytest

from moe.cost import num_params, train_flops_6mac
from moe.plan import GIB
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.sweeps.budget import (
    checkpoints_kept,
    layout_of,
    plan,
    predicted_against_actual,
    steps_to_train,
)
from orchestrator.sweeps.prices import Budget, Device, load_prices

DEVICE = Device(usd_per_hour=1.8, peak_tflops=100.0, memory_gib=80.0)
PRICES = str(Path(__file__).parents[3] / "cluster" / "prices.yaml")


def run(**changes: Any) -> RunConfig:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return override(RunConfig(), {"model.moe": None, "train.steps": 100, "data.batch_size": 64} | named)


SOFT = {"model__moe__router__kind": "soft", "model__moe__num_experts": 4}
RUNS = {
    "dense": run(),
    "wide": run(scale__workers=2),
    "soft": run(**SOFT),
    "soft-2": run(**SOFT, scale__workers=2),
}


def test_measured_seconds_become_device_seconds_and_money() -> None:
    """0.5 s x 100 steps x 2 workers = 100 device-seconds; at 1.8 usd an hour that is 5 cents."""
    wide = plan(RUNS, device=DEVICE, seconds_per_step={"wide": 0.5}).estimates[1]
    assert (wide.trial, wide.family, wide.workers) == ("wide", "dense", 2)
    assert wide.device_s == pytest.approx(100)
    assert wide.usd == pytest.approx(0.05)
    assert wide.params == num_params(RUNS["wide"].model) == wide.active_params
    assert wide.train_flops_6mac == train_flops_6mac(RUNS["wide"].model, 6400)
    assert wide.memory_gib * GIB == pytest.approx(layout_of(RUNS["wide"]).peak())


def test_an_mfu_stands_in_for_what_was_not_measured() -> None:
    """FLOPs / (0.2 x 100e12), whatever the number of workers."""
    found = plan(RUNS, device=DEVICE, seconds_per_step={"dense": 0.5}, mfu=0.2).estimates
    assert found[0].device_s == pytest.approx(50)
    for one in found[1:]:
        assert one.device_s == pytest.approx(one.train_flops_6mac / 20e12)
    with pytest.raises(UsageError, match="mfu=40 must be above 0 and at most 1"):
        plan(RUNS, device=DEVICE, mfu=40)


def test_totals_are_sums_and_unknown_if_a_part_is() -> None:
    seconds = {"dense": 1.0, "wide": 2.0, "soft": 3.0}  # 100, 400, 300 device-seconds
    known = plan({name: RUNS[name] for name in seconds}, device=DEVICE, seconds_per_step=seconds)
    assert known.total().device_s == pytest.approx(800)
    assert known.total().usd == pytest.approx(0.4)
    assert {name: one.device_s for name, one in known.by_family().items()} == {"dense": 500, "soft": 300}
    assert known.by_family()["dense"].trials == 2
    unknown = plan(RUNS, device=DEVICE, seconds_per_step=seconds)
    assert unknown.total().device_s is None
    assert unknown.total().usd is None
    assert unknown.total().train_flops_6mac == sum(e.train_flops_6mac for e in unknown.estimates)


def test_what_will_not_fit_is_said() -> None:
    tiny = Device(usd_per_hour=0, peak_tflops=1, memory_gib=0.0001)
    unfit = dict.fromkeys(("wide", list(RUNS)[3]), "2 workers x 0.5 CPU + 1 CPU for data = 2 CPUs")
    problems = plan(RUNS, device=tiny, unfit=unfit).problems()
    assert [len(problems[name]) for name in RUNS] == [1, 2, 1, 2]
    assert "GiB per device, 90% of 0.0001" in problems["dense"][0]
    assert problems["wide"][1] == unfit["wide"]
    assert not plan(RUNS, device=DEVICE).problems()
    assert not plan(RUNS, device=Device(usd_per_hour=0, peak_tflops=1)).problems()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 2),  # of ten, the newest two; evaluated at the end only, so the best is the newest
        ({"train__eval_every": 10}, 3),  # the best may be the first
        ({"train__eval_every": 10, "checkpoint__keep_best": 0}, 2),
        ({"checkpoint__keep_every": 50}, 3),  # 50 beside 90 and 100
        ({"checkpoint__every": 60}, 2),  # 60 and 100 are all there are
        ({"checkpoint__every": 1000}, 1),
    ],
)
def test_checkpoints_that_stay(changes: dict[str, Any], kept: int) -> None:
    """AdamW keeps two numbers per parameter: three times 4 bytes each, and a third of it without."""
    one = run(**changes)
    assert checkpoints_kept(one) == kept
    estimate = plan({"one": one}, device=DEVICE).estimates[0]
    assert estimate.weights_bytes == kept * 4 * estimate.params
    assert estimate.checkpoint_bytes == kept * 12 * estimate.params


def test_a_branch_pays_for_its_own_steps() -> None:
    branch = run(train__trunk="s3://runs/trunk/checkpoints/step-00000060")
    assert steps_to_train(branch) == 40
    measured, by_mfu = (
        plan({"b": branch}, device=DEVICE, seconds_per_step=seconds, mfu=0.5).estimates[0]
        for seconds in ({"b": 0.5}, {})
    )
    assert measured.device_s == pytest.approx(20)
    assert by_mfu.device_s == pytest.approx(train_flops_6mac(branch.model, 40 * 64) / 50e12)


def test_predicted_against_actual_of_what_was_trained() -> None:
    planned = plan(RUNS, device=DEVICE, seconds_per_step={"dense": 1.0, "wide": 1.0, "soft": 1.0})
    rows = predicted_against_actual(planned, {"dense": 110, "soft": 80, "soft-2": 90, "elsewhere": 5})
    found = [(row.family, row.trials, row.predicted_s, row.actual_s) for row in rows]
    assert found == [("dense", 1, 100, 110), ("soft", 1, 100, 80), ("all", 2, 200, 190)]
    assert rows[1].ratio() == 1.25
    assert [row.family for row in predicted_against_actual(planned, {"dense": 110})] == ["dense"]


def test_the_price_table_that_comes_along() -> None:
    prices = load_prices(PRICES)
    assert {"CPU-core", "CPU-node", "A10G", "A100-40", "A100-80", "H100-80", "H200"} == prices.keys()
    assert all(device.memory_gib for device in prices.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no devices"),
        ("- H100", "holds no devices"),
        ("H100: 7", "H100 is a group of fields, not a value; got 7"),
        ("H100: {usd_per_hour: 7}", "H100 has no peak_tflops"),
        ("H100: {usd_per_hour: 7, peak_tflops: 989, price: 3}", "unknown field price"),
        ("H100: {usd_per_hour: seven, peak_tflops: 989}", "usd_per_hour='seven'"),
        ("H100: {usd_per_hour: -7, peak_tflops: 989}", "usd_per_hour must be at least 0, got -7"),
        ("H100: {usd_per_hour: 7, peak_tflops: 0}", "peak_tflops must be positive, got 0"),
        ("H100: {usd_per_hour: 7", "is no YAML"),
    ],
)
def test_a_wrong_price_table_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        load_prices(str(path))
    with pytest.raises(UsageError, match=r"no price table at .*none.yaml: copy cluster/prices.yaml"):
        load_prices(str(tmp_path / "none.yaml"))


def test_a_budget_counts_what_runs() -> None:
    """One hour: 1800 s spent, 1200 still to come from trials that run, so 600 are left."""
    hour = Budget(hours=1)
    assert hour.allows(600, spent_s=1800, running_predicted_s=1200)
    assert not hour.allows(601, spent_s=1800, running_predicted_s=1200)
    assert Budget().allows(1e12, spent_s=1e12, running_predicted_s=1e12)


def test_money_is_device_hours_at_the_price() -> None:
    """3 usd at 1.5 an hour are two hours; of both bounds the nearer counts."""
    assert Budget(usd=3, usd_per_hour=1.5).limit_s() == 7200
    assert Budget(usd=3, hours=1, usd_per_hour=1.5).limit_s() == 3600
    assert Budget().limit_s() == math.inf
    with pytest.raises(UsageError, match="3 usd needs the price of a device"):
        Budget(usd=3)
    with pytest.raises(UsageError, match="hours=0 allows nothing"):
        Budget(hours=0)
