"""Trains a whole sweep, and keeps its trackers up to date. Commands and notebooks call this."""

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from moe.config import Config, NonNegativeInt, PositiveFloat, PositiveInt
from orchestrator import storage
from orchestrator.checkpoint.models import read_model
from orchestrator.codec import changed_fields, differences, flat, override, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.costs import ENERGY, MS, Cost, computed, cost_of, known_costs
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import BudgetExhausted, UsageError
from orchestrator.estimate import branch_step
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import knee_points
from orchestrator.inference.measure import complete_measurement, estimated_s
from orchestrator.inference.points import INFERENCE
from orchestrator.planning.findings import require
from orchestrator.planning.preflight import preflight
from orchestrator.plugins import check_loaded, save_plugins
from orchestrator.runs.contents import contents_of, moved
from orchestrator.runs.measurements import USER, made_by, measurements, write_measurement
from orchestrator.runs.run_directory import (
    DATA,
    RunDir,
    check_kind,
    check_resumable,
    new_key,
    raise_changed,
)
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord
from orchestrator.sweeps.baseline import linear_baseline
from orchestrator.sweeps.budget import Budget, BudgetTracker
from orchestrator.sweeps.build import check_costs_of_use, judged_runs, raised_reference, say_raised
from orchestrator.sweeps.operating import TIME
from orchestrator.sweeps.progress import SweepProgress
from orchestrator.sweeps.publish import publish
from orchestrator.sweeps.queue import Policy, RunToCompletion
from orchestrator.sweeps.run import QUIET, SweepRun, Watch, keep_weights_only
from orchestrator.sweeps.search import OptunaSearch, SearchOptions, sample
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.tracking.base import TrackerConfig, following
from orchestrator.tracking.lost import open_store
from orchestrator.tracking.store import Tracking
from orchestrator.tracking.sync import Sync
from orchestrator.tracking.system import SystemMetrics
from orchestrator.training.cluster import connect
from orchestrator.training.fit import start
from orchestrator.training.train import Mode, with_data, working_in

log = logging.getLogger(__name__)

AT_MOST_S = 120.0  # of measuring what arms take to use, by default
SAMPLED = 200  # draws of a space that set the reference of a search


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Config):
    """Options of `run_sweep`.

    Attributes:
        mode: ``auto`` continues what is there, ``resume`` insists on it, ``fresh`` moves it aside.
        policy: which trial is next: every trial to its end, or early stopping.
        max_concurrent: trials at the same time; None: as many as the cluster holds.
        search: draws arms from the sweep's space, beside those it names; None: no arms are drawn.
        retrain: arms at the knee that are trained again, for twice the steps.
        flops_per_s: of a device; predicts how long trials take until the first has ended; None: none.
        labels: further tags of the sweep in trackers.
        trackers: what follows the sweep beside MLflow.
        measure: what finished arms take to use, once none trains: ``auto``, where that takes less than two
            minutes or a tenth of the sweep.
    """

    mode: Mode = "auto"
    policy: Policy = RunToCompletion()
    max_concurrent: PositiveInt | None = None
    search: SearchOptions | None = None
    budget: Budget = Budget()
    retrain: NonNegativeInt = 0
    flops_per_s: PositiveFloat | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    trackers: tuple[TrackerConfig, ...] = ()
    measure: Literal["auto", "always", "never"] = "never"


def run_sweep(
    sweep: Sweep,
    options: SweepOptions = SweepOptions(),
    *,
    progress: bool | Watch = True,
    store: Tracking | None = None,
) -> Frontier:
    """Trains the arms of a sweep and returns its frontier. The same call again continues.

    Page, pictures and table of the frontier lie in the sweep's directory, ``<storage>/<name of the base>``.
    A base without `data.path` is trained on the `digits`.

    Args:
        progress: whether to print what the commands print, bars on a terminal and else lines; or callbacks of
            your own.
        store: the MLflow store; by default MLFLOW_TRACKING_URI, else ``mlflow.db`` below the storage.

    Raises:
        UsageError: for a sweep that cannot be trained here, or another one in its directory.
        TypeError: for a run in place of a sweep: `train` trains a run.
    """
    if not isinstance(sweep, Sweep):
        raise TypeError(f"run_sweep takes a Sweep, got a {type(sweep).__name__}; train(run) trains one run")
    directory = RunDir.of(sweep.base).path
    with trained_trials(sweep, options, progress=progress, store=store) as run:
        if run.trials_left() and not any(s.reached or s.outcome for s in run.queue.states.values()):
            raise BudgetExhausted(f"the budget does not hold a single trial. {run.budget.way_out}")
        for cost in (each for each in known_costs().values() if each.measured and not run.trials_left()):
            measure_costs([state.trial for state in run.queue.states.values()], cost)
        measure_inference(run, options)
        frontier = publish(directory)
        for point in knee_points(frontier.points, 0 if run.trials_left() else options.retrain):
            run.retrain(point.arm)
            frontier = publish(directory)
        if freed := keep_weights_only([s.trial for s in run.queue.states.values()], frontier):
            run.watch.say(f"trials off the frontier keep their weights alone: {freed / 1e6:.1f} MB freed")
    return frontier


@contextmanager
def trained_trials(
    sweep: Sweep, options: SweepOptions, *, progress: bool | Watch = True, store: Tracking | None = None
) -> Iterator[SweepRun]:
    """Trains the trials of a sweep, and yields them while its directory is still locked and MLflow follows.

    Raises:
        UsageError: for a sweep that cannot be trained here, or another one in its directory.
    """
    directory = RunDir.of(sweep.base).path
    check_kind(directory, "sweep")
    if not (sweep.arms or options.search):
        raise UsageError("the sweep has no arms: name at least one in arms={..}, or give options.search")
    if options.search and sweep.space is None:
        raise UsageError(f"the sweep {sweep.base.name} has no space to search: give it one, or name arms")
    if sweep.cost == TIME:
        raise UsageError(
            f"cost={sweep.cost!r} is timed while others train, and orders nothing: take cost={MS!r}, which is"
            " measured when all trials have ended"
        )
    sweep = with_counted_cost(sweep.based_on(with_data(sweep.base)))
    if options.search and (sweep.cost in INFERENCE or ((cost := cost_of(sweep.cost)) and cost.measured)):
        raise UsageError(
            f"{sweep.cost} is measured when all trials have ended: a search cannot learn from it"
        )

    check_costs_of_use([sweep.cost])

    def open_mine() -> Tracking:
        return store or open_store(sweep.base.storage)

    watch = progress if isinstance(progress, Watch) else SweepProgress(sweep) if progress else QUIET
    ready = partial(connect, watch.say)
    require(preflight(sweep, connect=ready, open_store=open_mine, retrain=bool(options.retrain)))
    store = open_mine()
    search = options.search and make_search(sweep, options.search, watch)
    with watch, working_in(directory, options.mode, store):
        labels = {**made_by(), **options.labels}
        acquire_sweep_dir(sweep, resume=options.mode == "resume", labels=labels)
        followers = [Sync(store, directory), *(tracker.follow(directory) for tracker in options.trackers)]
        with following(followers, watch.say), SystemMetrics(directory):
            status = "interrupted"
            flops_per_s = options.flops_per_s or math.inf
            budget = BudgetTracker(options.budget, directory, owner=labels[USER], flops_per_s=flops_per_s)
            try:
                run = SweepRun(sweep, budget, options.policy, options.max_concurrent, search, watch)
                run.work()
                status = run.end()
                SweepDir(directory).update(lambda was: {"status": status, "passed": run.passed_by()})
                yield run
                status = run.end()
            except Exception:
                status = "failed"
                raise
            finally:
                budget.leave()
                SweepDir(directory).update(lambda was: {"status": status})


def with_counted_cost(sweep: Sweep) -> Sweep:
    """Returns the sweep whose runs count its cost, if that is counted."""
    cost, costs = cost_of(sweep.cost), sweep.base.train.costs
    if cost is None or not cost.counted or sweep.cost in costs:
        return sweep
    return sweep.based_on(override(sweep.base, {"train.costs": [*costs, sweep.cost]}))


def measure_costs(trials: Iterable[Trial], cost: Cost) -> None:
    """Measures a cost of all finished trials, and writes it to their directories, unless all have it."""
    runs = [RunDir.of(trial.run) for trial in trials if trial.role == "trial"]
    runs = [run for run in runs if (end := run.result()) and end.status == "finished"]
    known = [any(cost.kind in each.metrics for each in measurements(run.path)) for run in runs]
    if all(known):
        return
    found = cost.of_models([read_model(run.checkpoints) for run in runs])
    for run, value in zip(runs, found or (), strict=True):
        write_measurement(run.path, {cost.kind: value})


def measure_inference(run: SweepRun, options: SweepOptions) -> None:
    """Measures what the finished arms take to use, if that is wanted and they are not measured yet."""
    if run.trials_left():
        return
    directory, needed = SweepDir.of(run.sweep.base).path, run.sweep.cost in INFERENCE
    arms = {state.trial.arm: state.trial.run for state in run.queue.states.values()}.values()
    wanted = options.measure == "always" or (
        options.measure == "auto" and estimated_s(arms) <= max(AT_MOST_S, run.budget.spent_s / 10)
    )
    if not (needed or wanted):
        return
    try:
        complete_measurement(directory, with_energy=run.sweep.cost == ENERGY, say=run.watch.say)
    except UsageError as error:
        if needed:
            raise
        run.watch.say(f"what the arms take to use is not measured: {error}")


def make_search(sweep: Sweep, options: SearchOptions, watch: Watch) -> OptunaSearch:
    """Returns the search, which has learned from the trials of other sweeps that lie in its space."""
    assert sweep.space
    search = OptunaSearch(
        sweep.space,
        base=sweep.base,
        count=options.trials,
        sampler=options.sampler,
        seed=sweep.base.train.seed,
    )
    search.check_space()
    for name in options.warm_start:
        earlier = storage.join(sweep.base.storage, name)
        taken = search.warm_start(found := judged_runs(earlier, sweep), SweepDir(earlier).answers())
        watch.say(f"warm start: {taken} of {len(found)} runs of {name} lie in the space")
    return search


def acquire_sweep_dir(sweep: Sweep, *, resume: bool, labels: Mapping[str, str]) -> SweepRecord:
    """Makes the sweep's directory that of `sweep`: started, or continued with perhaps more arms or seeds.

    Raises:
        UsageError: if another run or sweep is there, or arms that are there are missing or changed.
    """
    own, base = SweepDir.of(sweep.base), sweep.base
    directory, was = own.path, own.record()
    drawn = was.drawn_arms() if was else {}
    manifest, trials = open_manifest(base.data.path), sweep.trials(drawn).values()
    now = SweepRecord(
        key=new_key(),
        name=base.name,
        began_s=time.time(),
        base=to_dict(base),
        data_digest=manifest.digest(was.data_digest if was else ""),
        val_images=manifest.rows("val"),
        quality=sweep.quality,
        cost=sweep.cost,
        seeds=list(sweep.seeds),
        trunk=asdict(sweep.trunk) if sweep.trunk else None,
        claims=list(sweep.claims),
        arms=drawn | {name: dict(changes) for name, changes in sweep.changes.items()},
        drawn=list(drawn),
        trials={t.name: t.labels(bool(sweep.seeds)) for t in trials},
        labels=dict(labels),
        contents=contents_of(flat(base) | {f"arms.{name}": each for name, each in sweep.changes.items()}),
        plugins=list({plugin: None for run in (base, *(t.run for t in trials)) for plugin in run.plugins}),
    )
    if was is None:
        check_resumable(directory, "resume" if resume else "auto")
        baselines = linear_baseline(base) if sweep.quality == base.task.quality else {}
        # It rises only when an arm costs more, so that hypervolumes of a sweep compare. A search has no arms
        # yet. Measured costs are added when results are published first.
        runs = list(sweep.runs().values()) or (sample(sweep.space, base, SAMPLED) if sweep.space else [])
        chance = {sweep.quality: base.task.chance(base.model)}
        reference = raised_reference(chance, _highest_costs(runs))
        now = replace(now, reference=reference, baselines=baselines)
    else:
        check_loaded(was.plugins)
        more_seeds = was.seeds and set(was.seeds) <= set(now.seeds)
        as_written = SweepRecord(**json.loads(json.dumps(asdict(now))))  # lists in place of tuples
        if more_seeds:
            as_written = replace(as_written, seeds=was.seeds)
        arms = [name for name in was.arms if name not in was.drawn]
        changes = changed_fields(_fixed(was, arms), _fixed(as_written, arms))
        same = moved(changes, was.contents | {"data.path": was.data_digest})
        if changes := {name: each for name, each in changes.items() if name not in same}:
            raise_changed(directory, changes, base.data.path)
        for run in (trial.run for trial in trials) if same else ():
            if RunDir.of(run).record():
                start(run)  # also one that has ended: it is evaluated where the data lie now
        now = replace(
            now,
            key=was.key,
            began_s=was.began_s,
            reference=raised_reference(was.reference, _highest_costs(trial.run for trial in trials)),
            baselines=was.baselines,
            contents=now.contents | was.contents,
            answers=was.answers,
            trials=was.trials | now.trials,
            labels=now.labels or was.labels,
            plugins=[*was.plugins, *(plugin for plugin in now.plugins if plugin not in was.plugins)],
        )
        say_raised(was.reference, now.reference, now.cost)
    save_plugins(directory, now.plugins)
    own.write(now)
    return now


def _fixed(record: SweepRecord, arms: Iterable[str]) -> dict[str, Any]:
    """The fields that may not change when a sweep is continued. `arms`: the arms that it began with. Their
    changes may be written otherwise if they make the same run.
    """
    base = read_config(RunConfig, record.base)
    made = {name: override(base, record.arms[name]) for name in arms if name in record.arms}
    return {
        **flat(base),
        DATA: record.data_digest,
        **{name: getattr(record, name) for name in ("quality", "cost", "trunk", "seeds")},
        **{f"arms.{name}": differences(base, made[name]) if name in made else None for name in arms},
    }


def _highest_costs(runs: Iterable[RunConfig]) -> dict[str, float]:
    """The highest of each computed cost that a page draws."""
    found, drawn = dict[str, float](), known_costs()
    for run in runs:
        for name, cost in computed(run, run.train.steps, trunk=branch_step(run)).items():
            if drawn[name].drawn:
                found[name] = max(found.get(name, 0.0), cost)
    return found
