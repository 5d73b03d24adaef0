"""The frontier of a sweep, from its directory."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from moe.model import Model
from orchestrator import storage
from orchestrator.checkpoint.models import load_checkpoint
from orchestrator.config import RunConfig
from orchestrator.costs import ENERGY, USD, computed, known_costs
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.estimate import branch_step
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point, Status
from orchestrator.frontier.published import papers_metric, published
from orchestrator.inference import energy
from orchestrator.inference.measure import A_BATCH, ONE_IMAGE, measured_rows
from orchestrator.inference.points import with_inference
from orchestrator.records import read_run
from orchestrator.runs.measurements import measurements
from orchestrator.runs.run_directory import Result
from orchestrator.runs.state import directory_state
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord
from orchestrator.sweeps.budget import CORE, PRICES, core_usd_per_hour
from orchestrator.sweeps.operating import operating_rows, with_operating
from orchestrator.sweeps.sweep import Sweep, settings

log = logging.getLogger(__name__)

MEASURED = (  # metric, label in the hover and the table
    ("val/loss", "validation loss"),
    ("perf/images_per_s", "training images/s"),
    ("cost/params", "parameters"),
    ("moe/dropped_frac", "dropped tokens"),
)
PASSED = 12  # arms that are named
TUNED = "tuned"  # label of a sweep: what its first round tried and chose
WORST_FIRST: tuple[Status, ...] = ("running", "failed", "diverged", "interrupted", "stopped", "finished")


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A trial, as its directory has it.

    Attributes:
        run_id: its name in the sweep.
        metrics: as last reported, with its costs that are computed or were measured since.
        spending: (seconds since the epoch, device-seconds) of each piece of its training.
        checkpoint: folder of its last checkpoint, relative to its directory; empty if there is none.
        weights: digest of that checkpoint's weights.
        better: its best checkpoint and the quality, if that is not the last; else empty.
    """

    run_id: str
    labels: Mapping[str, str]
    config: RunConfig
    status: Status
    metrics: Mapping[str, float]
    directory: str
    spending: tuple[tuple[float, float], ...] = ()
    checkpoint: str = ""
    weights: str = ""
    better: str = ""


def read_trials(directory: str, sweep: SweepRecord, *, live: bool = False) -> list[TrialRecord]:
    """The trials of a sweep that have begun, from their directories. `live`: a command trains them."""
    found = []
    for name, labels in sweep.trials.items():
        run = SweepDir(directory).trial(labels)
        if (record := run.record()) is None:
            continue
        state = run.state(live=live, over=sweep.is_over, quality=sweep.quality)
        config = read_run(record.config)
        if record.data_digest == sweep.data_digest and (
            path := sweep.base["data"]["path"]
        ):  # moved meanwhile
            config = replace(config, data=replace(config.data, path=path))
        result, ends = state.result, [*state.pauses, *([state.result] if state.result else [])]
        found.append(
            TrialRecord(
                run_id=name,
                labels=labels,
                config=config,
                status=state.status,
                metrics={**trial_costs(config, run.path), **ends[-1].metrics} if ends else {},
                spending=_spending(ends),
                directory=run.path,
                checkpoint=result.checkpoint if result else "",
                weights=result.weights if result else "",
                better=result.better_checkpoint() if result else "",
            )
        )
    return found


def trial_costs(run: RunConfig, directory: str) -> dict[str, float]:
    """Returns the costs of a run that its config says, and those that were measured in its directory last."""
    known = known_costs()
    found = computed(run, run.train.steps, trunk=branch_step(run))
    for each in measurements(directory):
        found |= {name: value for name, value in each.metrics.items() if name in known}
    return found


def judged_runs(directory: str, sweep: Sweep) -> list[tuple[RunConfig, float, float]]:
    """Returns the finished trials of the sweep in a directory, as (run, quality, cost) by the metrics of
    `sweep`: what `OptunaSearch.warm_start` learns from.

    Raises:
        UsageError: if there is no sweep, or it was trained on other data.
    """
    if (record := SweepDir(directory).record()) is None:
        raise UsageError(f"no sweep in {directory}")
    if record.data_digest != open_manifest(sweep.base.data.path).digest(record.data_digest):
        raise UsageError(f"{record.name} was trained on other data than {sweep.base.data.path}")
    return [
        (trial.config, trial.metrics[sweep.quality], trial.metrics[sweep.cost])
        for trial in read_trials(directory, record)
        if trial.status == "finished" and {sweep.quality, sweep.cost} <= trial.metrics.keys()
    ]


UNENDED = {  # status in sweep.json, although nothing works there -> what a page says
    "running": "This sweep is lost: its process was killed. The same command continues it.",
    "interrupted": "This sweep was stopped before its end. The same command continues it.",
}


def sweep_frontier(directory: str, *, live: bool = False) -> tuple[Frontier, SweepRecord, list[TrialRecord]]:
    """The frontier of the sweep in a directory, and what it is made from. `live`: a command trains there.

    Raises:
        UsageError: if there is no sweep, or none of its trials has begun.
    """
    if (sweep := SweepDir(directory).record()) is None:
        raise UsageError(f"no sweep in {directory}")
    if not (trials := read_trials(directory, sweep, live=live)):
        raise UsageError(f"the sweep in {directory} has no trials yet")
    frontier = with_operating(build_frontier(sweep, trials, live=live), operating_rows(directory))
    if one := measured_rows(directory, ONE_IMAGE):
        batch = measured_rows(directory, A_BATCH, on=one[0]["machine"])
        frontier = with_inference(frontier, one, batch, usd_per_hour=core_usd_per_hour())
    return frontier, sweep, trials


def check_costs_of_use(metrics: Iterable[str]) -> None:
    """Raises UsageError if one of these costs cannot be known on this machine: energy that is not shown, or
    money without a price; it says what is missing.
    """
    metrics = {*metrics}
    if ENERGY in metrics:
        energy.energy_meter(energy.POWERCAP)
    if USD in metrics and math.isnan(core_usd_per_hour()):
        raise UsageError(f"{USD} needs the price of a {CORE}: give it a usd_per_hour above 0 in {PRICES}")


def load_frontier(name: str, *, root: str | None = None) -> Frontier:
    """Returns the frontier of a sweep, trained or in training, by its name below `root`, which is by default
    ``$MOE_FRONTIER_HOME``, else ``~/moe-frontier``.

    Raises:
        UsageError: if there is no such sweep, or none of its trials has begun.
    """
    directory = storage.join(storage.home(root), name)
    return sweep_frontier(directory, live=directory_state(directory) == "running")[0]


def build_frontier(sweep: SweepRecord, trials: Sequence[TrialRecord], *, live: bool) -> Frontier:
    """The points of a sweep: an arm is the mean over its seeds, which all must be complete to be judged.
    `live`: a command trains it.
    """
    by_role = {r: [t for t in trials if t.labels["role"] == r] for r in ("trial", "confirm", "trunk")}
    incomplete: Status = "running" if live else "stopped" if sweep.is_over else "interrupted"
    points = _points(by_role["trial"], sweep, max(1, len(sweep.seeds)), incomplete)
    retrained = _points(by_role["confirm"], sweep, 1, incomplete)
    note = ""
    if by_role["trunk"]:
        marginal = "marginal" in sweep.cost
        share = "only its own steps: the trunk is paid for" if marginal else "all steps since the trunk began"
        note = f"Points are cooldown branches of {len(by_role['trunk'])} trunks; a branch costs {share}."
    elif sweep.passed:
        note = _passed_by(sweep.passed)
    note = " ".join(filter(None, ["" if live else UNENDED.get(sweep.status), sweep.labels.get(TUNED), note]))
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


def _passed_by(passed: Mapping[str, tuple[float, float]]) -> str:
    """Says which arms early stopping passed by, and why."""
    worst_first = sorted(passed.items(), key=lambda item: -item[1][0])
    arms = [f"{arm} ({gain:.2%} for {cost:.1%})" for arm, (gain, cost) in worst_first]
    listed = ", ".join(arms[:PASSED]) + (f" and {len(arms) - PASSED} others" if len(arms) > PASSED else "")
    lost = min(1.0, sum(gain for gain, _ in passed.values()))
    return (
        f"Early stopping passed by {len(arms)} arm{'s' * (len(arms) != 1)} that were not worth their cost."
        f" Expected of each, in parts of the hypervolume, for its part of the sweep's cost: {listed}."
        f" Together they were expected to add at most {lost:.1%}."
    )


def _judged_on(sweep: SweepRecord, runs: Sequence[RunConfig]) -> str:
    """Returns what quality is measured on: how many images or sequences, if known, data set and split."""
    paths = dict.fromkeys(path for run in runs for path in _judged_paths(sweep, run))
    names = ", ".join(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)
    counted = sweep.val_images and len(paths) == 1 and {*paths} == {run.data.path for run in runs}
    noun = "images" if all(run.model.image_side() for run in runs) else "sequences"
    return f"{sweep.val_images} {noun} of {names} (val split)" if counted else f"{names} (val split)"


def _judged_paths(sweep: SweepRecord, run: RunConfig) -> tuple[str, ...]:
    fewshot = run.train.fewshot if sweep.quality.startswith("fewshot/") else None
    return (fewshot and fewshot.paths) or (run.data.path,)


def _papers(sweep: SweepRecord, runs: Iterable[RunConfig]) -> tuple[Point, ...]:
    """The papers' points, if all runs measured the sweep's quality on the papers' data and nothing else."""
    found = set[str | None]()
    for run in runs:
        paths = _judged_paths(sweep, run)
        classes = run.model.num_outputs() if paths[0] == run.data.path else None
        found.add(papers_metric(sweep.quality, paths[0], classes) if len(paths) == 1 else None)
    metric = found.pop() if len(found) == 1 else None
    return published(metric, sweep.cost) if metric else ()


def complete_reference(
    sweep: SweepRecord, points: Sequence[Point], trials: Sequence[TrialRecord]
) -> dict[str, float]:
    """The sweep's reference, raised to these points; costs of which no point is known yet count from 1."""
    highest = dict[str, float]()
    for name in (sweep.cost, *_drawn()):
        known = [p.cost if name == sweep.cost else p.costs.get(name, math.nan) for p in points]
        if positive := [cost for cost in known if 0 < cost < math.inf]:
            highest[name] = max(positive)
    chance = max(trial.config.task.chance(trial.config.model) for trial in trials)
    reference = {sweep.cost: 1.0, sweep.quality: chance, **raised_reference(sweep.reference, highest)}
    hidden = {name for name, cost in known_costs().items() if not cost.drawn and name != sweep.cost}
    return {name: worst for name, worst in reference.items() if name not in hidden}


def _drawn() -> list[str]:
    return [name for name, cost in known_costs().items() if cost.drawn]


def raised_reference(reference: Mapping[str, float], highest: Mapping[str, float]) -> dict[str, float]:
    """The reference, or 1.1 times the highest cost where that is not below it: such an arm would count
    nothing.
    """
    raised = {name: 1.1 * cost for name, cost in highest.items() if cost >= reference.get(name, 0.0)}
    return {**reference, **raised}


def say_raised(before: Mapping[str, float], after: Mapping[str, float], cost_name: str) -> None:
    """Warns that hypervolumes from before a raise of the reference do not compare."""
    if before.get(cost_name, math.inf) < after[cost_name]:
        log.warning(
            "the reference of hypervolumes rises from %.4g to %.4g %s, because an arm costs more than all"
            " before: hypervolumes from before and from now on do not compare",
            before[cost_name],
            after[cost_name],
            cost_name,
        )


def _points(
    trials: Sequence[TrialRecord], sweep: SweepRecord, seeds: int, incomplete: Status
) -> tuple[Point, ...]:
    """`incomplete`: the status of an arm of which a seed has not begun."""
    arms: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        arms.setdefault(trial.labels["arm"], []).append(trial)
    return tuple(_point(arm, same, sweep, seeds, incomplete) for arm, same in arms.items())


def _point(
    arm: str, same: Sequence[TrialRecord], sweep: SweepRecord, seeds: int, incomplete: Status
) -> Point:
    first = same[0]
    config = first.config
    # A failed trial has a place on the cost axis all the same.
    known = computed(config, config.train.steps, trunk=branch_step(config))
    found = settings(config)
    status: Status = min((trial.status for trial in same), key=lambda status: WORST_FIRST.index(status))
    if len(same) < seeds and status == "finished":
        status = incomplete
    whole = status == "finished"
    better = {"better checkpoint": "; ".join(t.better for t in same if t.better)}
    better = better if any(better.values()) else {}
    qualities = tuple(trial.metrics.get(sweep.quality, math.nan) for trial in same)
    point = Point(
        arm=arm,
        family=config.model.family(),
        # Unfinished arms are plotted at their full cost: early stopping must not make them look cheap.
        cost=_mean(same, sweep.cost) if whole else known.get(sweep.cost, math.nan),
        quality=fmean(qualities) if whole else math.nan,
        size=float(found["capacity"]),
        run_id=first.run_id,
        status=status,
        details={label: _mean(same, name) for name, label in MEASURED if name in first.metrics} | better,
        costs={n: _mean(same, n) for n in known_costs() if n in first.metrics} if whole else known,
        settings=found,
        runs=tuple((trial.run_id, None) for trial in same[1:]),
        statistics={n: _mean(same, n) for n in first.metrics if n.startswith("moe/")} if whole else {},
        quality_name=sweep.quality,
        images=sweep.val_images if sweep.quality.startswith("val/acc") else 0,
        load_run=partial(_load_run, {trial.run_id: trial for trial in same}),
    )
    return replace(point, qualities=qualities) if len(same) > 1 and whole else point


def _load_run(trials: Mapping[str, TrialRecord], run_id: str) -> Model:
    trial = trials[run_id]
    if not trial.checkpoint:
        raise UsageError(f"trial {run_id!r} has no checkpoint in {trial.directory}")
    return load_checkpoint(storage.join(trial.directory, trial.checkpoint))


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
