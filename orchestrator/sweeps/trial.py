"""One job of a trial in its Tune process: train to a step, here or with Ray Train workers."""

import traceback
from collections.abc import Mapping
from typing import Any

import ray.tune

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.errors import reason_of
from orchestrator.sweeps.sweep import trial_config
from orchestrator.training.fit import fit
from orchestrator.training.run_directory import run_directory


def run_job(choice: Mapping[str, Any], base: RunConfig) -> None:
    """What Tune calls. `choice`: the trial's name, its dotted changes of the base, the step to train to.

    What the training raises is an outcome, reported as such, and its traceback lies in ``error.txt`` of the
    run: to do it again would raise it again. Only a process that dies is an error for Tune, which starts
    another one; that goes on from the run's newest checkpoint.
    """
    job = choice["job"]
    run = trial_config(base, job["name"], job["changes"])
    try:
        fit(run, _report, inline=run.scale.workers == 1, until=job["until"])
    except Exception as error:
        trace = storage.join(run_directory(run), "error.txt")
        storage.write_bytes(trace, traceback.format_exc().encode())
        ray.tune.report({"failed": reason_of(error)})


def _report(step: int, metrics: Mapping[str, float]) -> None:
    ray.tune.report({"step": step, "metrics": dict(metrics)})
