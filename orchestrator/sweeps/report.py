"""From MLflow to a frontier, and back: its page, pictures, table and tags."""

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier, gains, operating_costs
from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.points import Point, Status
from orchestrator.sweeps.operating import PICTURES, read_operating, with_operating
from orchestrator.sweeps.settings import settings
from orchestrator.tracking import Found, Tracking, children, find_sweep, writer
from orchestrator.training.worker import costs

FILES = ("frontier.html", "frontier.png", "frontier.svg")
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
class Axes:
    """Which metrics are judged. Attributes:
    chance: the quality that the hypervolume counts from.
    seeds: trials that make a point.
    """

    quality: str
    cost: str
    chance: float
    seeds: int = 1


def sweep_frontier(sweep: Found, runs: Sequence[Found]) -> Frontier:
    """Of one of our sweeps. The reference point is chance, at 1.1 times the highest cost."""
    configs = {run.run_id: run.config() for run in runs}
    axes = Axes(
        quality=sweep.tags["objective.quality"],
        cost=sweep.tags["objective.cost"],
        chance=1 / min(config.model.num_classes for config in configs.values()),
        seeds=int(sweep.tags.get("seeds", "1")),
    )
    by_role = {role: [r for r in runs if r.tags["role"] == role] for role in ("trial", "confirm", "trunk")}
    trials, confirmed = (
        tuple(_point(arm, seeds, judged, configs) for arm, seeds in _by_arm(by_role[role]).items())
        for role, judged in (("trial", axes), ("confirm", replace(axes, seeds=1)))
    )
    note = ""
    if by_role["trunk"]:
        marginal = "marginal" in axes.cost
        share = "only its own steps: the trunk is paid for" if marginal else "all steps since the trunk began"
        note = f"Points are cooldown branches of {len(by_role['trunk'])} trunks; a branch costs {share}."
    claims = tuple(filter(None, sweep.tags.get("claims", "").split("\n")))
    spending = _spending(by_role["trial"] + by_role["trunk"])
    frontier = make_frontier(
        sweep.name, trials, axes, retrained=confirmed, note=note, claims=claims, spending=spending
    )
    return with_operating(frontier, read_operating(sweep))


def write_files(frontier: Frontier, folder: str) -> None:
    """Page and pictures, below a local folder or a URI."""
    with tempfile.TemporaryDirectory() as temporary:
        for file in _draw(frontier, Path(temporary)):
            storage.write_bytes(storage.join(folder, file.name), file.read_bytes())


def read_frontier(tracking: Tracking, name: str) -> Frontier:
    """Raises UsageError if there is no such sweep, or no trial in it yet."""
    return sweep_frontier(*_read(tracking, name))


def _read(tracking: Tracking, name: str) -> tuple[Found, list[Found]]:
    sweep = find_sweep(tracking, name)
    if not (runs := children(tracking, sweep.run_id)):
        raise UsageError(f"sweep {name!r} has no trials yet")
    return sweep, runs


def publish(tracking: Tracking, name: str, folder: str) -> Frontier:
    """Writes page, pictures and table to `folder` and to the sweep's run, and tags the members."""
    tracking.flush(timeout_s=None)
    sweep, runs = _read(tracking, name)
    frontier = sweep_frontier(sweep, runs)
    members = {run_id for point in frontier.front for run_id in point.run_ids}
    for run in runs:
        marked = run.tags.get("pareto") == "true"
        if (run.run_id in members) != marked:
            writer(tracking, run).tag(pareto="false" if marked else "true")
    parent = writer(tracking, sweep)
    with tempfile.TemporaryDirectory() as temporary:
        for file in _draw(frontier, Path(temporary)):
            parent.write_file(file)
            storage.write_bytes(storage.join(folder, file.name), file.read_bytes())
    parent.write_table("frontier.json", frontier.to_dataframe().to_dict("list"))
    cost, quality = frontier.bound
    at = f"{frontier.cost_name}={cost:g}, {frontier.quality_name}={quality:g}"
    parent.tag(**{"hypervolume": f"{frontier.hypervolume:.6f}", "hypervolume.reference": at})
    for gain in gains(frontier):
        name = f"hypervolume/{gain.cost_name}/{gain.models.replace(' ', '_')}"
        values = {f"{name}/as_trained": gain.without, f"{name}/operating": gain.with_points}
        parent.log_at(int(time.time()), values)  # a later look follows an earlier one
    tracking.flush(timeout_s=None)
    return frontier


def make_frontier(
    name: str,
    points: tuple[Point, ...],
    axes: Axes,
    *,
    retrained: tuple[Point, ...] = (),
    note: str = "",
    claims: tuple[str, ...] = (),
    spending: tuple[tuple[str, float], ...] = (),
) -> Frontier:
    """The frontier whose reference is 1.1 times the highest of each cost among these points."""
    highest = {axes.cost: 1.0}
    for name in (axes.cost, *PANELS):
        costs_known = [p.cost if name == axes.cost else p.costs.get(name, math.nan) for p in points]
        if positive := [cost for cost in costs_known if 0 < cost < math.inf]:
            highest[name] = max(positive)
    return Frontier(
        name=name,
        cost_name=axes.cost,
        quality_name=axes.quality,
        points=points,
        retrained=retrained,
        reference={axes.quality: axes.chance} | {metric: 1.1 * cost for metric, cost in highest.items()},
        claims=claims,
        spending=spending,
        note=note,
    )


def _spending(runs: Sequence[Found]) -> tuple[tuple[str, float], ...]:
    """(run id, device seconds) of each run, in the order in which the runs ended.

    A stopped trial is closed when the sweep ends, long after it was trained, so it counts from its start.
    """
    times = [(run.start_s if status_of(run) == "stopped" else run.end_s or math.inf, run) for run in runs]
    ordered = sorted(times, key=lambda time_run: time_run[0])
    own = "cost/marginal_device_s"  # of a branch, whose cost/device_s has that of its trunk too
    return tuple((r.run_id, r.metrics.get(own, r.metrics.get("cost/device_s", 0.0))) for _, r in ordered)


def _draw(frontier: Frontier, folder: Path) -> list[Path]:
    page, *pictures = (folder / name for name in FILES)
    page.write_text(frontier_page(frontier), encoding="utf-8")
    for picture in pictures:
        frontier.save_picture(picture)
    for cost in operating_costs(frontier):
        pictures.append(folder / PICTURES[cost])
        frontier.at_cost(cost).save_picture(pictures[-1])
    return [page, *pictures]


def _by_arm(runs: Iterable[Found]) -> dict[str, list[Found]]:
    arms: dict[str, list[Found]] = {}
    for run in runs:
        arms.setdefault(run.tags["arm"], []).append(run)
    return arms


def _point(arm: str, seeds: Sequence[Found], axes: Axes, configs: Mapping[str, RunConfig]) -> Point:
    """The mean over its seeds, which all must be complete to be judged."""
    config, first = configs[seeds[0].run_id], seeds[0]
    known = costs(config, config.train.steps)  # a failed run's place on the cost axis is known all the same
    found = settings(config)
    status: Status = min(map(status_of, seeds), key=WORST_FIRST.index)
    if len(seeds) < axes.seeds and status == "finished":
        status = "stopped"  # before all of its seeds had begun
    whole = status == "finished"
    qualities = tuple(run.metrics.get(axes.quality, math.nan) for run in seeds)
    point = Point(
        arm=arm,
        family=config.model.family(),
        # of one that did not finish the whole cost too: stopping makes nobody cheap
        cost=_mean(seeds, axes.cost) if whole else known.get(axes.cost, math.nan),
        quality=fmean(qualities) if whole else math.nan,
        size=float(found["capacity"]),
        run_id=first.run_id,
        run_url=first.url,
        status=status,
        details={label: _mean(seeds, name) for name, label in MEASURED if name in first.metrics},
        costs={n: _mean(seeds, n) for n in PANELS if n in first.metrics} if whole else known,
        settings=found,
    )
    if len(seeds) == 1 or not whole:
        return replace(point, runs=tuple((run.run_id, run.url) for run in seeds[1:]))
    return replace(point, qualities=qualities, runs=tuple((run.run_id, run.url) for run in seeds[1:]))


def _mean(runs: Sequence[Found], metric: str) -> float:
    values = [run.metrics[metric] for run in runs if metric in run.metrics]
    return fmean(values) if values else math.nan


def status_of(run: Found) -> Status:
    if run.tags.get("diverged") == "true":
        return "diverged"
    if run.status != "FINISHED" and run.tags.get("stopped"):
        return "stopped"
    return {"FINISHED": "finished", "RUNNING": "running"}.get(run.status, "failed")  # pyright: ignore
