"""Finds runs in MLflow, ours and those of other tools, and writes the results of commands to a run."""

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError, reason_of
from orchestrator.records import read_run
from orchestrator.tracking.store import Tracking, redact_uri
from orchestrator.training.run_directory import RunDir, RunRecord
from orchestrator.training.sweep_directory import SweepDir, SweepRecord

KEY = "moe_frontier.key"  # tag: the key of the run's directory
SWEEP_KEY = "moe_frontier.sweep"  # tag of a trial and of a registered model: the key of its sweep
CONFIG = "moe_frontier.config"  # tag: the config as JSON; the rest of a long one is in .1, .2, ..
OLDEST, NEWEST = "attributes.start_time ASC", "attributes.start_time DESC"
PAGE = 1000
MAX_METRICS = 800  # per request


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run in MLflow.

    Attributes:
        metrics: the newest values.
        start_s, end_s: seconds since the epoch; `end_s` is None while it runs.
        url: its page on a tracking server.
    """

    run_id: str
    name: str
    status: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    start_s: float
    end_s: float | None
    url: str | None
    tracking: Tracking = field(repr=False, compare=False)

    def config(self) -> RunConfig:
        """Returns the run's config. Raises UsageError if it is not ours, or of another version."""
        text, number = self.tags.get(CONFIG, ""), 1
        while part := self.tags.get(f"{CONFIG}.{number}"):
            text, number = text + part, number + 1
        if not text:
            raise UsageError(f"run {self.name} ({self.run_id}) has no config of ours in its tag {CONFIG}")
        return read_run(json.loads(text))

    def read_text(self, name: str) -> str:
        """Returns an artifact. Raises UsageError if there is no artifact of that name."""
        with mlflow_errors(self.tracking), tempfile.TemporaryDirectory() as folder:
            return Path(self.tracking.client.download_artifacts(self.run_id, name, folder)).read_text()

    def history(self, metric: str) -> list[tuple[int, float]]:
        """Returns (images seen, value), in the order of images."""
        with mlflow_errors(self.tracking):
            rows = self.tracking.client.get_metric_history(self.run_id, metric)
        return sorted((row.step, row.value) for row in rows)


class RunWriter:
    """Writes to one run. Every method raises UsageError if MLflow does not answer, or refuses."""

    def __init__(self, tracking: Tracking, run_id: str) -> None:
        self.run_id = run_id
        self._tracking = tracking
        self._client = tracking.client

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Writes the finite values of `metrics`; `step` defaults to seconds since the epoch."""
        now = time.time()
        at = int(now) if step is None else step
        rows = [
            Metric(name, float(value), int(1000 * now), at)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        with mlflow_errors(self._tracking):
            for i in range(0, len(rows), MAX_METRICS):
                self._client.log_batch(self.run_id, metrics=rows[i : i + MAX_METRICS])

    def tag(self, **tags: str) -> None:
        with mlflow_errors(self._tracking):
            self._client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def write_text(self, name: str, text: str) -> None:
        with mlflow_errors(self._tracking):
            self._client.log_text(self.run_id, text, name)

    def write_file(self, path: Path, *, folder: str = "") -> None:
        with mlflow_errors(self._tracking):
            self._client.log_artifact(self.run_id, str(path), folder or None)

    def write_table(self, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Writes a table that MLflow's pages show. `name` ends in ``.json``."""
        self.write_text(name, json.dumps(table(columns)))
        with mlflow_errors(self._tracking):
            tags = self._client.get_run(self.run_id).data.tags
            listed = json.loads(tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
            entry = {"path": name, "type": "table"}
            if entry not in listed:
                self._client.set_tag(self.run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*listed, entry]))

    def finish(self, status: str = "FINISHED") -> None:
        with mlflow_errors(self._tracking):
            self._client.set_terminated(self.run_id, status)


def table(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Returns columns in the format of MLflow's tables. JSON has no NaN, and no numbers of numpy."""
    rows = [[_cell(value) for value in row] for row in zip(*columns.values(), strict=True)]
    return {"columns": list(columns), "data": rows}


def _cell(value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def create_run(tracking: Tracking, name: str, tags: Mapping[str, str]) -> RunWriter:
    """Creates a run, for the results of a command that trains nothing."""
    with mlflow_errors(tracking):
        run = tracking.client.create_run(tracking.experiment_id, tags=dict(tags), run_name=name)
    return RunWriter(tracking, run.info.run_id)


def find_sweep(tracking: Tracking, name: str) -> RunInfo:
    """Returns the newest run of the sweep with that name.

    Raises:
        UsageError: if there is no such sweep, or if sweeps of several directories have that name.
    """
    query = f"tags.role = 'sweep' and {eq_filter('attributes.run_name', name)}"
    found = [run for run in _search(tracking, query, NEWEST) if run.name == name]
    if not found:
        raise UsageError(f"no sweep {name!r} at {redact_uri(tracking.uri)}")
    directories = {run.tags.get("directory", ""): run for run in reversed(found)}
    if len(directories) > 1:
        listed = "; ".join(sorted(directories))
        raise UsageError(
            f"{len(directories)} sweeps at {redact_uri(tracking.uri)} are named {name!r}, in {listed}: give"
            " each its own `name`, or work in its `storage`"
        )
    return found[0]


def find_run(tracking: Tracking, run_id: str) -> RunInfo:
    with mlflow_errors(tracking):
        return _info(tracking, tracking.client.get_run(run_id))


def children(tracking: Tracking, parent_run_id: str) -> list[RunInfo]:
    """Returns the trials of a sweep, oldest first, without runs that others have put below it."""
    found = _search(tracking, f"tags.`mlflow.parentRunId` = '{parent_run_id}'", OLDEST)
    return [run for run in found if "trial" in run.tags]


def newest_of(tracking: Tracking, directory: str) -> RunInfo | None:
    found = _search(tracking, eq_filter("tags.directory", directory), NEWEST)
    return next((run for run in found if run.tags["directory"] == directory), None)


def find_by_tag(tracking: Tracking, tag: str, value: str) -> list[Run]:
    """Returns the runs with that tag, oldest first, but empty runs last."""
    runs = list(_all_runs(tracking, f"tags.`{tag}` = '{value}'", OLDEST))
    return sorted(runs, key=lambda run: not run.data.metrics and not run.data.params)


def check_original(tracking: Tracking, directory: str) -> None:
    """Raises UsageError if the directory of a run or a sweep is a copy, and MLflow shows the original."""
    if record := _record(directory):
        with mlflow_errors(tracking):
            found = find_by_tag(tracking, KEY, record.key)
        for run in found:
            refuse_copy(tracking, run, record.key, directory)


def refuse_copy(tracking: Tracking, run: Run, key: str, directory: str) -> None:
    """Raises UsageError if `run`, which has the key of `directory`, is that of another directory."""
    was = run.data.tags.get("directory", directory)
    if was == directory or tracking.lies_with(directory) > tracking.lies_with(was):
        return  # a database that was copied along has runs of its own
    other = None
    with suppress(OSError, UsageError):
        other = _record(was)
    if other is None or other.key != key:
        return  # moved
    if not (storage.is_local(was) and storage.is_local(directory) and os.path.samefile(was, directory)):
        raise UsageError(
            f"{directory} is a copy of {was}, which MLflow at {redact_uri(tracking.uri)} shows: give the copy"
            " a store of its own with `tracking_uri`, or delete the other one"
        )


def _record(directory: str) -> SweepRecord | RunRecord | None:
    return SweepDir(directory).record() or RunDir(directory).record()


@contextmanager
def mlflow_errors(tracking: Tracking) -> Iterator[None]:
    """Turns errors of MLflow or of the connection into a UsageError of one line."""
    try:
        yield
    except (MlflowException, OSError) as error:
        raise UsageError(f"MLflow at {redact_uri(tracking.uri)}: {reason_of(error)}") from None


def eq_filter(name: str, text: str) -> str:
    """Returns the condition that `name` is `text`. MLflow's filters have no escapes: if `text` has quotes or
    backslashes, other texts match too, so callers compare again.
    """
    if "'" in text or "\\" in text:
        return f"{name} LIKE '{text.replace(chr(39), '_').replace(chr(92), '_')}'"
    return f"{name} = '{text}'"


def metric_name(text: str) -> str:
    """Returns `text` as part of a metric's name: characters that MLflow does not allow become dashes."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def _search(tracking: Tracking, query: str, order: str) -> Iterator[RunInfo]:
    with mlflow_errors(tracking):
        runs = list(_all_runs(tracking, query, order))
    return (_info(tracking, run) for run in runs)


def _all_runs(tracking: Tracking, query: str, order: str) -> Iterator[Run]:
    token = None
    while tracking.experiment_id:
        page = tracking.client.search_runs(
            [tracking.experiment_id], query, max_results=PAGE, order_by=[order], page_token=token
        )
        yield from page
        if not (token := page.token):
            return


def _info(tracking: Tracking, run: Run) -> RunInfo:
    page = f"{tracking.uri.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    return RunInfo(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        status=run.info.status,
        tags=run.data.tags,
        params=run.data.params,
        metrics=run.data.metrics,
        start_s=run.info.start_time / 1000,
        end_s=run.info.end_time / 1000 if run.info.end_time else None,
        url=page if tracking.uri.startswith("http") else None,
        tracking=tracking,
    )
