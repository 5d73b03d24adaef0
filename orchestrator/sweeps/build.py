"""The frontier of a sweep, from its directory or from MLflow; its page, pictures, table and summary."""

import json
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from orchestrator import storage
from orchestrator.codec import from_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.frontier.operating import gains, operating_costs
from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.picture import frontier_picture
from orchestrator.frontier.points import (
    Frontier,
    Point,
    Status,
    everything,
    front_points,
    hypervolume,
    is_complete,
    knee_point,
    on_front,
    panel,
    standings,
)
from orchestrator.sweeps.operating import (
    PICTURES,
    TABLE,
    TAG,
    read_operating,
    table_of,
    with_operating,
)
from orchestrator.sweeps.settings import settings
from orchestrator.tracking.find import RunInfo, children, find_sweep, table
from orchestrator.tracking.store import Tracking
from orchestrator.tracking.sync import CONSTANT, SUMMARY
from orchestrator.training.run_directory import (
    SweepRecord,
    read_error,
    read_json,
    read_pauses,
    read_result,
    read_run,
    read_sweep,
    write_json,
)
from orchestrator.training.worker import costs

PAGE, PNG, SVG = "frontier.html", "frontier.png", "frontier.svg"
FILES = (PAGE, PNG, SVG)
FAST, KNEE, BEST, CONFIRMED = "pareto-fast", "pareto-knee", "pareto-best", "confirmed"
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
        ended_s: seconds since the epoch; NaN while it runs.
        checkpoint: folder of its last checkpoint, relative to its directory.
        weights: digest of that checkpoint's weights.
    """

    run_id: str
    labels: Mapping[str, str]
    config: RunConfig
    status: Status
    metrics: Mapping[str, float]
    ended_s: float
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
                ended_s=result.time_s if result else math.nan,
                checkpoint=result.checkpoint if result else "",
                weights=result.weights if result else "",
            )
        )
    return found


def sweep_frontier(directory: str) -> Frontier:
    """Raises UsageError if there is no sweep, or none of its trials has begun."""
    if (sweep := read_sweep(directory)) is None:
        raise UsageError(f"no sweep in {directory}")
    if not (trials := read_trials(directory, sweep)):
        raise UsageError(f"the sweep in {directory} has no trials yet")
    rows = read_json(storage.join(directory, TABLE)) or []
    return with_operating(build_frontier(sweep, trials), rows)


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
        seeds=list(range(int(parent.tags.get("seeds", "1")))),
        claims=list(filter(None, parent.tags.get("claims", "").split("\n"))),
        reference=json.loads(parent.tags.get("reference", "null")),
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
        ended_s=run.end_s or math.nan,
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
    done = [p for p in points if p.status == "finished"]
    panels = tuple(n for n in PANELS if n != sweep.cost and done and all(n in p.costs for p in done))
    reference = sweep.reference or _reference(points, trials)
    return Frontier(
        name=sweep.name,
        cost_name=sweep.cost,
        quality_name=sweep.quality,
        points=points,
        rest=retrained,
        reference=(reference[0], reference[1]),
        panels=panels,
        claims=tuple(sweep.claims),
        note=note,
    )


def _reference(points: Sequence[Point], trials: Sequence[TrialRecord]) -> list[float]:
    """Chance, at 1.1 times the highest cost, of a sweep whose costs were not known before."""
    highest = max((p.cost for p in points if 0 < p.cost < math.inf), default=1.0)
    return [1.1 * highest, 1 / min(trial.config.model.num_classes for trial in trials)]


def _points(trials: Iterable[TrialRecord], sweep: SweepRecord, *, seeds: int) -> tuple[Point, ...]:
    arms: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        arms.setdefault(trial.labels["arm"], []).append(trial)
    return tuple(_point(arm, same, sweep, seeds) for arm, same in arms.items())


def _point(arm: str, same: Sequence[TrialRecord], sweep: SweepRecord, seeds: int) -> Point:
    first = same[0]
    config = first.config
    known = costs(config, config.train.steps)  # a failed trial has a place on the cost axis all the same
    found = settings(config)
    status: Status = min((trial.status for trial in same), key=lambda status: WORST_FIRST.index(status))
    if len(same) < seeds and status == "finished":
        status = "stopped"  # before all of its seeds had begun
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
        spent=sum(_own_seconds(trial) for trial in same),
        ended=max((trial.ended_s for trial in same), default=math.nan),
        runs=tuple((trial.run_id, trial.url) for trial in same[1:]),
    )
    return replace(point, qualities=qualities) if len(same) > 1 and whole else point


def _own_seconds(trial: TrialRecord) -> float:
    """Device-seconds of a trial, without those of the base run that it cools down."""
    both = trial.metrics.get("cost/device_s", 0.0)
    return trial.metrics.get("cost/marginal_device_s", both)


def _mean(same: Sequence[TrialRecord], metric: str) -> float:
    values = [trial.metrics[metric] for trial in same if metric in trial.metrics]
    return fmean(values) if values else math.nan


def write_files(frontier: Frontier, folder: str) -> list[str]:
    """Writes page and pictures below a local folder or a URI; returns their names."""
    with tempfile.TemporaryDirectory() as temporary:
        files = _draw(frontier, Path(temporary))
        for file in files:
            storage.write_bytes(storage.join(folder, file.name), file.read_bytes())
    return [file.name for file in files]


def publish(directory: str) -> Frontier:
    """Writes page, pictures, table and summary of a sweep to its directory, from where MLflow gets them."""
    sweep = read_sweep(directory)
    frontier = sweep_frontier(directory)
    assert sweep is not None
    trials = {trial.run_id: trial for trial in read_trials(directory, sweep)}
    files = write_files(frontier, directory)
    members = [run for p, on in zip(frontier.points, on_front(frontier), strict=True) if on for run in ids(p)]
    metrics = {"hypervolume": hypervolume(frontier), "frontier/points": float(len(front_points(frontier)))}
    if best := front_points(frontier):
        metrics[f"frontier/best/{frontier.quality_name}"] = best[-1].quality
    for gain in gains(frontier):
        name = f"hypervolume/{gain.cost_name}/{gain.models.replace(' ', '_')}"
        metrics |= {f"{name}/as_trained": gain.without, f"{name}/operating": gain.with_points}
    tables = {"frontier.json": table(frontier_table(frontier))}
    tags = {
        "hypervolume.reference": f"{frontier.cost_name}={frontier.reference[0]:g}, "
        f"{frontier.quality_name}={frontier.reference[1]:g}"
    }
    rows = read_json(storage.join(directory, TABLE))
    if rows is not None:
        tags[TAG] = str(len(rows))
        tables[TABLE] = table(table_of(rows))
    summary = {
        "time_s": time.time(),
        "note": _note(frontier, sweep),
        "metrics": metrics,
        "tags": tags,
        "pareto": members,
        "aliases": _aliases(frontier, trials),
        "files": files,
        "tables": tables,
    }
    write_json(storage.join(directory, SUMMARY), summary)
    return frontier


def _aliases(frontier: Frontier, trials: Mapping[str, TrialRecord]) -> dict[str, dict[str, str]]:
    """alias -> the trial that it names: on the frontier the cheapest point, the knee and the best; and the
    knee's arm trained for longer, if it was.
    """
    front = front_points(frontier)
    if not front:
        return {}
    knee = knee_point(frontier.points)
    named = {FAST: front[0], KNEE: knee, BEST: front[-1]}
    for point in frontier.rest:
        if is_complete(point) and point.arm == knee.arm:
            named[CONFIRMED] = point
    found = {}
    for alias, point in named.items():
        run = _typical_seed(point)
        if trials[run].checkpoint:
            found[alias] = {
                "run": run,
                "checkpoint": trials[run].checkpoint,
                "weights": trials[run].weights,
                "description": _description(frontier, alias, point, run),
            }
    return found


def _typical_seed(point: Point) -> str:
    """The run of the seed whose quality is nearest to the arm's mean."""
    runs = ids(point)
    qualities = point.qualities or (point.quality,)
    return min(zip(runs, qualities, strict=True), key=lambda each: abs(each[1] - point.quality))[0]


def _description(frontier: Frontier, alias: str, point: Point, run: str) -> str:
    quality = f"{frontier.quality_name} {point.quality:.4f}"
    if point.qualities:
        each = ", ".join(f"{q:.4f}" for q in point.qualities)
        quality += f" (mean of {len(point.qualities)} seeds: {each}; this is {run}, nearest to the mean)"
    else:
        quality += " (one seed)"
    longer = ", retrained for longer than the sweep's trials" if alias == CONFIRMED else ""
    return (
        f"Sweep {frontier.name}, arm {point.arm}{longer}: {quality}; {frontier.cost_name} {point.cost:.4g}."
    )


def _note(frontier: Frontier, sweep: SweepRecord) -> str:
    """The description of the sweep's MLflow run, in markdown."""
    seeds = f"{len(sweep.seeds)} seeds each" if len(sweep.seeds) > 1 else "one seed each"
    data = sweep.base.get("data", {}).get("path", "")
    lines = [
        f"# Sweep {sweep.name}",
        "",
        f"{len(frontier.points)} arms, {seeds}; {sweep.quality} against {sweep.cost}. Data: `{data}`"
        f" (digest `{sweep.data_digest[:12]}`). Hypervolume {hypervolume(frontier):.4f}, in decades of cost"
        f" times fractions of quality, from {frontier.quality_name}={frontier.reference[1]:g} at"
        f" {frontier.cost_name}={frontier.reference[0]:.4g}.",
        "",
        f"| frontier | {sweep.quality} | {sweep.cost} |",
        "|---|---|---|",
    ]
    for point in front_points(frontier):
        spread = f" ({min(point.qualities):.4f} to {max(point.qualities):.4f})" if point.qualities else ""
        lines.append(f"| {point.arm} | {point.quality:.4f}{spread} | {point.cost:.4g} |")
    return "\n".join([*lines, "", f"Artifacts: `{PAGE}` (interactive), `{PNG}`, `frontier.json` (all arms)."])


def frontier_table(frontier: Frontier) -> dict[str, list[Any]]:
    """Column -> values, a row for every point."""
    rows = list(zip(everything(frontier), standings(frontier), strict=True))
    columns: dict[str, list[Any]] = {
        "arm": [p.arm for p, _ in rows],
        "family": [p.family for p, _ in rows],
        "standing": [standing for _, standing in rows],
        frontier.cost_name: [p.cost for p, _ in rows],
        frontier.quality_name: [p.quality for p, _ in rows],
    }
    columns |= {name: [p.costs.get(name, math.nan) for p, _ in rows] for name in frontier.panels}
    return columns | {"run": [", ".join(ids(p)) for p, _ in rows]}


def ids(point: Point) -> list[str]:
    """The runs of a point: one for each seed."""
    return [point.run_id, *(run_id for run_id, _ in point.runs)]


def _draw(frontier: Frontier, folder: Path) -> list[Path]:
    page, *pictures = (folder / name for name in FILES)
    page.write_text(frontier_page(frontier), encoding="utf-8")
    for picture in pictures:
        frontier_picture(frontier, picture)
    for cost in operating_costs(frontier):
        pictures.append(folder / PICTURES[cost])
        frontier_picture(panel(frontier, cost), pictures[-1])
    return [page, *pictures]
