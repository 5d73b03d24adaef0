"""A sweep on Ray Tune: the agenda says which job is next, Tune runs them, the driver follows and writes."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray.tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher

from orchestrator.config import RunConfig
from orchestrator.errors import reason_of
from orchestrator.sweeps.agenda import Agenda, Job, Outcome
from orchestrator.sweeps.sweep import Trial
from orchestrator.sweeps.trial import run_job
from orchestrator.training.metrics_file import Metrics
from orchestrator.training.resources import run_resources
from orchestrator.training.run_directory import Result, pause_of, result_of, run_directory

RESTARTS = 3  # of a trial's process that dies
STATUS_EVERY_S = 30


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a sweep's driver does about its jobs.

    Attributes:
        done: must tell the agenda.
        status: called every half minute.
    """

    began: Callable[[Job], None]
    report: Callable[[Trial, int, Metrics], None]
    done: Callable[[Job, Outcome], None]
    status: Callable[[], None]


def run_jobs(base: RunConfig, agenda: Agenda, hooks: Hooks) -> None:
    """Does what the agenda says until it says no more; a failing trial does not stop the others."""
    # MLflow has every metric: no second copy as CSV, JSON and tfevents, nor the warning that there is none
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # a table of Tune's own settings; the job prints more
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # it would end the sweep as if all were done
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = "64"  # the agenda admits no more than the devices hold
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "600"  # nobody restores from it: storage has what happened
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    jobs = _Jobs(agenda)
    if not jobs.draw_first():
        return
    ray.tune.Tuner(
        ray.tune.with_resources(ray.tune.with_parameters(run_job, base=base), _reserved),
        tune_config=ray.tune.TuneConfig(
            search_alg=jobs,
            num_samples=-1,
            reuse_actors=True,  # reused processes import torch once, not once per trial
            trial_dirname_creator=lambda trial: trial.trial_id,
            trial_name_creator=lambda trial: trial.trial_id,
        ),
        run_config=ray.tune.RunConfig(
            name="tune",
            storage_path=run_directory(base),
            callbacks=[_Follow(jobs, hooks)],
            failure_config=ray.tune.FailureConfig(max_failures=RESTARTS),
            verbose=0,
        ),
    ).fit()


def _reserved(config: dict[str, Any]) -> ray.tune.PlacementGroupFactory:
    """What Tune reserves for the trial's own process: one that waits for its workers must not starve them."""
    need = config["job"]["need"]
    bundle: dict[str, float] = {"memory": 1 << 20} if need is None else need  # all zero is refused
    return ray.tune.PlacementGroupFactory([bundle])


class _Jobs(Searcher):
    """The agenda as what Tune asks for trials. Tune's trial is one job."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__()
        self.agenda = agenda
        self.of_trial: dict[str, Job] = {}
        self._first: Job | None = None

    def draw_first(self) -> bool:
        """False if there is nothing to do: Tune would wait for something."""
        self._first = self.agenda.next()
        return self._first is not None

    def suggest(self, trial_id: str) -> Any:
        job, self._first = self._first or self.agenda.next(), None
        if job is None:
            return None if self.agenda.running() else Searcher.FINISHED
        self.of_trial[trial_id] = job
        run = job.trial.run
        need = run_resources(run) if run.scale.workers == 1 else None
        choice = {
            "name": job.trial.name,
            "changes": dict(job.trial.changes),
            "until": job.until,
            "need": need,
        }
        return {"job": choice}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """The callback has told the agenda."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a sweep goes on from its storage."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its searcher, for a restore that never comes


class _Follow(ray.tune.Callback):
    """Hands on what Tune's trials report, as jobs."""

    def __init__(self, jobs: _Jobs, hooks: Hooks) -> None:
        self.jobs = jobs
        self.hooks = hooks
        self._started: set[str] = set()
        self._failed: dict[str, str] = {}
        self._status_at = time.monotonic()

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._begin(trial)

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        if "failed" in result:
            self._failed[trial.trial_id] = result["failed"]
        elif "metrics" in result:
            self.hooks.report(self._job(trial).trial, result["step"], result["metrics"])

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        job = self._job(trial)
        reason = self._failed.get(trial.trial_id)
        self.hooks.done(job, reason if reason is not None else _outcome(job))

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._begin(trial)  # no process of it ever ran if there was no place or no environment for one
        self.hooks.done(
            self._job(trial), f"its process died {RESTARTS + 1} times: {reason_of(trial.get_error())}"
        )

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        if time.monotonic() - self._status_at > STATUS_EVERY_S:
            self._status_at = time.monotonic()
            self.hooks.status()

    def _begin(self, trial: TuneTrial) -> None:
        if trial.trial_id not in self._started:  # else its process died, and this is another
            self._started.add(trial.trial_id)
            self.hooks.began(self._job(trial))

    def _job(self, tuned: TuneTrial) -> Job:
        return self.jobs.of_trial[tuned.trial_id]

    def __getstate__(self) -> dict[str, Any]:
        return {}


def _outcome(job: Job) -> Result:
    run = job.trial.run
    found = result_of(run) or pause_of(run, job.until)
    assert found is not None, f"{run.name} ended without a result"
    return found
