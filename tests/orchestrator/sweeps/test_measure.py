"""Which runs are measured for which, what stands between them, and real steps on a real Ray."""

from typing import Any

import pytest

from moe.cost import train_flops_6mac
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.recipe import CosineConfig, SGDConfig
from orchestrator.sweeps.measure import Pace, alone, interpolate, measured_steps, spread


def run(kind: str | None = None, **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {"train.steps": 100, "model.moe": None}
    if kind:
        fields = {"train.steps": 100, "model.moe.router.kind": kind, "model.moe.num_experts": 4}
    return override(RunConfig(), fields | {name.replace("__", "."): value for name, value in changes.items()})


def test_only_what_decides_speed_is_told_apart() -> None:
    recipe = {"train__schedule__kind": CosineConfig().kind, "train__optimizer__beta2": 0.99, "train__lr": 0.1}
    assert alone(run()) == alone(
        run(name="other", train__steps=7, train__seed=3, checkpoint__every=1, **recipe)
    )
    different: list[dict[str, Any]] = [
        {"model__depth": 1},
        {"data__batch_size": 32},
        {"data__augment": "inception"},
        {"train__microbatch": 16},
        {"train__compute_dtype": "bfloat16"},
        {"train__optimizer__kind": SGDConfig().kind},
    ]
    assert len({alone(run(**changes)) for changes in [{}, *different]}) == 1 + len(different)


def test_of_several_workers_one_is_measured_with_its_share() -> None:
    whole = run("soft", data__batch_size=64, data__lanes=16, scale__workers=4, scale__ep=2)
    assert alone(whole) == alone(run("soft", data__batch_size=16))
    assert alone(whole).scale.workers == alone(whole).scale.ep == 1
    assert alone(whole).images_per_pass() == whole.images_per_pass()


def test_the_beginning_is_shared_out() -> None:
    """10 s more for the first steps are 0.1 s of each of 100."""
    assert Pace(step_s=0.5, start_s=10).mean_s(100) == pytest.approx(0.6)


def test_of_every_family_the_ends_and_the_middle_are_measured() -> None:
    dense = [alone(run(model__depth=depth)) for depth in (5, 1, 3, 2, 4)]
    soft = [alone(run("soft", model__depth=depth)) for depth in (2, 4)]
    found = spread([*dense, *soft])
    assert [(one.model.depth, one.model.moe is None) for one in found] == [
        (1, True),
        (3, True),
        (5, True),
        (2, False),
        (4, False),
    ]


def test_between_them_seconds_are_a_power_of_flops() -> None:
    """seconds = 3e-9 FLOPs^0.7 is a line in the logarithms, so what lies between is exact."""

    def seconds(one: RunConfig) -> float:
        return 3e-9 * train_flops_6mac(one.model, one.data.batch_size) ** 0.7

    runs = [alone(run(model__depth=depth)) for depth in (1, 2, 3, 4, 5)]
    soft = alone(run("soft", model__depth=3))
    known = {one: Pace(step_s=seconds(one), start_s=1.0) for one in spread(runs)} | {
        soft: Pace(step_s=99.0, start_s=99.0)
    }
    for one in runs:
        found = interpolate(one, known)
        assert found
        assert (found.step_s, found.start_s) == pytest.approx((seconds(one), 1.0))
    assert interpolate(alone(run(model__depth=6)), known) is None
    assert interpolate(alone(run("expert_choice")), known) is None


@pytest.mark.smoke
@pytest.mark.usefixtures("cluster")
def test_real_steps_of_real_runs(digits: str, caplog: pytest.LogCaptureFixture) -> None:
    runs = {
        "dense": run(data__path=digits),
        "again": run(data__path=digits, train__seed=1),
        "bf16": run(data__path=digits, train__compute_dtype="bfloat16"),
        "soft": run("soft", data__path=digits, scale__workers=2),
        "no data": run(data__path=f"{digits}-gone"),
    }
    found = measured_steps(runs, rounds=1, seconds=0.2)
    assert [*found] == ["dense", "again", "bf16", "soft"]
    assert "a step of dense cannot be measured: " in caplog.text
    assert all(seconds > 0 for seconds in found.values())
    assert found["dense"] == found["again"]

    deep = {f"d{depth}": run(data__path=digits, model__depth=depth) for depth in (1, 2, 4, 6)}
    found = measured_steps(deep, most=3, rounds=2, seconds=0.2)
    assert [*found] == [*deep]
    assert all(seconds > 0 for seconds in found.values())
