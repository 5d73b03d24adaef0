"""Finds the runs in MLflow that belong to directories."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from orchestrator import storage
from orchestrator.errors import UsageError, reason_of
from orchestrator.output import redact_uri
from orchestrator.runs.run_directory import RunDir, RunRecord
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord
from orchestrator.tracking.store import Tracking

KEY = "moe_frontier.key"  # tag: the key of the run's directory
SWEEP_KEY = "moe_frontier.sweep"  # tag of a trial and of a registered model: the key of its sweep
PAGE = 1000


def find_by_tag(tracking: Tracking, tag: str, value: str) -> list[Run]:
    """Returns the runs with that tag, oldest first, but empty runs last."""
    runs = _search(tracking, f"tags.`{tag}` = '{value}'")
    return sorted(runs, key=lambda run: not run.data.metrics and not run.data.params)


def runs_below(tracking: Tracking, root: str) -> list[Run]:
    """Returns the runs whose directories lie, or lay, in the storage `root`."""
    with mlflow_errors(tracking):
        runs = _search(tracking, "tags.directory != ''")
    return [run for run in runs if run.data.tags["directory"].startswith(f"{root}/")]


def unfinished(tracking: Tracking) -> list[Run]:
    """Returns the runs that MLflow shows as running."""
    with mlflow_errors(tracking):
        return _search(tracking, "attributes.status = 'RUNNING'")


def _search(tracking: Tracking, query: str) -> list[Run]:
    runs, token = list[Run](), None
    while tracking.experiment_id:
        page = tracking.client.search_runs(
            [tracking.experiment_id],
            query,
            max_results=PAGE,
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        runs += page
        if not (token := page.token):
            break
    return runs


def check_original(tracking: Tracking, directory: str) -> None:
    """Raises UsageError if the directory of a run or a sweep is a copy, and MLflow shows the original."""
    if record := record_of(directory):
        with mlflow_errors(tracking):
            found = find_by_tag(tracking, KEY, record.key)
        for run in found:
            refuse_copy(tracking, run, record.key, directory)


def is_copy(tracking: Tracking, directory: str, key: str) -> bool:
    """Returns whether the directory with that key is a copy, and MLflow shows the original."""
    with mlflow_errors(tracking):
        found = find_by_tag(tracking, KEY, key)
    try:
        for run in found:
            refuse_copy(tracking, run, key, directory)
    except UsageError:
        return True
    return False


def refuse_copy(tracking: Tracking, run: Run, key: str, directory: str) -> None:
    """Raises UsageError if `run`, which has the key of `directory`, is that of another directory."""
    was = run.data.tags.get("directory", directory)
    if was == directory or tracking.lies_with(directory) > tracking.lies_with(was):
        return  # a database that was copied along has runs of its own
    other = None
    with suppress(OSError, UsageError):
        other = record_of(was)
    if other is None or other.key != key:
        return  # moved
    if not (storage.is_local(was) and storage.is_local(directory) and os.path.samefile(was, directory)):
        raise UsageError(
            f"{directory} is a copy of {was}, which MLflow at {redact_uri(tracking.uri)} shows: give the copy"
            " a store of its own with `tracking_uri`, or delete the other one"
        )


def record_of(directory: str) -> SweepRecord | RunRecord | None:
    return SweepDir(directory).record() or RunDir(directory).record()


@contextmanager
def mlflow_errors(tracking: Tracking) -> Iterator[None]:
    """Turns errors of MLflow or of the connection into a UsageError of one line."""
    try:
        yield
    except (MlflowException, OSError) as error:
        raise UsageError(f"MLflow at {redact_uri(tracking.uri)}: {reason_of(error)}") from None
