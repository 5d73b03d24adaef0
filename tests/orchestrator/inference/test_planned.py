"""Times of untrained models, and a sweep without the arms that are too slow."""

import numpy as np
import pytest

from moe import ViTConfig
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.inference.planned import PlannedTime, _estimates, _that_fit, planned_times
from orchestrator.sweeps import within
from orchestrator.sweeps.sweep import Sweep

TINY = ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=16, num_classes=3)
ARMS = {f"w{width}": {"model.width": width} for width in (16, 32, 64)}


def models(*widths: int) -> list[ViTConfig]:
    return [ViTConfig(image_size=8, patch_size=4, width=width, heads=2, num_classes=3) for width in widths]


def test_large_models_are_estimated_on_the_line_of_the_others() -> None:
    """Three times lie on a line: the estimate is exact. Then one of them is 20 % higher."""
    known, large = models(16, 32, 64), models(128)
    gflops = dict(zip([*known, *large], (1.0, 2.0, 4.0, 100.0), strict=True))
    timed = {
        model: PlannedTime(ms=1 + 2 * gflops[model], ms_p95=1.5 * (1 + 2 * gflops[model])) for model in known
    }
    (found,) = _estimates(timed, {large[0]: 100.0}, gflops).values()
    assert (found.ms, found.ms_p95) == (pytest.approx(201), pytest.approx(301.5))
    assert found.factor == pytest.approx(1)
    timed[known[1]] = PlannedTime(ms=6.0, ms_p95=9.0)
    (found,) = _estimates(timed, {large[0]: 100.0}, gflops).values()
    assert found.factor >= 6 / 5
    assert found.least == pytest.approx(found.ms / found.factor)
    assert _estimates(dict([*timed.items()][:2]), {large[0]: 100.0}, gflops) == {}, (
        "a line through two has no error"
    )


def test_only_models_that_this_machine_times_in_two_minutes_are_timed() -> None:
    runs = {model: RunConfig(name="a", storage="/tmp/none", model=model) for model in models(16, 32, 64)}
    sizes = dict(zip(runs, (3.0, 1.0, 30.0), strict=True))  # 80 calls at 20 GFLOPs a second
    assert [model.width for model in _that_fit(runs, sizes)] == [32, 16]


@pytest.mark.smoke
def test_each_architecture_is_timed_once() -> None:
    said = list[str]()
    run = RunConfig(name="a", storage="/tmp/none", model=TINY)
    found = planned_times({"one": run, "w1@2+x": run}, say=said.append)
    assert found["one"] == found["w1@2+x"]
    assert 0 < found["one"].ms <= found["one"].ms_p95
    assert found["one"].factor == 1
    assert said[:2] == [
        "writing 1 models as ONNX",
        "timing 1 untrained models in turns: one image, onnxruntime, 1 thread",
    ]


def test_arms_that_are_too_slow_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """An estimate must exceed the bound by its error factor. An arm without a time is kept."""
    sweep = Sweep(base=RunConfig(name="s", storage=str(tmp_path)), arms=ARMS, seeds=(0, 1))
    times = {
        "w16": PlannedTime(ms=1.0, ms_p95=4.0),
        "w32": PlannedTime(ms=4.0, ms_p95=4.0, factor=np.sqrt(2)),
    }
    monkeypatch.setattr(
        within, "planned_times", lambda runs, say: {arm: times[arm] for arm in runs if arm in times}
    )
    said = list[str]()
    left, found = within.arms_within(sweep, 3.0, say=said.append)
    assert ([*left.arms], found) == ([*ARMS], times)
    left, _ = within.arms_within(sweep, 2.0, say=said.append)
    assert [*left.arms] == ["w16", "w64"]
    where = within.machine()
    assert said == [f"left out, because the median call takes more than 2 ms on {where}: w32 (4 ms)"]
    times["w64"] = times["w32"]
    with pytest.raises(UsageError, match=r"no arm takes at most 0.5 ms: the nearest, w16, takes 1 ms"):
        within.arms_within(sweep, 0.5)
    times.clear()
    with pytest.raises(UsageError, match="no model of s can be timed: leave out `max_ms`"):
        within.arms_within(sweep, 0.5)
