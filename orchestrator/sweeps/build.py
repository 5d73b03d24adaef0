"""The frontier of a sweep, from its directory or from MLflow."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from orchestrator import storage
from orchestrator.codec import from_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point, Status
from orchestrator.frontier.published import papers_metric, published
from orchestrator.sweeps.operating import TABLE, read_operating, with_operating
from orchestrator.sweeps.sweep import settings
from orchestrator.tracking.find import RunInfo, children, find_sweep
from orchestrator.tracking.projection import CONSTANT
from orchestrator.tracking.store import Tracking
from orchestrator.training.run_directory import (
    Result,
    SweepRecord,
    read_error,
    read_json,
    read_pauses,
    read_result,
    read_run,
    read_sweep,
)
from orchestrator.training.worker import costs

PANELS = (  # costs that are drawn where every complete trial has them
    "cost/train_flops_6mac",
    "cost/marginal_train_flops_6mac",
    "cost/device_s",
    "cost/forward_gflops_2mac",
    "perf/ms_per_image",
)
MEASURED = (  # metric, label in the hover and the table
    ("val/loss", "validation loss"),
    ("perf/images_per_s", "training images/s"),
    ("cost/params", "parameters"),
    ("moe/dropped_frac", "dropped tokens"),
)
WORST_FIRST: tuple[Status, ...] = ("running", "failed", "diverged", "stopped", "finished")


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A trial, as its directory or MLflow has it.

    Attributes:
        run_id: its name in the sweep, or its MLflow run.
        metrics: as last reported.
        spending: (seconds since the epoch, device-seconds) of each piece of its training.
        checkpoint: folder of its last checkpoint, relative to its directory.
        weights: digest of that checkpoint's weights.
    """

    run_id: str
    labels: Mapping[str, str]
    config: RunConfig
    status: Status
    metrics: Mapping[str, float]
    spending: tuple[tuple[float, float], ...] = ()
    url: str | None = None
    checkpoint: str = ""
    weights: str = ""


def read_trials(directory: str, sweep: SweepRecord) -> list[TrialRecord]:
    """The trials of a sweep that have begun, from their directories."""
    found = []
    for name, labels in sweep.trials.items():
        folder = storage.join(directory, labels["directory"])
        if (record := read_run(folder)) is None:
            continue
        result, pauses = read_result(folder), read_pauses(folder)
        status: Status = "running" if sweep.status == "running" else "failed"
        if result is not None:
            status = "finished" if result.status == "finished" else "diverged"
        elif read_error(folder):
            status = "failed"
        elif pauses:
            status = "stopped"
        last = result or (pauses[-1] if pauses else None)
        found.append(
            TrialRecord(
                run_id=name,
                labels=labels,
                config=from_dict(RunConfig, record.config),
                status=status,
                metrics=last.metrics if last else {},
                spending=_spending([*pauses, *([result] if result else [])]),
                checkpoint=result.checkpoint if result else "",
                weights=result.weights if result else "",
            )
        )
    return found


def sweep_frontier(directory: str) -> tuple[Frontier, SweepRecord, list[TrialRecord]]:
    """The frontier of the sweep in a directory, and what it is made from.

    Raises:
        UsageError: if there is no sweep, or none of its trials has begun.
    """
    if (sweep := read_sweep(directory)) is None:
        raise UsageError(f"no sweep in {directory}")
    if not (trials := read_trials(directory, sweep)):
        raise UsageError(f"the sweep in {directory} has no trials yet")
    rows = read_json(storage.join(directory, TABLE)) or []
    return with_operating(build_frontier(sweep, trials), rows), sweep, trials


def mlflow_frontier(tracking: Tracking, name: str) -> Frontier:
    """The frontier of the sweep of that name, from MLflow alone.

    Raises:
        UsageError: if there is no such sweep, or none of its trials has begun.
    """
    parent = find_sweep(tracking, name)
    if not (runs := children(tracking, parent.run_id)):
        raise UsageError(f"sweep {name!r} has no trials yet")
    sweep = SweepRecord(
        key="",
        name=parent.name,
        began_s=parent.start_s,
        base={},
        data_digest="",
        quality=parent.tags["objective.quality"],
        cost=parent.tags["objective.cost"],
        val_images=int(parent.tags.get("val_images", "0")),
        seeds=list(range(int(parent.tags.get("seeds", "1")))),
        claims=list(filter(None, parent.tags.get("claims", "").split("\n"))),
        reference=json.loads(parent.tags.get("reference", "{}")),
        baselines=json.loads(parent.tags.get("baselines", "{}")),
    )
    return with_operating(build_frontier(sweep, [_from_mlflow(run) for run in runs]), read_operating(parent))


def _from_mlflow(run: RunInfo) -> TrialRecord:
    constants = {name: float(run.params[name]) for name in CONSTANT if name in run.params}
    return TrialRecord(
        run_id=run.tags.get("trial", run.name),
        labels=run.tags,
        config=run.config(),
        status=_mlflow_status(run),
        metrics={**run.metrics, **constants},
        spending=((run.end_s or math.inf, own_seconds(run.metrics)),),
        url=run.url,
    )


def _mlflow_status(run: RunInfo) -> Status:
    if run.tags.get("diverged") == "true":
        return "diverged"
    if run.status != "FINISHED" and (run.tags.get("stopped") or run.tags.get("paused")):
        return "stopped"
    return {"FINISHED": "finished", "RUNNING": "running"}.get(run.status, "failed")  # pyright: ignore


def build_frontier(sweep: SweepRecord, trials: Sequence[TrialRecord]) -> Frontier:
    """The points of a sweep: an arm is the mean over its seeds, which all must be complete to be judged."""
    by_role = {r: [t for t in trials if t.labels["role"] == r] for r in ("trial", "confirm", "trunk")}
    points = _points(by_role["trial"], sweep, seeds=max(1, len(sweep.seeds)))
    retrained = _points(by_role["confirm"], sweep, seeds=1)
    note = ""
    if by_role["trunk"]:
        marginal = "marginal" in sweep.cost
        share = "only its own steps: the trunk is paid for" if marginal else "all steps since the trunk began"
        note = f"Points are cooldown branches of {len(by_role['trunk'])} trunks; a branch costs {share}."
    begun = {trial.run_id for trial in trials}
    states: list[tuple[str, str]] = [(trial.labels["arm"], trial.status) for trial in by_role["trial"]]
    for name, labels in sweep.trials.items():
        if labels["role"] == "trial" and name not in begun:
            states.append((labels["arm"], "not started"))
    pieces = sorted((time_s, t.run_id, spent) for t in trials for time_s, spent in t.spending)
    return Frontier(
        name=sweep.name,
        cost_name=sweep.cost,
        quality_name=sweep.quality,
        data=_judged_on(sweep, [trial.config for trial in trials]),
        trials=tuple(states),
        points=points,
        retrained=retrained,
        papers=_papers(sweep, [trial.config for trial in trials]),
        reference=complete_reference(sweep, points, trials),
        baselines=sweep.baselines,
        claims=tuple(sweep.claims),
        spending=tuple((run_id, spent) for _, run_id, spent in pieces),
        note=note,
    )


def _judged_on(sweep: SweepRecord, runs: Sequence[RunConfig]) -> str:
    """The images that quality is measured on: their number if it is known, data set and split."""
    paths = dict.fromkeys(path for run in runs for path in _judged_paths(sweep, run))
    names = ", ".join(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)
    counted = sweep.val_images and len(paths) == 1 and {*paths} == {run.data.path for run in runs}
    return f"{sweep.val_images} images of {names} (val split)" if counted else f"{names} (val split)"


def _judged_paths(sweep: SweepRecord, run: RunConfig) -> tuple[str, ...]:
    fewshot = run.train.fewshot if sweep.quality.startswith("fewshot/") else None
    return (fewshot and fewshot.paths) or (run.data.path,)


def _papers(sweep: SweepRecord, runs: Iterable[RunConfig]) -> tuple[Point, ...]:
    """The papers' points, if all runs measured the sweep's quality on the papers' data and nothing else."""
    found = set[str | None]()
    for run in runs:
        paths = _judged_paths(sweep, run)
        classes = run.model.num_classes if paths[0] == run.data.path else None
        found.add(papers_metric(sweep.quality, paths[0], classes) if len(paths) == 1 else None)
    metric = found.pop() if len(found) == 1 else None
    return published(metric, sweep.cost) if metric else ()


def complete_reference(
    sweep: SweepRecord, points: Sequence[Point], trials: Sequence[TrialRecord]
) -> dict[str, float]:
    """The sweep's reference, and for costs that it lacks 1.1 times the highest of these points."""
    found = {sweep.quality: 1 / min(trial.config.model.num_classes for trial in trials)}
    for name in (sweep.cost, *PANELS):
        known = [p.cost if name == sweep.cost else p.costs.get(name, math.nan) for p in points]
        if positive := [cost for cost in known if 0 < cost < math.inf]:
            found[name] = 1.1 * max(positive)
    return {sweep.cost: 1.0, **found, **sweep.reference}


def _points(trials: Sequence[TrialRecord], sweep: SweepRecord, *, seeds: int) -> tuple[Point, ...]:
    arms: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        arms.setdefault(trial.labels["arm"], []).append(trial)
    # Seeds that have not begun will not begin once no trial runs.
    incomplete: Status = "running" if any(trial.status == "running" for trial in trials) else "stopped"
    return tuple(_point(arm, same, sweep, seeds, incomplete) for arm, same in arms.items())


def _point(
    arm: str, same: Sequence[TrialRecord], sweep: SweepRecord, seeds: int, incomplete: Status
) -> Point:
    first = same[0]
    config = first.config
    known = costs(config, config.train.steps)  # a failed trial has a place on the cost axis all the same
    found = settings(config)
    status: Status = min((trial.status for trial in same), key=lambda status: WORST_FIRST.index(status))
    if len(same) < seeds and status == "finished":
        status = incomplete
    whole = status == "finished"
    qualities = tuple(trial.metrics.get(sweep.quality, math.nan) for trial in same)
    point = Point(
        arm=arm,
        family=config.model.family(),
        # Unfinished arms are plotted at their full cost: early stopping must not make them look cheap.
        cost=_mean(same, sweep.cost) if whole else known.get(sweep.cost, math.nan),
        quality=fmean(qualities) if whole else math.nan,
        size=float(found["capacity"]),
        run_id=first.run_id,
        run_url=first.url,
        status=status,
        details={label: _mean(same, name) for name, label in MEASURED if name in first.metrics},
        costs={n: _mean(same, n) for n in PANELS if n in first.metrics} if whole else known,
        settings=found,
        runs=tuple((trial.run_id, trial.url) for trial in same[1:]),
    )
    return replace(point, qualities=qualities) if len(same) > 1 and whole else point


def own_seconds(metrics: Mapping[str, float]) -> float:
    """Device-seconds of a trial, without those of the base run that it cools down."""
    return metrics.get("cost/marginal_device_s", metrics.get("cost/device_s", 0.0))


def _spending(ends: Sequence[Result]) -> tuple[tuple[float, float], ...]:
    """When a trial's pieces ended, each with the device-seconds that it took: pauses have times too."""
    spent = [own_seconds(end.metrics) for end in ends]
    return tuple(
        (end.time_s, now - before) for end, now, before in zip(ends, spent, [0.0, *spent], strict=False)
    )


def _mean(same: Sequence[TrialRecord], metric: str) -> float:
    values = [trial.metrics[metric] for trial in same if metric in trial.metrics]
    return fmean(values) if values else math.nan
