"""One trial: a `fit` inside a Tune process, or one that waits for its Ray Train workers."""

from collections.abc import Mapping
from typing import Any

import ray.tune
from ray.tune.integration.ray_train import TuneReportCallback

from orchestrator.codec import override
from orchestrator.config import RunConfig, UsageError
from orchestrator.training.fit import fit, fit_on_workers, start


def trial_config(base: RunConfig, arm: str, changes: Mapping[str, Any]) -> RunConfig:
    """The run of one arm. Raises UsageError naming the arm whose config is refused."""
    try:
        return override(base, {**changes, "name": f"{base.name}/trials/{arm}"})
    except UsageError as error:
        raise UsageError(f"arm {arm}: {error}") from None


def run_trial(choice: Mapping[str, Any], base: RunConfig) -> None:
    """What Tune calls. `choice`: the arm's name and its dotted changes of the base."""
    run = trial_config(base, choice["arm"]["name"], choice["arm"]["changes"])
    if run.scale.workers == 1:
        fit(run, lambda step, metrics: ray.tune.report({"step": step, "metrics": metrics}), inline=True)
    elif start(run) is None:
        fit_on_workers(run, [TuneReportCallback()])


def trial_resources(run: RunConfig) -> dict[str, float]:
    """What Tune reserves for the trial's own process: a waiting one must not starve its workers of CPUs."""
    if run.scale.workers > 1:
        return {"cpu": 0, "memory": 1 << 20}  # all zero is refused
    return {"cpu": 1, "gpu": 1} if run.scale.use_gpu else {"cpu": 1}
