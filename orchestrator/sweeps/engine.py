"""A sweep on Ray Tune: the queue says which trial is next, Tune runs it, the driver follows and writes."""

import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray.tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.errors import reason_of
from orchestrator.sweeps.queue import Job, Outcome, TrialQueue, TrialState
from orchestrator.sweeps.scheduler import QueueScheduler
from orchestrator.sweeps.sweep import Trial, trial_config
from orchestrator.training.fit import fit
from orchestrator.training.metrics_file import Metrics
from orchestrator.training.resources import run_resources
from orchestrator.training.run_directory import pause_of, result_of, run_directory

RESTARTS = 3  # of a trial's process that dies
STATUS_EVERY_S = 30


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a sweep's driver does about its jobs.

    Attributes:
        done: a job ended; it must tell the queue.
        status: called every half minute.
    """

    began: Callable[[Job], None]
    report: Callable[[Trial, int, Metrics], None]
    done: Callable[[Job, Outcome], None]
    status: Callable[[], None]


def run_jobs(base: RunConfig, queue: TrialQueue, hooks: Hooks) -> None:
    """Does what the queue says until it says no more; a failing trial does not stop the others."""
    # MLflow has every metric: no second copy as CSV, JSON and tfevents, nor the warning that there is none.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # a table of Tune's own settings; the job prints more
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # it would end the sweep as if all were done
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = "64"  # the queue admits no more than the devices hold
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "600"  # a sweep continues from its storage, not from Tune's
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    scheduler = SweepScheduler(queue, hooks)
    first = scheduler.new_job()
    if first is None:
        return  # Tune would wait for something to do
    ray.tune.Tuner(
        ray.tune.with_resources(ray.tune.with_parameters(train_trial, base=base), _reserved),
        tune_config=ray.tune.TuneConfig(
            scheduler=scheduler,
            search_alg=NewTrials(scheduler, first),
            num_samples=-1,
            reuse_actors=True,  # reused processes import torch once, not once per trial
            trial_dirname_creator=lambda trial: trial.trial_id,
            trial_name_creator=lambda trial: trial.trial_id,
        ),
        run_config=ray.tune.RunConfig(
            name="tune",
            storage_path=run_directory(base),
            callbacks=[Follow(scheduler)],
            failure_config=ray.tune.FailureConfig(max_failures=RESTARTS),
            verbose=0,
        ),
    ).fit()


def train_trial(config: Mapping[str, Any], base: RunConfig) -> None:
    """Trains the trial of `config` to its next pause or its end, here or with Ray Train workers.

    A pause is reported once everything of it is in storage and its workers have ended: Tune ends the process
    in that report, and `fit` goes on from storage in the next one. What the training raises is an outcome,
    reported as such, and its traceback lies in ``error.txt`` of the run: to do it again would raise it again.
    Only a process that dies is an error for Tune, which starts another one.
    """
    run = trial_config(base, config["name"], config["changes"])
    try:
        result = fit(run, _report, inline=run.scale.workers == 1, until=config["until"])
    except Exception as error:
        trace = storage.join(run_directory(run), "error.txt")
        storage.write_bytes(trace, traceback.format_exc().encode())
        ray.tune.report({"failed": reason_of(error)})
    else:
        if result.status == "paused":
            ray.tune.report({"paused_at": result.step})


def _report(step: int, metrics: Mapping[str, float]) -> None:
    ray.tune.report({"step": step, "metrics": dict(metrics)})


def _reserved(config: dict[str, Any]) -> ray.tune.PlacementGroupFactory:
    """What Tune reserves for the trial's own process: one that waits for its workers must not starve them."""
    need = config["need"]
    bundle: dict[str, float] = {"memory": 1 << 20} if need is None else need  # all zero is refused
    return ray.tune.PlacementGroupFactory([bundle])


class SweepScheduler(QueueScheduler):
    """The queue of a sweep in Tune. How a job ended is read from the storage of its run."""

    def __init__(self, queue: TrialQueue, hooks: Hooks) -> None:
        super().__init__(queue, time_attr="paused_at")
        self.hooks = hooks
        self._begun: dict[str, Job] = {}
        self._failed: dict[str, str] = {}

    def state_of(self, trial: TuneTrial) -> TrialState:
        return self.queue.states[trial.config["name"]]

    def began(self, trial: TuneTrial) -> Job:
        """The job of the trial, from its first process on."""
        state = self.state_of(trial)
        if state.name not in self._begun:
            self._begun[state.name] = Job(state=state, until=state.until)
            self.hooks.began(self._begun[state.name])
        return self._begun[state.name]

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        if "failed" in result:
            self._failed[self.state_of(trial).name] = result["failed"]
        elif self.time_attr in result and not result.get("done"):
            self._ended(trial)
            return self.PAUSE  # the function cannot be told another step: its next process is
        return self.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> None:
        self._ended(trial)

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        """`Follow` hears of the last failure alone."""

    def died(self, trial: TuneTrial) -> None:
        reason = f"its process died {RESTARTS + 1} times: {reason_of(trial.get_error())}"
        self._failed[self.state_of(trial).name] = reason
        self._ended(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        if (trial := super().choose_trial_to_run(tune_controller)) is not None:
            trial.set_config(trial.config | {"until": self.state_of(trial).until})
        return trial

    def _ended(self, trial: TuneTrial) -> None:
        # No process of it ever ran if there was no place or no environment for one.
        job = self.began(trial)
        del self._begun[job.state.name]
        outcome = self._failed.pop(job.state.name, None)
        if outcome is None:
            outcome = result_of(job.trial.run) or pause_of(job.trial.run, job.until)
        assert outcome is not None, f"{job.trial.name} ended without a result"
        self.hooks.done(job, outcome)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves it for a restore; a sweep is run again instead


class NewTrials(Searcher):
    """Gives a trial to Tune when the queue starts it. Paused ones go on by the scheduler."""

    def __init__(self, scheduler: SweepScheduler, first: Job) -> None:
        super().__init__()
        self.scheduler = scheduler
        self._first: Job | None = first

    def suggest(self, trial_id: str) -> Any:
        job, self._first = self._first or self.scheduler.new_job(), None
        if job is None:
            return None if self.scheduler.active() else Searcher.FINISHED
        run = job.trial.run
        need = run_resources(run) if run.scale.workers == 1 else None
        changes = dict(job.trial.changes)
        return {"name": job.trial.name, "changes": changes, "until": job.until, "need": need}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """The scheduler has told the queue."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a sweep goes on from its storage."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Follow(ray.tune.Callback):
    """What Tune tells its callbacks alone: that a process began, that its last restart failed, the time.

    Reports pass here too, since a scheduler gets them flattened, and the last one twice.
    """

    def __init__(self, scheduler: SweepScheduler) -> None:
        self.scheduler = scheduler
        self._status_at = time.monotonic()

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self.scheduler.began(trial)

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        if "metrics" in result:
            trained = self.scheduler.state_of(trial).trial
            self.scheduler.hooks.report(trained, result["step"], result["metrics"])

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self.scheduler.died(trial)

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        if time.monotonic() - self._status_at > STATUS_EVERY_S:
            self._status_at = time.monotonic()
            self.scheduler.hooks.status()

    def __getstate__(self) -> dict[str, Any]:
        return {}
