"""Runs, metrics, artifacts and models in MLflow. The only file that knows it; it knows no Ray.

Always `MlflowClient` with explicit ids: the fluent API's active run is per thread and makes stray runs. A
run's id lies in its own directory, so that a continued run is the same run in MLflow too.
"""

import http.client
import json
import logging
import math
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from safetensors.torch import load_model as load_safetensors
from safetensors.torch import save_model

from moe.vit import ViT
from orchestrator import storage
from orchestrator.codec import flat, from_dict, to_dict
from orchestrator.config import RunConfig, UsageError

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # one bar per file otherwise
logging.getLogger("mlflow").setLevel(logging.WARNING)

EXPERIMENT = "moe-frontier"
MODEL = "moe-frontier"


@dataclass(frozen=True, kw_only=True)
class Tracking:
    uri: str
    experiment_id: str


def open_tracking(uri: str, *, artifacts: str) -> Tracking:
    """Initialises the store, once and on the driver: processes that race to do it break each other.

    `artifacts`: where files go when the store is a local database.

    Raises:
        UsageError: if MLflow refuses the URI or nobody answers there.
    """
    if uri.startswith(("http://", "https://")):
        _check_alive(uri)
    try:
        client = MlflowClient(uri)
        known = client.get_experiment_by_name(EXPERIMENT)
        location = artifacts if uri.startswith("sqlite:") else None
        found = known.experiment_id if known else client.create_experiment(EXPERIMENT, location)
        return Tracking(uri=uri, experiment_id=found)
    except Exception as error:  # whatever its many back ends raise
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"MLflow refuses the tracking URI {uri}: {reason}") from None


def _check_alive(uri: str) -> None:
    """MLflow's own client retries for minutes before it says that there is no server."""
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=10)
    except urllib.error.HTTPError:
        return  # somebody answers; MLflow will say what is wrong
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UsageError(f"no MLflow server answers at {uri}: {error}") from None


class TrackedRun:
    """One MLflow run with one writer; it may be pickled to the process that writes."""

    def __init__(self, tracking: Tracking, run_id: str, *, batch_size: int) -> None:
        self.uri = tracking.uri
        self.run_id = run_id
        self.batch_size = batch_size
        self._written: dict[str, int] = {}  # metric -> images seen at its last value

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics at `step`, on the axis of images seen; not those that stand there already.

        What is not finite never reaches the store, which knows no infinity: the run is tagged diverged.
        """
        images, now = step * self.batch_size, int(1000 * time.time())
        if not self._written:
            self._written = self._last_images()
        fresh = {name: value for name, value in metrics.items() if self._written.get(name, -1) < images}
        finite = {name: value for name, value in fresh.items() if math.isfinite(value)}
        _client(self.uri).log_batch(
            self.run_id,
            metrics=[Metric(name, value, now, images) for name, value in finite.items()],
            tags=[RunTag("diverged", "true")] if len(finite) < len(fresh) else [],
        )
        self._written |= dict.fromkeys(finite, images)

    def tag(self, **tags: str) -> None:
        _client(self.uri).log_batch(self.run_id, tags=[RunTag(k, v) for k, v in tags.items()])

    def finish(self, status: str) -> None:
        """`status`: FINISHED or FAILED."""
        _client(self.uri).set_terminated(self.run_id, status)

    def write_text(self, name: str, text: str) -> None:
        _client(self.uri).log_text(self.run_id, text, name)

    def write_file(self, path: Path) -> None:
        _client(self.uri).log_artifact(self.run_id, str(path))

    def read_text(self, name: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return Path(_client(self.uri).download_artifacts(self.run_id, name, folder)).read_text()

    def _last_images(self) -> dict[str, int]:
        client = _client(self.uri)
        names = client.get_run(self.run_id).data.metrics
        return {name: max(m.step for m in client.get_metric_history(self.run_id, name)) for name in names}


def track(
    tracking: Tracking, directory: str, name: str, *, batch_size: int = 1, tags: Mapping[str, str]
) -> TrackedRun:
    """The MLflow run of `directory`: the one that it had before, running again, or a new one."""
    client, file = _client(tracking.uri), storage.join(directory, "mlflow_run.json")
    record = json.loads(storage.read_bytes(file)) if storage.size(file) else {}
    if record.get("uri") == tracking.uri and _is_active(client, record["run_id"]):
        run_id = record["run_id"]
        client.update_run(run_id, status="RUNNING")
    else:
        run_id = client.create_run(tracking.experiment_id, run_name=name).info.run_id
        storage.write_bytes(file, json.dumps({"uri": tracking.uri, "run_id": run_id}).encode())
    tracked = TrackedRun(tracking, run_id, batch_size=batch_size)
    tracked.tag(**tags)
    return tracked


def _is_active(client: MlflowClient, run_id: str) -> bool:
    """False for a run that somebody deleted, alone or with its store."""
    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException:
        return False


def track_training(
    tracking: Tracking, run: RunConfig, directory: str, *, parent: TrackedRun | None = None, **tags: str
) -> TrackedRun:
    """`track` for training: the flat config as params, and `config.json`, which rebuilds the run."""
    if parent:
        tags["mlflow.parentRunId"] = parent.run_id
    name = run.name.rsplit("/", 1)[-1]
    tracked = track(tracking, directory, name, batch_size=run.data.batch_size, tags=tags)
    client = _client(tracking.uri)
    # set once: a resumed run may have other workers, and MLflow params never change
    if not client.get_run(tracked.run_id).data.params:
        tracked.write_text("config.json", json.dumps(to_dict(run), indent=1))
        client.log_batch(tracked.run_id, params=[Param(k, str(v)) for k, v in flat(run).items()])
    return tracked


@dataclass(frozen=True, kw_only=True)
class Found:
    """A run as MLflow has it."""

    tracked: TrackedRun
    name: str
    status: str
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    url: str | None

    def config(self) -> RunConfig:
        return from_dict(RunConfig, json.loads(self.tracked.read_text("config.json")))


def find_sweep(tracking: Tracking, name: str) -> Found:
    """The newest sweep of that name. Raises UsageError if there is none."""
    query = f"tags.role = 'sweep' and attributes.run_name = '{name}'"
    found = _client(tracking.uri).search_runs([tracking.experiment_id], query, max_results=1)
    if not found:
        raise UsageError(f"no sweep {name!r} at {tracking.uri}")
    return _found(tracking, found[0])


def children(tracking: Tracking, parent: TrackedRun) -> list[Found]:
    """Runs of a sweep, oldest first."""
    query, order = f"tags.`mlflow.parentRunId` = '{parent.run_id}'", ["attributes.start_time ASC"]
    search = _client(tracking.uri).search_runs
    runs = search([tracking.experiment_id], query, max_results=50_000, order_by=order)
    return [_found(tracking, run) for run in runs]


def _found(tracking: Tracking, run: Run) -> Found:
    page = f"{tracking.uri.rstrip('/')}/#/experiments/{tracking.experiment_id}/runs/{run.info.run_id}"
    return Found(
        tracked=TrackedRun(tracking, run.info.run_id, batch_size=1),
        name=run.info.run_name or "",
        status=run.info.status,
        tags=run.data.tags,
        metrics=run.data.metrics,
        url=page if tracking.uri.startswith("http") else None,
    )


def register_model(tracked: TrackedRun, model: ViT, run: RunConfig, *, alias: str) -> str:
    """Keeps config and weights with the run and registers them as the newest version; its number."""
    client = _client(tracked.uri)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, f"{folder}/model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(to_dict(run), indent=1))
        client.log_artifacts(tracked.run_id, folder, "model")
    if not client.search_registered_models(f"name = '{MODEL}'"):
        client.create_registered_model(MODEL)
    version = client.create_model_version(MODEL, f"runs:/{tracked.run_id}/model", tracked.run_id).version
    client.set_registered_model_alias(MODEL, alias, version)
    return str(version)


def load_model(uri: str, tracking_uri: str | None = None) -> ViT:
    """The torch module behind ``models:/<name>@<alias>`` or ``models:/<name>/<version>``.

    Without `tracking_uri`, MLflow's own holds (MLFLOW_TRACKING_URI). Raises UsageError if there is none.
    """
    client = _client(tracking_uri or mlflow.get_tracking_uri())
    name = uri.removeprefix("models:/")
    try:
        if "@" in name:
            version = client.get_model_version_by_alias(*name.split("@", 1))
        else:
            version = client.get_model_version(*name.split("/", 1))
        run_id, path = str(version.source).removeprefix("runs:/").split("/", 1)
        with tempfile.TemporaryDirectory() as folder:
            files = Path(client.download_artifacts(run_id, path, folder))
            config = from_dict(RunConfig, json.loads((files / "config.json").read_text()))
            model = ViT(config.model)
            load_safetensors(model, files / "model.safetensors")
    except (MlflowException, TypeError) as error:
        raise UsageError(f"no model {uri} at {tracking_uri or mlflow.get_tracking_uri()}: {error}") from None
    return model.eval()


@lru_cache(maxsize=8)
def _client(uri: str) -> MlflowClient:
    return MlflowClient(uri)
