"""Sends the directory of a run or a sweep to MLflow.

A run is found by the key in its directory, only steps after the newest step in MLflow are sent, and the time
of a report comes from its file, so MLflow's database stores it only once. Each item is sent on its own: what
MLflow refuses keeps nothing else back.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_LOGGED_ARTIFACTS,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NOTE,
)

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.output import redact_uri
from orchestrator.runs.lock import REPORT, InUse, locked
from orchestrator.runs.measurements import read_measurement
from orchestrator.runs.run_directory import Result, Status, kind_of
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.tracking.base import Follower, update_now
from orchestrator.tracking.find import KEY, SWEEP_KEY, find_by_tag, refuse_copy
from orchestrator.tracking.projection import (
    Projection,
    Scalar,
    ScalarReader,
    artifacts,
    measured_scalars,
    reading,
)
from orchestrator.tracking.store import Tracking, open_tracking

FILES = "moe_frontier.files"  # tag: artifact -> digest
MEASURED = "moe_frontier.measured."  # tags: this and the id of a measurement that was sent
REMOVABLE = ("error", "diverged", "paused", "stopped", "pareto", "data_fingerprint")  # tags
TAG_LENGTH, PARAM_LENGTH, DIGEST_LENGTH = 5000, 6000, 36  # that every MLflow store accepts
MAX_ITEMS, MAX_FEW = 900, 100  # all items of a request; its tags, and its params
LOST = "RESOURCE_DOES_NOT_EXIST"

# MLflow's word for the status of a run; the tags `diverged` and `stopped` tell the rest.
STATUSES: dict[Status, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "diverged": "FAILED",
    "failed": "FAILED",
    "stopped": "KILLED",
    "interrupted": "KILLED",
}


class _Mirror:
    """The known contents of one MLflow run."""

    def __init__(self, run: Run, directory: str) -> None:
        self.run_id = run.info.run_id
        self.status = run.info.status
        self.tags = dict(run.data.tags)
        self.params = set(run.data.params)
        self.last = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        inputs = run.inputs.dataset_inputs if run.inputs else []
        self.datasets = {(each.dataset.name, each.dataset.digest) for each in inputs}
        self.scalars = ScalarReader(directory)


class Sync(Follower):
    """Keeps MLflow's view of one directory up to date. Not thread-safe.

    Everything is sent again if the server has lost it, or if the sweep's run was deleted there.
    """

    def __init__(self, tracking: Tracking, directory: str) -> None:
        super().__init__(directory)
        self.where = f"MLflow at {redact_uri(tracking.uri)}"
        self._tracking = tracking
        self._client = tracking.client
        self._mirrors: dict[str, _Mirror] = {}
        self._again = False  # everything is sent a second time

    def update(self, *, live: bool = False, only: Collection[str] | None = None) -> list[str]:
        try:
            known = self._mirrors.get(self.directory)
            if known and SweepDir(self.directory).record() is not None:
                run = self._client.get_run(known.run_id)
                if run.info.lifecycle_stage != "active":
                    self._forget()
            return super().update(live=live, only=only)
        except MlflowException as error:
            if error.error_code != LOST:
                raise
        self._forget()
        self._again = True
        try:
            return super().update(live=live, only=only)
        finally:
            self._again = False

    def is_away(self, error: Exception) -> bool:
        lost = isinstance(error, MlflowException) and error.error_code == LOST and not self._again
        if lost or isinstance(error, ConnectionError):
            return True
        try:
            self._client.get_experiment(self._tracking.experiment_id)
        except MlflowException as answer:
            return answer.error_code in ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")
        except Exception:
            return True
        return False

    def send(self, shown: Projection) -> None:
        if not self.part(shown, "run", self._find, shown):
            return
        mirror = self._mirrors[shown.directory]
        try:
            if not self.part(shown, "metrics", self._send_batches, mirror, shown):
                mirror.scalars = ScalarReader(shown.directory)  # what was read is read again
            self.part(shown, "status", self._send_status, mirror, shown)
            if shown.dataset:
                self.part(shown, "dataset", self._send_dataset, mirror, *shown.dataset)
            if shown.status != "running":
                self.part(shown, "files", self._send_files, mirror, shown)
                if shown.result is not None and shown.result.checkpoint and self._tracking.has_models:
                    self.part(shown, "model", self._send_checkpoint, mirror, shown, shown.result)
            for name in shown.measured:
                if MEASURED + name not in mirror.tags:
                    self.part(shown, f"measurement {name}", self._send_measurement, mirror, shown, name)
        except Exception:
            self._mirrors.pop(shown.directory, None)  # it is not known what arrived
            raise

    def publish(self, sweep: Projection) -> None:
        record, summary = SweepDir(self.directory).record(), SweepDir(self.directory).summary()
        if record is None or not summary or not self._tracking.has_models:
            return
        import orchestrator.tracking.registry as registry

        models = {}
        for alias, model in summary.get("aliases", {}).items():
            trial = SweepDir(self.directory).trial(record.trials[model["run"]])
            if mirror := self._mirrors.get(trial.path):
                models[alias] = (mirror.run_id, {**model, "uri": trial.file(model["checkpoint"])})
        registry.register(self._tracking, sweep.name, models, key=record.key, directory=self.directory)

    def _forget(self) -> None:
        """Forgets what MLflow had."""
        if self._tracking.uri.startswith("http"):  # an empty server lacks the experiment too
            self._tracking = open_tracking(
                self._tracking.uri, artifacts="", experiment=self._tracking.experiment
            )
        self._mirrors.clear()
        self._complete.clear()
        self._missing.clear()

    def _find(self, shown: Projection) -> None:
        """Finds the run, or creates it. All trials of a sweep are found by one search."""
        if not self._mirrors and not shown.parent:
            for run in find_by_tag(self._tracking, SWEEP_KEY, shown.key):
                if directory := run.data.tags.get("directory"):
                    self._mirrors.setdefault(directory, _Mirror(run, directory))
        known = self._mirrors.get(shown.directory)
        if known is not None and known.tags.get(KEY) == shown.key:
            return
        found = find_by_tag(self._tracking, KEY, shown.key)
        for empty in [run for run in found[1:] if not run.data.metrics and not run.data.params]:
            self._client.delete_run(empty.info.run_id)  # created by a request that seemed lost
        run = found[0] if found else self._create(shown)
        if run.data.tags.get("directory", shown.directory) != shown.directory:
            refuse_copy(self._tracking, run, shown.key, shown.directory)
            self._client.update_run(run.info.run_id, name=shown.name)
        self._mirrors[shown.directory] = _Mirror(run, shown.directory)

    def _create(self, shown: Projection) -> Run:
        tags = {KEY: shown.key, **self._tags(shown)}
        return self._client.create_run(
            self._tracking.experiment_id, int(1000 * shown.began_s), tags, shown.name
        )

    def _tags(self, shown: Projection) -> dict[str, str]:
        tags = {name: value[:TAG_LENGTH] for name, value in shown.tags.items()}
        if shown.note:
            tags[MLFLOW_RUN_NOTE] = shown.note[:TAG_LENGTH]
        if shown.parent:
            if (parent := self._mirrors.get(self.directory)) is None:
                raise UsageError("MLflow has no run of its sweep")
            tags |= {SWEEP_KEY: shown.parent, MLFLOW_PARENT_RUN_ID: parent.run_id}
        return tags

    def _send_batches(self, mirror: _Mirror, shown: Projection) -> None:
        tags = self._tags(shown)
        new_tags = [RunTag(name, value) for name, value in tags.items() if mirror.tags.get(name) != value]
        params = [
            Param(name, value[:PARAM_LENGTH])
            for name, value in shown.params.items()
            if name not in mirror.params
        ]
        metrics = _rows(mirror.scalars.new(shown, mirror.last))
        while metrics or params or new_tags:
            some_params, some_tags = params[:MAX_FEW], new_tags[:MAX_FEW]
            room = MAX_ITEMS - len(some_params) - len(some_tags)
            self._client.log_batch(mirror.run_id, metrics[:room], some_params, some_tags)
            mirror.last |= {metric.key: metric.step for metric in metrics[:room]}
            mirror.params.update(param.key for param in some_params)
            mirror.tags |= {tag.key: tag.value for tag in some_tags}
            metrics, params, new_tags = metrics[room:], params[MAX_FEW:], new_tags[MAX_FEW:]
        for name in [name for name in REMOVABLE if name in mirror.tags and name not in tags]:
            self._client.delete_tag(mirror.run_id, name)
            del mirror.tags[name]

    def _send_dataset(self, mirror: _Mirror, path: str, digest: str) -> None:
        name, digest = path.rstrip("/").rsplit("/", 1)[-1], digest[:DIGEST_LENGTH]
        if (name, digest) not in mirror.datasets:
            kind = "local" if storage.is_local(path) else path.split("://")[0]
            dataset = Dataset(name, digest, kind, json.dumps({"uri": path}))
            inputs = [DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, "training")])]
            self._client.log_inputs(mirror.run_id, inputs)
            mirror.datasets.add((name, digest))

    def _send_files(self, mirror: _Mirror, shown: Projection) -> None:
        """Sends the files and tables whose content is new."""
        sent: dict[str, str] = json.loads(mirror.tags.get(FILES, "{}"))
        contents = {name: json.dumps(table).encode() for name, table in shown.tables.items()}
        for name in shown.files:
            path = storage.join(shown.directory, name)
            with reading(path):
                if storage.size(path) is not None:
                    contents[name] = storage.read_bytes(path)
        digests = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.items()}
        if changed := {name: contents[name] for name in digests if sent.get(name) != digests[name]}:
            tags = {FILES: json.dumps(sent | digests)}
            self._log_artifacts(mirror, changed, tags, tables=list(shown.tables))

    def _send_measurement(self, mirror: _Mirror, shown: Projection, name: str) -> None:
        folder = storage.join(shown.directory, name)
        with reading(folder):
            if (found := read_measurement(shown.directory, name)) is None:
                return  # it is being written
            contents = artifacts(found, shown.directory)
        metrics = _rows(measured_scalars(found))
        for i in range(0, len(metrics), MAX_ITEMS):
            self._client.log_batch(mirror.run_id, metrics[i : i + MAX_ITEMS])
        data = {f"eval.data.{name}": where["path"] for name, where in found.data.items()}
        self._log_artifacts(
            mirror, contents, {**data, **found.labels, MEASURED + name: found.id}, tables=list(found.tables)
        )

    def _log_artifacts(
        self, mirror: _Mirror, contents: Mapping[str, bytes], tags: dict[str, str], *, tables: list[str]
    ) -> None:
        """Sends files, then the tags that say so."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in contents.items():
                file, parent = Path(folder, name), str(PurePosixPath(name).parent)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
                self._client.log_artifact(mirror.run_id, str(file), None if parent == "." else parent)
        # MLflow lists tables in a tag, which its pages read.
        listed = json.loads(mirror.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        known = {entry["path"] for entry in listed}
        if new := [{"path": name, "type": "table"} for name in tables if name not in known]:
            tags = {**tags, MLFLOW_LOGGED_ARTIFACTS: json.dumps(listed + new)}
        self._client.log_batch(mirror.run_id, tags=[RunTag(k, v[:TAG_LENGTH]) for k, v in tags.items()])
        mirror.tags |= tags

    def _send_checkpoint(self, mirror: _Mirror, shown: Projection, result: Result) -> None:
        uri = storage.join(shown.directory, result.checkpoint)
        if mirror.tags.get("checkpoint") != uri:
            import orchestrator.tracking.registry as registry

            step = result.step * int(shown.params["data.batch_size"])
            finite = {name: v for name, v in result.metrics.items() if math.isfinite(v)}
            registry.log_checkpoint(
                self._tracking,
                mirror.run_id,
                name=shown.tags.get("trial", shown.name),
                uri=uri,
                digest=result.weights,
                step=step,
                time_s=result.time_s,
                metrics=finite,
            )
            self._client.set_tag(mirror.run_id, "checkpoint", uri)
            mirror.tags["checkpoint"] = uri

    def _send_status(self, mirror: _Mirror, shown: Projection) -> None:
        wanted = STATUSES[shown.status]
        if mirror.status == wanted:
            return
        if wanted == "RUNNING":
            self._client.update_run(mirror.run_id, wanted)
        else:
            self._client.set_terminated(mirror.run_id, wanted, int(1000 * shown.ended_s))
        mirror.status = wanted


def _rows(scalars: list[Scalar]) -> list[Metric]:
    return [Metric(s.name, s.value, int(1000 * s.time_s), s.at) for s in scalars]


def send(directory: str, store: Tracking, *, only: Collection[str]) -> str:
    """Sends MLflow what it lacks of a run, a sweep or the trials `only`; returns what it did not take, empty
    if it has all.
    """
    sync = Sync(store, directory)
    if not kind_of(directory):
        return update_now(sync)
    try:
        with locked(storage.join(directory, REPORT)), locked(directory):
            return update_now(sync, only)
    except InUse:
        return update_now(sync, only, live=True)
