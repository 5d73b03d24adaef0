"""What MLflow is told of a sweep's trials: one child each, followed from the driver."""

from collections.abc import Mapping

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.sweeps.queue import Outcome
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.tracking import (
    TrackedRun,
    Tracking,
    children,
    log_checkpoint,
    track_training,
)
from orchestrator.tracking.runs import Status
from orchestrator.training.artifacts import finish, log_left_behind
from orchestrator.training.worker import checkpoint_directory, run_directory


class TrialLog:
    """The driver alone writes, and a trial continues its run, whichever process goes on with it."""

    def __init__(self, sweep: Sweep, tracking: Tracking, parent: TrackedRun) -> None:
        self.sweep = sweep
        self.tracking = tracking
        self.parent = parent
        paths = {trial.run.data.path for trial in sweep.trials().values()} | {sweep.base.data.path}
        self._digests = {path: open_manifest(path).digest() for path in paths}
        self._tracked: dict[str, TrackedRun] = {}

    def told(self) -> set[str]:
        """Names of the trials whose end MLflow knows, or was told and will know."""
        self.tracking.flush(timeout_s=60)
        found = children(self.tracking, self.parent.run_id())
        return {
            run.tags.get("trial", run.name)
            for run in found
            if run.status == "FINISHED" or (run.status == "FAILED" and run.tags.get("diverged") == "true")
        }

    def begin(self, trial: Trial) -> None:
        self._run_of(trial)

    def report(self, trial: Trial, step: int, metrics: Mapping[str, float]) -> None:
        self._run_of(trial).log(step, metrics)

    def end(self, trial: Trial, outcome: Outcome) -> None:
        """Records how the trial ended. After a pause the run stays open; a diverged run has failed."""
        run, directory = self._run_of(trial), run_directory(trial.run)
        if isinstance(outcome, str):
            run.tag(error=outcome)
            log_left_behind(directory, run)
            self._close(trial, "FAILED")
            return
        run.log(outcome.step, outcome.metrics)
        if outcome.status == "paused":
            run.tag(paused=str(outcome.step))
            return
        run.untag("stopped", "paused")
        if kept := newest_checkpoint(trial.run):
            log_checkpoint(run, trial.name, kept, outcome.step, outcome.metrics)
        finish(directory, self._tracked.pop(trial.name), outcome)

    def stop(self, trial: Trial, step: int) -> None:
        """It paused at `step`, and nobody went on with it: no point of the frontier."""
        self._run_of(trial).tag(stopped=str(step))
        self._close(trial, "KILLED")

    def abandon(self) -> None:
        """What still runs ends with the process; the same command opens it again."""
        for run in self._tracked.values():
            run.finish("KILLED")

    def _close(self, trial: Trial, status: Status) -> None:
        self._tracked.pop(trial.name).finish(status)

    def _run_of(self, trial: Trial) -> TrackedRun:
        if trial.name not in self._tracked:
            path = trial.run.data.path
            tags = {"role": trial.role, "arm": trial.arm, "trial": trial.name}
            if self.sweep.seeds:
                tags["seed"] = str(trial.run.train.seed)
            if trial.after:
                tags |= {"branch.of": trial.after, "branch.from": trial.run.train.trunk or ""}
            self._tracked[trial.name] = track_training(
                self.tracking,
                trial.run,
                run_directory(trial.run),
                parent=self.parent,
                dataset=(path, self._digests[path]),
                **tags,
            )
        return self._tracked[trial.name]


def newest_checkpoint(run: RunConfig) -> str | None:
    """The folder of a run's last checkpoint."""
    directory = checkpoint_directory(run)
    steps = manifests.steps(directory)
    return storage.absolute(manifests.folder_of(directory, steps[-1])) if steps else None
