"""A sweep on Ray Tune: the queue says which trial is next, Tune runs it, the driver follows and writes."""

import logging
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import ray.tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher
from ray.util.placement_group import PlacementGroup, placement_group_table

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.errors import reason_of
from orchestrator.sweeps.queue import Job, Outcome, TrialQueue, TrialState
from orchestrator.sweeps.scheduler import QueueScheduler
from orchestrator.training.fit import fit
from orchestrator.training.resources import is_inline, run_resources
from orchestrator.training.run_directory import pause_of, result_of, run_directory

RESTARTS = 3  # of a trial's process that dies
TUNE_ENV = {  # settings that have no argument in Tune
    # MLflow has every metric: Tune writes no copies as CSV, JSON and tfevents.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # Otherwise Tune prints a table of its settings, even with verbose=0.
    "RAY_AIR_NEW_OUTPUT": "0",
    # Tune's handler would end the sweep on Ctrl-C as if all trials were done.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Trials start side by side: the queue admits no more than the devices hold.
    "TUNE_MAX_PENDING_TRIALS_PG": "64",
    # A sweep continues from its own directory, so Tune's state is written as rarely as possible.
    "TUNE_GLOBAL_CHECKPOINT_S": "600",
}


class Hooks(Protocol):
    """Callbacks of a sweep's driver for its jobs."""

    def began(self, job: Job) -> None: ...

    def done(self, job: Job, outcome: Outcome) -> None:
        """A job ended. The driver must tell the queue."""

    def follow(self) -> None:
        """Called a few times a second: running trials may have reported something in their directories."""


def run_jobs(base: RunConfig, queue: TrialQueue, hooks: Hooks) -> None:
    """Runs the jobs of the queue until it is empty; a failing trial does not stop the others."""
    os.environ.update(TUNE_ENV)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    scheduler = SweepScheduler(queue, hooks)
    first = scheduler.new_job()
    if first is None:
        return  # Tune would wait for something to do
    try:
        ray.tune.run(
            ray.tune.with_resources(train_trial, _reserved),
            name="tune",
            storage_path=run_directory(base),
            scheduler=scheduler,
            search_alg=NewTrials(scheduler, first),
            num_samples=-1,
            reuse_actors=True,  # reused processes import torch once, not once per trial
            max_failures=RESTARTS,
            raise_on_failed_trial=False,
            callbacks=[Follow(scheduler)],
            trial_dirname_creator=_trial_id,
            trial_name_creator=_trial_id,
            verbose=0,
            # In a notebook Tune would choose a reporter that erases what the cell has shown, even so.
            progress_reporter=ray.tune.CLIReporter(),
        )
    except BaseException:
        # After Ctrl-C Tune would hold its processes and their devices for as long as the driver lives.
        scheduler.end_processes()
        raise


def _trial_id(trial: TuneTrial) -> str:
    return trial.trial_id


def train_trial(config: Mapping[str, Any]) -> None:
    """Trains the trial of `config` to its next pause or its end, here or with Ray Train workers.

    A pause is reported once its checkpoint is in storage and its workers have ended: Tune ends the process
    in that report, and `fit` continues from storage in the next process. An exception of the training is
    reported as the trial's outcome, with its traceback in ``error.txt`` of the run, since another attempt
    would raise it again. Only for a process that dies does Tune start another process.
    """
    # Tune waits so long for this thread to end before it reuses the process. On a busy machine its default of
    # 2 s is too short, and the next trial would fail.
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")
    run: RunConfig = config["run"]
    try:
        result = fit(run, until=config["until"])
    except Exception as error:
        trace = storage.join(run_directory(run), "error.txt")
        storage.write_bytes(trace, traceback.format_exc().encode())
        ray.tune.report({"failed": reason_of(error)})
    else:
        # Tune prints a line about a trial that has never reported.
        ray.tune.report({"paused_at" if result.status == "paused" else "ended_at": result.step})


def _reserved(config: dict[str, Any]) -> ray.tune.PlacementGroupFactory:
    """Returns the resources of the trial's own process: almost none if it starts workers of its own."""
    need = config["need"]
    bundle: dict[str, float] = {"memory": 1 << 20} if need is None else need  # all zero is refused
    return _Reservation([bundle])


class _Reservation(ray.tune.PlacementGroupFactory):
    """Resources that are not lost when Tune gives them back at once, because it can reuse a process.

    A placement group that is removed while Ray 2.60 places it keeps its resources until the cluster ends
    (ray-project/ray issue 64693).
    """

    def to_placement_group(self) -> PlacementGroup:
        """Returns once Ray has placed the group, or has found no room for it: after a millisecond or two."""
        group: PlacementGroup = super().to_placement_group()
        while placement_group_table(group)["stats"]["scheduling_state"] in ("QUEUED", "SCHEDULING_STARTED"):
            time.sleep(0.001)
        return group


class SweepScheduler(QueueScheduler):
    """The queue of a sweep in Tune. How a job ended is read from the storage of its run."""

    def __init__(self, queue: TrialQueue, hooks: Hooks) -> None:
        super().__init__(queue, time_attr="paused_at")
        self.hooks = hooks
        self._controller: Any = None
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
            return self.PAUSE  # its next process gets the next step to train to
        return self.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> None:
        self._ended(trial)

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Does nothing: Tune calls this before a restart too, and `Follow` only after the last failure."""

    def died(self, trial: TuneTrial, how: str) -> None:
        self._failed[self.state_of(trial).name] = f"{how}: {reason_of(trial.get_error())}"
        self._ended(trial)

    def end_processes(self) -> None:
        """Kills the processes of all trials at once; no public call of Tune does."""
        if self._controller is not None:
            with suppress(Exception):  # the cluster may be gone
                self._controller._actor_manager.cleanup()

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        self._controller = tune_controller
        if (trial := super().choose_trial_to_run(tune_controller)) is not None:
            trial.set_config(trial.config | {"until": self.state_of(trial).until})
        return trial

    def _ended(self, trial: TuneTrial) -> None:
        # A job has not begun yet if Ray could not start any process for it.
        job = self.began(trial)
        del self._begun[job.state.name]
        outcome = self._failed.pop(job.state.name, None)
        if outcome is None:
            outcome = result_of(job.trial.run) or pause_of(job.trial.run, job.until)
        assert outcome is not None, f"{job.trial.name} ended without a result"
        self.hooks.done(job, outcome)


class NewTrials(Searcher):
    """Gives a trial to Tune when the queue starts it. The scheduler resumes paused trials."""

    def __init__(self, scheduler: SweepScheduler, first: Job) -> None:
        super().__init__()
        self.scheduler = scheduler
        self._first: Job | None = first

    def suggest(self, trial_id: str) -> Any:
        job, self._first = self._first or self.scheduler.new_job(), None
        if job is None:
            return None if self.scheduler.active() else Searcher.FINISHED
        run = job.trial.run
        need = run_resources(run) if is_inline(run) else None
        return {"name": job.trial.name, "run": run, "until": job.until, "need": need}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Does nothing: the scheduler informs the queue."""

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing, because a sweep resumes from its own directory."""


class Follow(ray.tune.Callback):
    """Handles the events that Tune sends to callbacks but not to schedulers: a process began, its last
    restart failed, time has passed.
    """

    def __init__(self, scheduler: SweepScheduler) -> None:
        self.scheduler = scheduler

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self.scheduler.began(trial)

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self.scheduler.died(trial, f"its process died {RESTARTS + 1} times")

    def on_step_end(self, iteration: int, trials: Sequence[TuneTrial], **info: Any) -> None:
        # Tune silently drops a trial whose process it cannot reuse; without this check the sweep would hang.
        for trial in trials:
            if trial.status == TuneTrial.ERROR and self.scheduler.state_of(trial).running:
                self.scheduler.died(trial, "its process could not be reused")
        self.scheduler.hooks.follow()
