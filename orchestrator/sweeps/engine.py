"""A sweep on Ray Tune: the queue says which trial is next, Tune runs it, the driver follows and writes."""

import logging
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import ray.tune
from ray.tune.execution import class_cache
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher
from ray.util.placement_group import PlacementGroup, placement_group_table

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.errors import reason_of
from orchestrator.runs import notice
from orchestrator.runs.run_directory import RunDir
from orchestrator.sweeps.queue import Job, TrialQueue
from orchestrator.sweeps.scheduler import OUTCOME, FrontierScheduler
from orchestrator.training.fit import fit
from orchestrator.training.resources import run_resources

RESTARTS = 3  # of a trial's process that dies
PLACING_S = 60.0  # for Ray to place a group that has room
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
# Tune would copy the driver's AWS keys into the runtime environment of each trial, which Ray writes to its
# logs and shows on its dashboard. Trials have the environment of the Ray node on which they run.
class_cache.ENV_VARS_TO_PROPAGATE = {
    name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")
}


class Hooks(Protocol):
    """Callbacks of a sweep's driver for its jobs. The queue tells it which have ended."""

    def began(self, job: Job) -> None:
        """A process of the job has started; another one, if the process before died."""

    def follow(self) -> None:
        """Called a few times a second: running trials may have reported something in their directories."""


def run_jobs(queue: TrialQueue, hooks: Hooks) -> None:
    """Runs the jobs of the queue until it is empty; a failing trial does not stop the others.

    Raises:
        Stopped: after a notice, once the running trials have saved and stopped.
    """
    os.environ.update(TUNE_ENV)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    scheduler = FrontierScheduler.of_queue(queue)
    if scheduler.fetch() is None:
        return  # Tune would wait for something to do
    state = tempfile.TemporaryDirectory(prefix="ray-tune-")  # Tune's: a sweep's own is in its directory
    try:
        with notice.saving():
            ray.tune.run(
                ray.tune.with_resources(train_trial, _reserved),
                name="tune",
                storage_path=state.name,
                scheduler=scheduler,
                search_alg=NewTrials(scheduler),
                num_samples=-1,
                reuse_actors=True,  # reused processes import torch once, not once per trial
                max_failures=RESTARTS,
                raise_on_failed_trial=False,
                callbacks=[Follow(scheduler, hooks)],
                trial_dirname_creator=_trial_id,
                trial_name_creator=_trial_id,
                verbose=0,
                # In a notebook Tune would choose a reporter that erases what the cell has shown, even so.
                progress_reporter=ray.tune.CLIReporter(),
            )
    except BaseException:
        # After Ctrl-C Tune would hold its processes and their devices for as long as the driver lives, and no
        # public call ends them. The cluster may be gone.
        with suppress(Exception):
            scheduler.controller._actor_manager.cleanup()
        raise
    finally:
        state.cleanup()
    if notice.given():
        raise notice.Stopped(scheduler.saved)


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
    except notice.Stopped as stopped:
        result = stopped
    except Exception as error:
        storage.write_bytes(RunDir.of(run).error_file, traceback.format_exc().encode())
        result = reason_of(error)
    ray.tune.report({OUTCOME: result})


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
        give_up = time.monotonic() + PLACING_S
        while placement_group_table(group)["stats"]["scheduling_state"] in ("QUEUED", "SCHEDULING_STARTED"):
            if time.monotonic() > give_up:
                break
            time.sleep(0.001)
        return group


class NewTrials(Searcher):
    """Gives a trial to Tune when the queue starts it. The scheduler resumes paused trials."""

    def __init__(self, scheduler: FrontierScheduler) -> None:
        super().__init__()
        self.scheduler = scheduler

    def suggest(self, trial_id: str) -> Any:
        if (job := self.scheduler.new_job(trial_id)) is None:
            return None if self.scheduler.queue.num_running else Searcher.FINISHED
        run = job.trial.run
        return {"run": run, "until": job.until, "need": run_resources(run) if run.inline else None}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Does nothing: the scheduler informs the queue."""

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing, because a sweep resumes from its own directory."""


class Follow(ray.tune.Callback):
    """Tells the driver that a process began, and that time has passed: Tune tells its callbacks alone.

    Gives SIGUSR1 back to the command: Tune would end the sweep on it as if all trials were done.
    """

    def __init__(self, scheduler: FrontierScheduler, hooks: Hooks) -> None:
        self.scheduler, self.hooks = scheduler, hooks
        self.handler = signal.getsignal(signal.SIGUSR1)

    def setup(self, *_: Any, **info: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self.handler)

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self.hooks.began(self.scheduler.job_of(trial))

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        self.hooks.follow()
