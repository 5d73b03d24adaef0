"""Reads runs from MLflow, to see what a tracker shows."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlflow.entities import Run

from orchestrator.codec import read_config
from orchestrator.config import RunConfig
from orchestrator.runs.run_directory import RunDir
from orchestrator.tracking.store import Tracking

OLDEST, NEWEST = "attributes.start_time ASC", "attributes.start_time DESC"


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run in MLflow; `metrics` are the newest values, and times seconds since the epoch."""

    run_id: str
    name: str
    status: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    start_s: float
    end_s: float | None
    tracking: Tracking = field(repr=False, compare=False)

    def config(self) -> RunConfig:
        """Returns the config in the run's directory."""
        record = RunDir(self.tags["directory"]).record()
        assert record
        return read_config(RunConfig, record.config)

    def read_text(self, name: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return Path(self.tracking.client.download_artifacts(self.run_id, name, folder)).read_text()

    def history(self, metric: str) -> list[tuple[int, float]]:
        """Returns (images seen, value), in the order of images."""
        rows = self.tracking.client.get_metric_history(self.run_id, metric)
        return sorted((row.step, row.value) for row in rows)


def find_sweep(tracking: Tracking, name: str) -> RunInfo:
    """Returns the newest run of a sweep with that name."""
    found = _search(tracking, f"tags.role = 'sweep' and attributes.run_name = '{name}'", NEWEST)
    return next(found)


def find_run(tracking: Tracking, run_id: str) -> RunInfo:
    return _info(tracking, tracking.client.get_run(run_id))


def children(tracking: Tracking, parent_run_id: str) -> list[RunInfo]:
    """Returns the trials of a sweep, oldest first."""
    found = _search(tracking, f"tags.`mlflow.parentRunId` = '{parent_run_id}'", OLDEST)
    return [run for run in found if "trial" in run.tags]


def newest_of(tracking: Tracking, directory: str) -> RunInfo | None:
    return next(_search(tracking, f"tags.directory = '{directory}'", NEWEST), None)


def _search(tracking: Tracking, query: str, order: str) -> Iterator[RunInfo]:
    runs = tracking.client.search_runs([tracking.experiment_id], query, max_results=1000, order_by=[order])
    return (_info(tracking, run) for run in runs)


def _info(tracking: Tracking, run: Run) -> RunInfo:
    return RunInfo(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        status=run.info.status,
        tags=run.data.tags,
        params=run.data.params,
        metrics=run.data.metrics,
        start_s=run.info.start_time / 1000,
        end_s=run.info.end_time / 1000 if run.info.end_time else None,
        tracking=tracking,
    )
