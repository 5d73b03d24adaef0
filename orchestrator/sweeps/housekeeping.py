"""Removes runs and sweeps from storage, MLflow and its registry together, and finds what has no owner.

Everything is planned as a list of steps first, which a dry run prints. A step that was taken already does
nothing the second time, and what names the others goes last: after a failure the same call finishes.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.names import RESERVED
from orchestrator.runs.lock import holder_of, locked
from orchestrator.runs.measurements import measurement_ids
from orchestrator.runs.metrics_file import poll_s
from orchestrator.runs.run_directory import CONFIG, LOCK, SWEEP, UNTRAINED, RunDir
from orchestrator.runs.state import State, directory_state
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.overview import entries
from orchestrator.tracking.find import KEY, SWEEP_KEY, is_copy, record_of, runs_below
from orchestrator.tracking.removal import (
    checkpoints_of,
    named_weights,
    registered,
    remove_run,
    remove_shown,
    remove_weights,
    shown_of,
)
from orchestrator.tracking.store import Tracking

OLD = re.compile(r".+\.old-\d+")  # what --fresh moved aside
HALF = re.compile(r".*\.[0-9a-f]{32}\.tmp|(.*/)?\.writable-[0-9a-f]{32}")  # of a write that was killed
STOP_S = 600.0  # for a command to save and stop
UNUSED_S = 3600.0  # a file that was not written to for so long is complete, or was abandoned

log = logging.getLogger(__name__)


class Step(NamedTuple):
    """One step of a removal.

    Attributes:
        what: what it removes, in words.
        size: bytes of files in the storage that it frees.
    """

    what: str
    size: int
    take: Callable[[], object]


def remove_everywhere(
    root: str, name: str, store: Tracking, *, dry_run: bool = False, keep_frontier: bool = False
) -> list[Step]:
    """Removes a run or a sweep; returns the steps.

    With `keep_frontier` a finished sweep keeps everything but the checkpoints of trials off its frontier that
    no alias names, and the models of these in MLflow. Its report and its page stay as they are.

    Raises:
        UsageError: if there is nothing of that name, it is running, or MLflow does not answer.
    """
    directory = storage.join(root, name)
    plan = _of_frontier if keep_frontier else _of_all
    steps = plan(directory, store)
    if not dry_run and storage.names(directory):
        with locked(directory):
            take(steps := plan(directory, store, mine=True))
            if not keep_frontier and storage.is_local(directory):
                storage.delete(directory)
        if not keep_frontier:  # in an object storage a lock that is deleted while it is held comes back
            storage.delete(directory)
    elif not dry_run:
        take(steps)
    return steps


def take(steps: list[Step]) -> None:
    for step in steps:
        log.info("removing %s", step.what)
        step.take()


def _of_all(directory: str, store: Tracking, mine: bool = False) -> list[Step]:
    _check_idle(directory, mine)
    files, record = storage.files(directory), record_of(directory)
    if record is not None and is_copy(store, directory, record.key):
        log.info("%s is a copy: MLflow keeps what it shows of the original", directory)
        keys = []
    elif record is not None:
        keys = [record.key]
    else:
        gone = (run.data.tags for run in runs_below(store, directory.rpartition("/")[0]))
        keys = list({tags[KEY]: None for tags in gone if tags["directory"] == directory and KEY in tags})
        others = {entry.key for entry in entries(directory.rpartition("/")[0])}
        keys = [key for key in keys if key not in others]  # renamed meanwhile
        if not keys and not (files and _is_remnant(files)):
            raise UsageError(f"no run or sweep in {directory}, and MLflow has none that was there")
    steps = [step for key in keys for step in _shown(store, key)]
    if files:
        steps.append(
            Step(f"{directory} ({len(files)} files)", sum(files.values()), lambda: _empty(directory))
        )
    return steps


def stop(directory: str) -> State:
    """Asks the command that works in the directory of a run or a sweep, on any machine, to save and stop;
    returns the state once it has, or at once if none works there.

    Raises:
        UsageError: if there is no run or sweep, or the command still works after `STOP_S`.
    """
    began_s, own = time.monotonic(), RunDir(directory)
    while (state := directory_state(directory)) == "running":
        if time.monotonic() - began_s > STOP_S:
            raise UsageError(
                f"{directory} was asked to stop {STOP_S:.0f} s ago, and a process still works there"
                f" ({holder_of(directory)}): end that, or wait, it remains asked"
            )
        own.ask_to_stop(for_good=True)  # again and again: one that just starts may miss it
        time.sleep(poll_s(directory))
    if state is None:
        raise UsageError(f"no run or sweep in {directory}")
    storage.delete(own.stop)
    return state


def _check_idle(directory: str, mine: bool) -> None:
    if not mine and (holder := holder_of(directory)) and holder.lives:
        raise UsageError(
            f"a process works in {directory} (process {holder.pid} on {holder.host}): stop it first"
        )


def _shown(store: Tracking, key: str) -> Iterator[Step]:
    models, runs = shown_of(store, key)
    if models or runs:
        words = [*(f"the registered model {name} with its aliases" for name in models)]
        words += [f"{len(runs)} runs in MLflow with their models and files"] if runs else []
        yield Step(" and ".join(words), 0, lambda: remove_shown(store, key))


def _empty(directory: str) -> None:
    """Deletes the record last: it has the key by which MLflow's part is found. Keeps the lock. Uploads to S3
    that were never completed cost as much as files, and no list shows them.
    """
    with suppress(OSError):  # who may delete may not list uploads
        storage.abort_uploads(directory)
    names = storage.names(directory)
    for name in [*(n for n in names if n not in (SWEEP, CONFIG, LOCK)), CONFIG, SWEEP]:
        storage.delete(storage.join(directory, name))


def _of_frontier(directory: str, store: Tracking, mine: bool = False) -> list[Step]:
    _check_idle(directory, mine)
    own = SweepDir(directory)
    record, summary = own.record(), own.summary()
    if record is None or not record.is_over or not summary.get("pareto"):
        raise UsageError(f"{directory} is no sweep that is over and has a frontier, so there is none to keep")
    if is_copy(store, directory, record.key):
        raise UsageError(f"{directory} is a copy, whose models MLflow does not show: remove all of it")
    kept = {*summary["pareto"], *(alias["run"] for alias in summary["aliases"].values())}
    named = named_weights(store, record.key)
    steps, gone = list[Step](), set[str]()
    for name, labels in record.trials.items():
        run = own.trial(labels)
        result = run.result()
        # A trunk is no arm: arms that are added later branch from it.
        if name in kept or labels["role"] == "trunk" or (result and result.weights in named):
            continue
        if size := sum(storage.files(run.checkpoints).values()):
            gone |= {result.weights} if result and result.weights else set()
            steps.append(Step(f"the checkpoints of {name}", size, lambda run=run: _drop_checkpoints(run)))
    if gone:
        models = f"the models of {len(gone)} trials in MLflow"
        steps.insert(0, Step(models, 0, lambda: remove_weights(store, record.key, gone)))
    return steps


def _drop_checkpoints(run: RunDir) -> None:
    """The result says first that there is no checkpoint, so that no tracker is sent one that is gone."""
    if result := run.result():
        run.write_result(replace(result, checkpoint="", best_checkpoint="", best_quality=None))
    storage.delete(run.checkpoints)


def ownerless(root: str, store: Tracking) -> list[Step]:
    """Returns a step for each thing of a storage that belongs to no run or sweep: what ``fresh`` moved aside,
    caches and imports that no record names, what killed processes left, and what MLflow shows of directories
    that are gone. What MLflow shows of other storages is not looked at.
    """
    return [
        *_moved_aside(root, store),
        *_caches(root),
        *_remnants(root),
        *_ownerless_in_mlflow(root, store),
    ]


def _moved_aside(root: str, store: Tracking) -> Iterator[Step]:
    for name in storage.names(root):
        if OLD.fullmatch(name) and directory_state(storage.join(root, name)) not in (None, "running"):
            size = sum(storage.files(storage.join(root, name)).values())
            yield Step(
                f"{name}, moved aside by a start with `fresh`, with all that MLflow has of it",
                size,
                lambda name=name: remove_everywhere(root, name, store),
            )


def _caches(root: str) -> Iterator[Step]:
    texts = [
        storage.read_bytes(storage.join(root, name, file)).decode(errors="replace")
        for name in storage.names(root)
        for file in (SWEEP, CONFIG)
        if name not in RESERVED and storage.size(storage.join(root, name, file)) is not None
    ]
    for folder, why in (("evaluation", "a cache"), ("imports", "named by no run")):
        for name in storage.names(storage.join(root, folder)):
            place, within = storage.join(root, folder, name), f"{folder}/{name}"
            files = storage.files(place) or {"": storage.size(place) or 0}
            if _is_old(place, files) and not any(within in text for text in texts):
                yield Step(f"{within}: {why}", sum(files.values()), lambda place=place: storage.delete(place))


def _is_old(place: str, files: dict[str, int]) -> bool:
    with suppress(FileNotFoundError):
        return all(storage.age_s(f"{place}/{name}".rstrip("/")) > UNUSED_S for name in files)
    return False


def _remnants(root: str) -> Iterator[Step]:
    """Yields what killed processes left: locks in directories without a record, and half-written files."""
    for name in storage.names(root):
        place = storage.join(root, name)
        if HALF.fullmatch(name):
            if _is_old(place, {"": 0}):
                yield Step(f"{name}: half written", storage.size(place) or 0, _deletes(place))
        elif name not in RESERVED and (files := storage.files(place)):
            holder = holder_of(place)
            if holder and holder.lives:
                continue
            if _is_remnant(files):
                yield Step(f"{name}: a lock of nothing", sum(files.values()), _deletes(place))
            elif SWEEP in files or CONFIG in files:
                for file in filter(HALF.fullmatch, files):
                    half = storage.join(place, file)
                    yield Step(f"{name}/{file}: half written", files[file], _deletes(half))


def _deletes(place: str) -> Callable[[], object]:
    return lambda: storage.delete(place)


def _is_remnant(files: dict[str, int]) -> bool:
    """Whether a directory without a record has nothing but what a start or a removal left."""
    locks = {LOCK, f"report/{LOCK}"}
    return bool(locks & {*files}) and {*files} <= locks | {*UNTRAINED} - {CONFIG}


def _ownerless_in_mlflow(root: str, store: Tracking) -> Iterator[Step]:
    there = entries(root)
    places = {entry.key: storage.join(root, entry.name) for entry in there}
    damaged = tuple(f"{root}/{entry.name}/" for entry in there if entry.state == "unreadable")
    gone, alone = defaultdict[str, list[Any]](list), list[Any]()
    for run in runs_below(store, root):
        tags = run.data.tags
        owner = tags.get(SWEEP_KEY) or tags.get(KEY, "")
        if f"{tags['directory']}/".startswith(damaged):
            continue  # its key is unknown
        if owner not in places:
            if owner and owner not in measurement_ids(tags["directory"]):  # of a study
                gone[owner].append(run)
        elif SWEEP_KEY in tags and not _is_trial(places[owner], tags):
            alone.append(run)
    for key, runs in gone.items():
        where = runs[-1].data.tags["directory"]
        yield from (Step(f"{s.what}, of {where}, which is gone", s.size, s.take) for s in _shown(store, key))
    for run in alone:
        where = run.data.tags["directory"]
        yield Step(f"the run in MLflow of {where}, which is gone", 0, lambda run=run: remove_run(store, run))
    for model in registered(store):
        key, below = (
            model.tags[SWEEP_KEY],
            [p.startswith(f"{root}/") for p in checkpoints_of(store, model.name)],
        )
        if key not in places and key not in gone and below and all(below):
            yield Step(
                f"the registered model {model.name}, of no sweep", 0, lambda k=key: remove_shown(store, k)
            )


def _is_trial(sweep: str, tags: dict[str, str]) -> bool:
    """Whether the sweep still has the trial that MLflow shows with these tags."""
    within = "/".join(tags["directory"].rsplit("/", 2)[-2:])
    trial = RunDir(storage.join(sweep, within)).record()
    return trial is not None and trial.key == tags.get(KEY)
