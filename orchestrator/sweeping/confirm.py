"""Confirmation: the knee of the MoE arms, trained longer on several workers, and registered."""

import json
from typing import Any

from moe.vit import ViT
from orchestrator import storage
from orchestrator.codec import override
from orchestrator.config import RunConfig, UsageError
from orchestrator.frontier.points import Frontier, Point, is_complete, knee_point
from orchestrator.sweeping.sweep import Sweep, reason_of
from orchestrator.tracking import TrackedRun, Tracking, register_model, track_training
from orchestrator.training.checkpoint.weights import load_newest
from orchestrator.training.fit import check_resources, fit
from orchestrator.training.seen import log_bad
from orchestrator.training.worker import Result, checkpoint_directory, result_of, run_directory

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
    """The arm's run for twice its steps, on at least two workers, which share the experts between them."""
    trial = sweep.runs()[arm]
    changes: dict[str, Any] = {
        "name": f"{sweep.base.name}/confirm/{arm}",
        "train.steps": 2 * trial.train.steps,
    }
    if trial.scale.workers == 1:
        changes |= {"scale.workers": 2, "scale.ep": 2}
    return override(trial, changes)


def check_confirm(sweep: Sweep) -> None:
    """Raises UsageError, before anything is trained, if some arm could not be confirmed."""
    for arm, run in sweep.runs().items():
        if run.model.moe:
            try:
                check_resources(confirm_config(sweep, arm))
            except UsageError as error:
                raise UsageError(f"confirming {arm}: {error}; --confirm 0 leaves it out") from None


def confirm(sweep: Sweep, arm: str, tracking: Tracking, parent: TrackedRun, *, alias: str | None) -> Result:
    """Trains `confirm_config` as a child outside the frontier, and registers its model under `alias`.

    Raises:
        UsageError: if the cluster cannot hold its workers.
    """
    run = confirm_config(sweep, arm)
    if result_of(run) is None:
        check_resources(run)
    directory = run_directory(run)
    tracked = track_training(tracking, run, directory, parent=parent, role="confirm", arm=arm)
    try:
        result = fit(run, tracked.log, inline=False)
    except Exception as error:
        log_bad(directory, tracked)
        tracked.tag(error=reason_of(error))
        tracked.finish("FAILED")
        raise
    tracked.log(result.step, result.metrics)
    record = storage.join(
        directory, f"registered-{tracked.run_id}.json"
    )  # of another run, if its store was lost
    if alias and result.status == "finished" and storage.size(record) is None:
        version = register_model(tracked, _trained(run), run, alias=alias)
        storage.write_bytes(record, json.dumps({"alias": alias, "version": version}).encode())
    log_bad(directory, tracked)
    tracked.finish("FINISHED")
    return result


def _trained(run: RunConfig) -> ViT:
    model = ViT(run.model)
    load_newest(checkpoint_directory(run), model)
    return model
