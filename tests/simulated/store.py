"""An MLflow store in memory: the requests that trackers make, with the meaning that they have in MLflow.

`tests/test_random_faults.py` compares it with the store in a database.
"""

import copy
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    LifecycleStage,
    Metric,
    Param,
    Run,
    RunData,
    RunInfo,
    RunInputs,
    RunStatus,
    RunTag,
)
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from mlflow.store.entities import PagedList

from orchestrator.tracking.store import Tracking

EXPERIMENT_ID = "1"
QUERY = re.compile(r"(?:tags\.`(?P<tag>.+)`|attributes\.(?P<attribute>\w+)) (?P<by>=|LIKE) '(?P<value>.*)'")


@dataclass
class _Stored:
    name: str
    start_ms: int
    status: str = "RUNNING"
    end_ms: int | None = None
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    rows: set[tuple[str, float, int, int]] = field(default_factory=set)  # name, value, time, step
    inputs: dict[tuple[str, str], DatasetInput] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    deleted: bool = False


class MemoryStore:
    """Has the methods of `MlflowClient` that our trackers call, but for models."""

    def __init__(self) -> None:
        self.runs: dict[str, _Stored] = {}

    def _run(self, run_id: str, *, active: bool = True) -> _Stored:
        if (run := self.runs.get(run_id)) is None:
            raise MlflowException(f"Run with id={run_id} not found", RESOURCE_DOES_NOT_EXIST)
        if active and run.deleted:
            raise MlflowException(f"The run {run_id} must be in the 'active' state", INVALID_PARAMETER_VALUE)
        return run

    def _entity(self, run_id: str) -> Run:
        run = self.runs[run_id]
        newest: dict[str, tuple[int, int, float]] = {}
        for name, value, time_ms, step in run.rows:
            newest[name] = max(newest.get(name, (-1, -1, 0.0)), (step, time_ms, value))
        return Run(
            RunInfo(
                run_id=run_id,
                experiment_id=EXPERIMENT_ID,
                user_id="",
                status=run.status,
                start_time=run.start_ms,
                end_time=run.end_ms,
                lifecycle_stage=LifecycleStage.DELETED if run.deleted else LifecycleStage.ACTIVE,
                run_name=run.name,
            ),
            RunData(
                [Metric(name, value, time_ms, step) for name, (step, time_ms, value) in newest.items()],
                [Param(*item) for item in run.params.items()],
                [RunTag(*item) for item in run.tags.items()],
            ),
            RunInputs(list(run.inputs.values())),
        )

    def get_experiment(self, experiment_id: str) -> None:
        """Is asked whether the store answers at all."""

    def get_run(self, run_id: str) -> Run:
        self._run(run_id, active=False)
        return self._entity(run_id)

    def search_runs(self, experiments: list[str], query: str, **_: Any) -> Any:
        asked = QUERY.fullmatch(query)
        assert asked, query
        found = []
        for run_id, run in self.runs.items():
            is_there = run.tags.get(asked["tag"]) if asked["tag"] else getattr(run, asked["attribute"])
            same = is_there is not None if asked["by"] == "LIKE" else is_there == asked["value"]
            if not run.deleted and same:
                found.append(run_id)
        found.sort(key=lambda run_id: self.runs[run_id].start_ms)
        return PagedList([self._entity(run_id) for run_id in found], None)

    def create_run(self, experiment_id: str, start_ms: int, tags: dict[str, str], name: str) -> Run:
        run_id = uuid.uuid4().hex
        self.runs[run_id] = _Stored(name, start_ms, tags={**tags, "mlflow.runName": name})
        return self._entity(run_id)

    def delete_run(self, run_id: str) -> None:
        self._run(run_id).deleted = True

    def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
        run = self._run(run_id)
        run.status = status or run.status
        if name:
            run.name = run.tags["mlflow.runName"] = name

    def set_terminated(self, run_id: str, status: str, end_ms: int | None = None) -> None:
        run = self._run(run_id)
        run.status, run.end_ms = status, end_ms
        assert status in RunStatus.all_status() or RunStatus.from_string(status)

    def log_batch(
        self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), synchronous: bool = True
    ) -> None:
        run = self._run(run_id)
        for param in params:
            if run.params.get(param.key, param.value) != param.value:
                raise MlflowException(f"Changing param values: {param.key}", INVALID_PARAMETER_VALUE)
        run.params |= {param.key: param.value for param in params}
        run.tags |= {tag.key: tag.value for tag in tags}
        run.rows |= {(m.key, m.value, m.timestamp, m.step) for m in metrics}

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self._run(run_id).tags[name] = value

    def delete_tag(self, run_id: str, name: str) -> None:
        if self._run(run_id).tags.pop(name, None) is None:
            raise MlflowException(f"No tag with name: {name}", RESOURCE_DOES_NOT_EXIST)

    def log_inputs(self, run_id: str, datasets: list[DatasetInput]) -> None:
        run = self._run(run_id)
        for each in datasets:
            found: Dataset = each.dataset
            run.inputs[found.name, found.digest] = copy.deepcopy(each)

    def log_artifact(self, run_id: str, path: str, parent: str | None = None) -> None:
        name = f"{parent}/{Path(path).name}" if parent else Path(path).name
        self._run(run_id).files[name] = Path(path).read_bytes()

    def get_metric_history(self, run_id: str, name: str) -> list[Metric]:
        rows = self._run(run_id, active=False).rows
        return [Metric(*row) for row in sorted(rows, key=lambda row: (row[2], row[3])) if row[0] == name]

    def download_artifacts(self, run_id: str, name: str, folder: str) -> str:
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(self._run(run_id, active=False).files[name])
        return str(file)


@dataclass(frozen=True)
class SimulatedTracking(Tracking):
    """A store behind a client that may fail."""

    requests: Any = None

    @property
    def client(self) -> MlflowClient:
        return self.requests
