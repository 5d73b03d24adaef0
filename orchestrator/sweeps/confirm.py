"""Confirmation: the knee of the MoE arms, trained longer on several workers."""

from collections.abc import Iterable
from typing import Any

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.frontier.points import Frontier, Point, is_complete, knee_point
from orchestrator.sweeps.engine import reason_of
from orchestrator.sweeps.log import newest_checkpoint
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.tracking import TrackedRun, Tracking, log_checkpoint, track_training
from orchestrator.training.artifacts import finish, log_left_behind
from orchestrator.training.cluster import check_resources
from orchestrator.training.fit import fit
from orchestrator.training.loop import Metrics
from orchestrator.training.worker import Report, Result, result_of, run_directory


def knees(frontier: Frontier, count: int) -> list[Point]:
    """The knee of the MoE points, then that of the rest, and so on; of all points where none is MoE."""
    complete = [p for p in frontier.points if is_complete(p)]
    left, found = [p for p in complete if p.family != "dense"] or complete, list[Point]()
    while left and len(found) < count:
        found.append(knee_point(left))
        left.remove(found[-1])
    return found


def confirm_config(sweep: Sweep, trial: Trial) -> RunConfig:
    """The trial's run for twice its steps, on at least two workers, which share the experts between them."""
    changes: dict[str, Any] = {
        "name": f"{sweep.base.name}/confirm/{trial.arm}",
        "train.steps": 2 * trial.run.train.steps,
    }
    if trial.run.scale.workers == 1:
        changes |= {"scale.workers": 2, "scale.ep": 2}
    return override(trial.run, changes)


def check_confirm(sweep: Sweep) -> None:
    """Raises UsageError, before anything is trained, if some arm could not be confirmed."""
    if sweep.trunk:
        raise UsageError("cooldown branches are not confirmed: use --confirm 0")
    for trial in sweep.trials().values():
        if trial.run.model.moe:
            try:
                check_resources(confirm_config(sweep, trial))
            except UsageError as error:
                raise UsageError(f"confirming {trial.arm}: {error}; --confirm 0 leaves it out") from None


def confirm(
    sweep: Sweep, trial: Trial, tracking: Tracking, parent: TrackedRun, watch: Report = lambda *_: None
) -> Result:
    """Trains `confirm_config` as a child outside the frontier; `watch` is called with every report.

    Raises:
        UsageError: if the cluster cannot hold its workers.
    """
    run = confirm_config(sweep, trial)
    if result_of(run) is None:
        check_resources(run)
    directory, path = run_directory(run), run.data.path
    tracked = track_training(
        tracking,
        run,
        directory,
        parent=parent,
        dataset=(path, open_manifest(path).digest()),
        role="confirm",
        arm=trial.arm,
    )

    def report(step: int, metrics: Metrics) -> None:
        watch(step, metrics)
        tracked.log(step, metrics)

    try:
        result = fit(run, report, inline=False)
    except Exception as error:
        log_left_behind(directory, tracked)
        tracked.tag(error=reason_of(error))
        tracked.finish("FAILED")
        raise
    tracked.log(result.step, result.metrics)
    if kept := newest_checkpoint(run):
        log_checkpoint(tracked, f"confirm-{trial.arm}", kept, result.step, result.metrics)
    finish(directory, tracked, result)
    return result


def trial_of(trials: Iterable[Trial], arm: str) -> Trial:
    """The first seed of an arm."""
    return next(trial for trial in trials if trial.arm == arm and trial.role == "trial")
