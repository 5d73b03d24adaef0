"""Confirmation: the knee of the MoE arms, trained longer on several workers, and registered."""

from moe.vit import ViT
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.frontier.points import Frontier, Point, is_complete, knee_point
from orchestrator.sweeping.sweep import Sweep
from orchestrator.tracking import TrackedRun, Tracking, register_model, track_training
from orchestrator.training import checkpoint
from orchestrator.training.fit import check_resources, fit, result_of, run_directory

KNEE_ALIAS = "pareto-knee"


def knees(frontier: Frontier, count: int) -> list[Point]:
    """The knee of the MoE points, then that of the rest, and so on; of all points where none is MoE."""
    complete = [p for p in frontier.points if is_complete(p)]
    left, found = [p for p in complete if p.family != "dense"] or complete, list[Point]()
    while left and len(found) < count:
        found.append(knee_point(left))
        left.remove(found[-1])
    return found


def confirm_config(sweep: Sweep, arm: str) -> RunConfig:
    changes = {**sweep.arms[arm], **sweep.confirm, "name": f"{sweep.base.name}/confirm/{arm}"}
    return override(sweep.base, changes)


def confirm(sweep: Sweep, arm: str, tracking: Tracking, parent: TrackedRun, *, alias: str | None) -> None:
    """Trains the arm under the sweep's `confirm` changes, as a child outside the frontier; registers it as
    `alias`.

    Raises:
        UsageError: if the cluster cannot hold its workers.
    """
    run = confirm_config(sweep, arm)
    complete = result_of(run) is not None
    if not complete:
        check_resources(run)
    tracked = track_training(tracking, run, run_directory(run), parent=parent, role="confirm", arm=arm)
    try:
        result = fit(run, tracked.log, inline=False)
    except Exception as error:
        tracked.tag(error=str(error).strip().splitlines()[-1])
        tracked.finish("FAILED")
        raise
    tracked.log(result.step, result.metrics)
    if alias and not complete:
        model = ViT(run.model)
        path = checkpoint.newest(run_directory(run) / "checkpoints")
        assert path is not None, "a complete run has a checkpoint"
        checkpoint.load_weights(path, model)
        register_model(tracked, model, run, alias=alias)
    tracked.finish("FINISHED")
