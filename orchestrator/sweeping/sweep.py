"""A sweep on Ray Tune: arms of one base run, trained side by side. The driver alone writes to MLflow."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.tune
from ray.tune.experiment import Trial

from orchestrator.config import RunConfig, UsageError
from orchestrator.frontier.points import Frontier, on_front
from orchestrator.sweeping.trial import run_trial, trial_config, trial_resources
from orchestrator.tracking import TrackedRun, Tracking, children, track_training
from orchestrator.training.checkpoint.retention import drop_optimizer
from orchestrator.training.claim import Mode, claim
from orchestrator.training.fit import CPU_FOR_DATA, CPU_PER_WORKER, check_data, check_resources, identity
from orchestrator.training.seen import log_bad
from orchestrator.training.worker import Result, checkpoint_directory, result_of, run_directory


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Attributes:
    base: the run that every arm changes; its name is the sweep's.
    arms: name -> dotted changes of the base.
    quality, cost: the metrics to maximise and to minimise.
    """

    base: RunConfig
    arms: Mapping[str, Mapping[str, Any]]
    quality: str = "val/acc1"
    cost: str = "cost/train_flops_6mac"

    def runs(self) -> dict[str, RunConfig]:
        """arm -> its run. Raises UsageError naming the arm whose config is refused."""
        return {arm: trial_config(self.base, arm, changes) for arm, changes in self.arms.items()}


# arm -> its result, or the reason why it failed
Outcomes = dict[str, Result | str]
# called after every trial with its arm, and the outcomes so far
Progress = Callable[[str, Outcomes], None]


def check_sweep(sweep: Sweep, *, verify: bool = False) -> None:
    """Raises UsageError for an arm that is refused, data that is not whole, or too many workers."""
    runs = sweep.runs().values()
    if len({run.scale for run in runs}) > 1:
        raise UsageError("arms with different scale.* cannot share a sweep: set it once, for the base")
    for run in runs:
        check_resources(run)
    check_data(sweep.base, verify=verify)


def claim_sweep(sweep: Sweep, mode: Mode) -> None:
    """The sweep's directory: started, continued or refused, as `claim` has it."""
    arms = {
        f"arms.{arm}.{field}": value
        for arm, changes in sweep.arms.items()
        for field, value in changes.items()
    }
    claim(run_directory(sweep.base), identity(sweep.base) | arms, mode)


def run_sweep(
    sweep: Sweep, tracking: Tracking, parent: TrackedRun, *, max_concurrent: int | None, progress: Progress
) -> Outcomes:
    """Trains every arm that is not complete; a failing one does not stop the others."""
    # MLflow has every metric: no second copy as CSV, JSON and tfevents, nor the warning that there is none
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # a table of Tune's own settings; `progress` tells the user more
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    log = _TrialLog(sweep, tracking, parent, progress)
    if pending := log.pending():
        anyone = sweep.runs()[pending[0]]
        ray.tune.Tuner(
            ray.tune.with_resources(
                ray.tune.with_parameters(run_trial, base=sweep.base), trial_resources(anyone)
            ),
            param_space={
                "arm": ray.tune.grid_search(
                    [{"name": arm, "changes": dict(sweep.arms[arm])} for arm in pending]
                )
            },
            tune_config=ray.tune.TuneConfig(
                # reused processes import torch once, not once per trial
                reuse_actors=True,
                max_concurrent_trials=max_concurrent or most_concurrent(anyone),
            ),
            run_config=ray.tune.RunConfig(
                name="tune", storage_path=run_directory(sweep.base), callbacks=[log], verbose=0
            ),
        ).fit()
        log.settle_failures()
    return log.outcomes


def keep_weights_only(sweep: Sweep, frontier: Frontier) -> int:
    """Of complete trials off the frontier: nobody goes on from their optimiser. Bytes that it freed."""
    runs, freed = sweep.runs(), 0
    for point, front in zip(frontier.points, on_front(frontier), strict=True):
        if not front and point.arm in runs and result_of(runs[point.arm]):
            freed += drop_optimizer(checkpoint_directory(runs[point.arm]))
    return freed


def most_concurrent(run: RunConfig) -> int:
    """Trials of this size that the cluster holds at once; Tune does not see a trial's workers."""
    have, workers = ray.cluster_resources(), run.scale.workers
    if run.scale.use_gpu:
        return max(1, int(have.get("GPU", 0) // workers))
    per_trial = 1 if workers == 1 else workers * CPU_PER_WORKER + CPU_FOR_DATA
    return max(1, int(have["CPU"] // per_trial))


class _TrialLog(ray.tune.Callback):
    """Follows trials on the driver: their metrics go to MLflow, their ends into `outcomes`."""

    def __init__(self, sweep: Sweep, tracking: Tracking, parent: TrackedRun, progress: Progress) -> None:
        self.sweep = sweep
        self.tracking = tracking
        self.parent = parent
        self.progress = progress
        self.runs = sweep.runs()
        self.outcomes: Outcomes = {}
        self._tracked: dict[str, TrackedRun] = {}
        self._failed: list[Trial] = []

    def pending(self) -> list[str]:
        """Arms still to train. Of the others, those that MLflow was not told the end of are settled."""
        trials = (run for run in children(self.tracking, self.parent) if run.tags["role"] == "trial")
        told = {run.name for run in trials if run.status == "FINISHED"}
        for arm, run in self.runs.items():
            if result := result_of(run):
                if arm not in told:
                    self._settle(arm, result)
                self.outcomes[arm] = result
        return [arm for arm in self.runs if arm not in self.outcomes]

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        if "metrics" in result:
            self._run_of(_arm(trial)).log(result["step"], result["metrics"])

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        arm = _arm(trial)
        result = result_of(self.runs[arm])
        assert result is not None, f"{arm} ended without a result"
        self._settle(arm, result)
        self._end(arm, result)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._failed.append(trial)  # Tune attaches the reason later
        self._end(_arm(trial), "see the end of the sweep")

    def settle_failures(self) -> None:
        for trial in self._failed:
            arm, reason = _arm(trial), reason_of(trial.get_error())
            tracked = self._run_of(arm)
            tracked.tag(error=reason)
            log_bad(run_directory(self.runs[arm]), tracked)
            tracked.finish("FAILED")
            self.outcomes[arm] = reason

    def _settle(self, arm: str, result: Result) -> None:
        tracked = self._run_of(arm)
        tracked.log(result.step, result.metrics)
        log_bad(run_directory(self.runs[arm]), tracked)
        tracked.finish("FINISHED")

    def _end(self, arm: str, outcome: Result | str) -> None:
        self.outcomes[arm] = outcome
        self.progress(arm, self.outcomes)

    def _run_of(self, arm: str) -> TrackedRun:
        if arm not in self._tracked:
            run = self.runs[arm]
            self._tracked[arm] = track_training(
                self.tracking, run, run_directory(run), parent=self.parent, role="trial", arm=arm
            )
        return self._tracked[arm]


def _arm(trial: Trial) -> str:
    return trial.config["arm"]["name"]


def reason_of(error: BaseException | None) -> str:
    """The last line of what a remote process raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
