"""Trains one run, and keeps its trackers up to date. Commands and notebooks call this."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

from orchestrator import storage, tracking
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError, reason_of
from orchestrator.estimate import resolve_auto
from orchestrator.runs import notice
from orchestrator.runs.lock import locked, wait_for_report
from orchestrator.runs.measurements import made_by
from orchestrator.runs.metrics_file import poll_s
from orchestrator.runs.run_directory import Result, RunDir, check_kind, check_resumable
from orchestrator.training.console import StepLines
from orchestrator.training.fit import check_data, check_start, decided_by_data, fit_started, start
from orchestrator.training.worker import Report

log = logging.getLogger(__name__)

Mode = Literal["auto", "resume", "fresh"]


def resolved(run: RunConfig) -> RunConfig:
    """Returns the run as it is trained: without a data set on the digits, with what its data decide, and with
    values for what is ``auto``. A run that has all of that is returned as it is.
    """
    return resolve_auto(with_data(run))


def with_data(run: RunConfig) -> RunConfig:
    """Returns the run, without a data set on the digits, with what its data decide."""
    if not run.data.path:
        import orchestrator.packing.pack as pack

        run = override(run, {"data.path": pack.digits(run.storage)})
    return decided_by_data(run)


def _silent(*_: object) -> None: ...


def train(
    run: RunConfig,
    *,
    mode: Mode = "auto",
    progress: bool | Report = True,
    store: tracking.Tracking | None = None,
    labels: Mapping[str, str] | None = None,
    trackers: Iterable[tracking.TrackerConfig] = (),
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
    run = resolved(run)
    check_data(run)
    check_start(run)
    lines = StepLines(run) if progress is True else None
    say: Callable[[str], None] = lines.say if lines else _silent
    report: Report = lines.show if lines else _silent if isinstance(progress, bool) else progress
    if not run.inline:
        import orchestrator.training.cluster as cluster
        import orchestrator.training.resources as resources

        cluster.connect(say)
        resources.check_shared(run.storage)
        resources.check_resources(run)
    store = store or tracking.open_store(run.storage)
    with working_in(directory, mode, store):
        run = start(run, "resume" if mode == "resume" else "auto", {**made_by(), **(labels or {})})
        if not run.inline:
            say(f"starting {run.scale.workers} workers, which load libraries first ..")
        followers = [tracking.Sync(store, directory), *(tracker.follow(directory) for tracker in trackers)]
        with tracking.following(followers), tracking.SystemMetrics(directory), recording_errors(directory):
            return fit_started(run, report)


@contextmanager
def working_in(directory: str, mode: Mode, store: tracking.Tracking) -> Iterator[None]:
    """Locks the directory, and takes a request there to stop as a notice. What was there is moved aside if
    `mode` is ``fresh``, and ends in MLflow.

    Raises:
        UsageError: for a copy of a directory that MLflow shows.
    """
    wait_for_report(directory)
    with notice.on_interrupt(), locked(directory, fresh=mode == "fresh") as aside:
        if aside and (missing := tracking.update_now(tracking.Sync(store, aside))):
            log.warning("MLflow may still show what is now %s as running: %s", aside, missing)
        tracking.check_original(store, directory)
        request = RunDir(directory)
        storage.delete(request.stop)  # of an earlier process
        with notice.on_request(request.asked_for_good, poll_s(directory)):
            yield


@contextmanager
def recording_errors(directory: str) -> Iterator[None]:
    """Writes why a run failed to its directory. An interrupted run has not failed."""
    try:
        yield
    except Exception as error:
        RunDir(directory).write_error(reason_of(error))
        raise
