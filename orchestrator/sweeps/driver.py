"""Trains one run or a whole sweep, and keeps MLflow up to date. Commands and notebooks call this."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from ray.exceptions import RayError
from ray.train import TrainingFailedError

from moe.config import Config, NonNegativeInt, PositiveFloat, PositiveInt
from orchestrator import storage
from orchestrator.codec import changed_fields, differences, flat, override, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.data.packing import digits
from orchestrator.errors import BudgetExhausted, UsageError, reason_of
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import knee_points
from orchestrator.plugins import check_loaded, save_plugins
from orchestrator.sweeps.baseline import linear_baseline
from orchestrator.sweeps.budget import Budget, BudgetTracker
from orchestrator.sweeps.build import judged_runs, raised_reference, say_raised
from orchestrator.sweeps.estimate import resolve_auto
from orchestrator.sweeps.findings import require
from orchestrator.sweeps.preflight import preflight
from orchestrator.sweeps.progress import StepLines, SweepProgress
from orchestrator.sweeps.publish import publish, wait_for_report
from orchestrator.sweeps.queue import Job, Policy, RunToCompletion
from orchestrator.sweeps.run import QUIET, SweepRun, Watch, keep_weights_only
from orchestrator.sweeps.search import OptunaSearch, SearchOptions, sample
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.tracking.base import TrackerConfig, following, update_now
from orchestrator.tracking.find import check_original
from orchestrator.tracking.lost import open_store
from orchestrator.tracking.store import Tracking
from orchestrator.tracking.sync import Sync
from orchestrator.tracking.system import SystemMetrics
from orchestrator.training import notice
from orchestrator.training.cluster import connect
from orchestrator.training.contents import contents_of, moved
from orchestrator.training.fit import check_data, check_start, decided_by_data, fit, start
from orchestrator.training.lock import locked
from orchestrator.training.measurements import made_by
from orchestrator.training.metrics_file import Metrics, poll_s
from orchestrator.training.progress import costs
from orchestrator.training.resources import check_resources, check_shared, is_inline
from orchestrator.training.run_directory import (
    DATA,
    Result,
    RunDir,
    check_kind,
    check_resumable,
    new_key,
    raise_changed,
)
from orchestrator.training.sweep_directory import SweepDir, SweepRecord
from orchestrator.training.worker import Report

log = logging.getLogger(__name__)

Mode = Literal["auto", "resume", "fresh"]
SAMPLED = 200  # draws of a space that set the reference of a search


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Config):
    """Options of `run_sweep`.

    Attributes:
        mode: ``auto`` continues what is there, ``resume`` insists on it, ``fresh`` moves it aside.
        policy: which trial is next: every trial to its end, or early stopping.
        max_concurrent: trials at the same time; None: as many as the cluster holds.
        search: draws arms from the sweep's space, beside those it names; None: no arms are drawn.
        retrain: arms at the knee that are trained again, for twice the steps, on several workers.
        flops_per_s: of a device; predicts how long trials take until the first has ended; None: none.
        labels: further tags of the sweep in trackers.
        trackers: what follows the sweep beside MLflow.
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


def with_data(run: RunConfig) -> RunConfig:
    """Returns the run, without a data set on the digits, with what its data decide."""
    path = run.data.path or digits(run.storage)
    return decided_by_data(replace(run, data=replace(run.data, path=path)))


def _silent(*_: object) -> None: ...


def train(
    run: RunConfig,
    *,
    mode: Mode = "auto",
    progress: bool | Report = True,
    store: Tracking | None = None,
    labels: Mapping[str, str] | None = None,
    trackers: Iterable[TrackerConfig] = (),
) -> Result:
    """Trains one run to its end, from its newest checkpoint if it has one, and shows it in MLflow.

    A run without `data.path` is trained on the `digits`.

    Args:
        mode: ``auto`` continues what is there, ``resume`` insists on it, ``fresh`` moves it aside.
        progress: whether to print a line for every report; or a function that gets the step and its metrics.
        store: the MLflow store; by default MLFLOW_TRACKING_URI, else ``mlflow.db`` below the storage.
        labels: further tags of the run in trackers.
        trackers: what follows the run beside MLflow.

    Raises:
        UsageError: for an unknown mode, a run that cannot be trained, or another config in its directory.
        ray.train.TrainingFailedError: when workers died more often than they are replaced.
    """
    if mode not in get_args(Mode):
        raise UsageError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    directory = RunDir.of(run).path
    check_kind(directory, "run")
    if mode == "resume" and RunDir(directory).record() is None:
        check_resumable(directory, mode)
    run = resolve_auto(with_data(run))
    check_data(run)
    check_start(run)
    lines = StepLines(run) if progress is True else None
    say: Callable[[str], None] = lines.say if lines else _silent
    report: Report = lines.show if lines else _silent if isinstance(progress, bool) else progress
    if not is_inline(run):
        connect(say)
        check_shared(run.storage)
        check_resources(run)
    store = store or open_store(run.storage)
    with working_in(directory, mode, store):
        start(run, "resume" if mode == "resume" else "auto", {**made_by(), **(labels or {})})
        if not is_inline(run):
            say(f"starting {run.scale.workers} workers, which load libraries first ..")
        followers = [Sync(store, directory), *(tracker.follow(directory) for tracker in trackers)]
        with following(followers), SystemMetrics(directory), _recording_errors(directory):
            return fit(run, report)


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
            raise BudgetExhausted("the budget does not hold a single trial: give a larger one")
        frontier = publish(directory)
        for point in knee_points(frontier.points, 0 if run.trials_left() else options.retrain):
            _retrain(run, point.arm)
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
    sweep = sweep.based_on(with_data(sweep.base))

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
            budget = BudgetTracker(options.budget, directory, flops_per_s=options.flops_per_s or math.inf)
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


@contextmanager
def working_in(directory: str, mode: Mode, store: Tracking) -> Iterator[None]:
    """Locks the directory, and takes a request there to stop as a notice. What was there is moved aside if
    `mode` is ``fresh``, and ends in MLflow.

    Raises:
        UsageError: for a copy of a directory that MLflow shows.
    """
    wait_for_report(directory)
    with notice.on_interrupt(), locked(directory, fresh=mode == "fresh") as aside:
        if aside and (missing := update_now(Sync(store, aside))):
            log.warning("MLflow may still show what is now %s as running: %s", aside, missing)
        check_original(store, directory)
        request = RunDir(directory)
        storage.delete(request.stop)  # of an earlier process
        with notice.on_request(request.asked_for_good, poll_s(directory)):
            yield


@contextmanager
def _recording_errors(directory: str) -> Iterator[None]:
    """Writes why a run failed to its directory. An interrupted run has not failed."""
    try:
        yield
    except Exception as error:
        RunDir(directory).write_error(reason_of(error))
        raise


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
    """The highest of each computed cost."""
    found = dict[str, float]()
    for run in runs:
        for name, cost in costs(run, run.train.steps).items():
            found[name] = max(found.get(name, 0.0), cost)
    return found


def _retrain(run: SweepRun, arm: str) -> None:
    """Trains `Sweep.retrain_config` of an arm as a child outside the frontier, if the budget holds it."""
    sweep, watch, name = run.sweep, run.watch, f"confirm/{arm}"
    longer = sweep.retrain_config(run.trial_of(arm))
    labels = {"directory": name, "role": "confirm", "arm": arm}
    state = run.state_of(Trial(name=name, arm=arm, changes={}, run=longer))
    job = Job(state=state, until=state.steps)
    if RunDir.of(longer).result() is None and not run.budget.admits(job, state):
        watch.say(f"{arm} is not trained again: the budget does not hold it")
        run.unpaid.append(arm)
        return
    SweepDir.of(sweep.base).update(lambda was: {"trials": {**was.trials, name: labels}})

    def report(step: int, metrics: Metrics) -> None:
        run.budget.report(name, step, time.time())
        watch.report(name, step, metrics)

    watch.retraining(arm, longer)
    run.budget.begin(job)
    try:
        check_resources(longer)
        with _recording_errors(RunDir.of(longer).path):
            outcome = fit(longer, report)
    except (UsageError, TrainingFailedError, RayError) as error:
        outcome = reason_of(error)
    run.budget.record(job, outcome)
    run.retrained[name] = outcome
    watch.ended(name, outcome)
