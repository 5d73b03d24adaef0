"""Sends the directory of a run or a sweep to MLflow.

`Sync.update` asks MLflow what it has and sends what is missing, so any process may call it at any time, and
repeatedly: a run is found by the key in its directory, only steps after the newest step in MLflow are sent,
and the time of a report comes from its file, so MLflow's database stores it only once.
"""

import hashlib
import json
import logging
import math
import tempfile
import threading
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_LOGGED_ARTIFACTS,
    MLFLOW_PARENT_RUN_ID,
)

from orchestrator import storage
from orchestrator.errors import UsageError, reason_of
from orchestrator.tracking.find import KEY, SWEEP_KEY, find_by_tag, refuse_copy
from orchestrator.tracking.projection import (
    CONSTANT,
    FINGERPRINT,
    REMOVABLE,
    TAG_LENGTH,
    Projection,
    Unreadable,
    project_run,
    project_sweep,
    reading,
)
from orchestrator.tracking.registry import log_checkpoint, register
from orchestrator.tracking.store import Tracking, open_tracking, redact_uri
from orchestrator.training.metrics_file import METRICS, SYSTEM, LineReader
from orchestrator.training.run_directory import Result, RunDir
from orchestrator.training.sweep_directory import SweepDir, SweepRecord

log = logging.getLogger(__name__)

FILES = "moe_frontier.files"  # tag: artifact -> digest
PARAM_LENGTH, DIGEST_LENGTH = 6000, 36  # that every MLflow store accepts
MAX_ITEMS, MAX_FEW = 900, 100  # all items of a request; its tags, and its params
REFUSED = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "PERMISSION_DENIED")
LOST = "RESOURCE_DOES_NOT_EXIST"
EVERY_S = 5.0
PATIENCE_S = 30.0  # without progress of the last update, at the end of a command


class _Mirror:
    """The known contents of one MLflow run."""

    def __init__(self, run: Run, directory: str) -> None:
        self.run_id = run.info.run_id
        self.status = run.info.status
        self.began_s = run.info.start_time / 1000
        self.tags = dict(run.data.tags)
        self.params = set(run.data.params)
        self.last = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        inputs = run.inputs.dataset_inputs if run.inputs else []
        self.datasets = {(each.dataset.name, each.dataset.digest) for each in inputs}
        self.reports = LineReader(directory, METRICS)
        self.load = LineReader(directory, SYSTEM)
        self.complete: bool | None = None  # its end was sent, as a member of the frontier or not


class Sync:
    """Keeps MLflow's view of one directory up to date. Not thread-safe."""

    def __init__(self, tracking: Tracking, directory: str) -> None:
        self._tracking = tracking
        self._client = tracking.client
        self._directory = directory
        self._mirrors: dict[str, _Mirror] = {}
        self._refused: set[str] = set()
        self.sent = 0  # runs sent: rises while the server answers

    def update(self, *, live: bool = False) -> None:
        """Sends what MLflow lacks. `live`: the command that trains there is running.

        Everything is sent again if the server has lost it, or if the sweep's run was deleted there.

        Raises:
            UsageError: for files that cannot be read, once the other trials are sent; or as `check_original`.
            Exception: of any type, when a back end of MLflow does not answer.
        """
        try:
            self._update(live)
        except MlflowException as error:
            if error.error_code != LOST:
                raise
            self._forget()
            self._update(live)

    def _update(self, live: bool) -> None:
        if (sweep := SweepDir(self._directory).record()) is None:
            with reading(self._directory):
                if (record := RunDir(self._directory).record()) is None:
                    return
                labels = {"role": "train", **record.labels}
                wanted = project_run(self._directory, record, labels=labels, live=live)
            self._send(wanted)
            return
        known = self._mirrors.get(self._directory)
        if known and self._client.get_run(known.run_id).info.lifecycle_stage != "active":
            self._forget()
        self._find_all(sweep.key)
        projection = project_sweep(self._directory, sweep, live=live)
        if (parent := self._send(projection)) is None:
            return
        summary = SweepDir(self._directory).summary()
        members = set(summary.get("pareto", ()))
        folders = {labels["directory"].rpartition("/")[0] for labels in sweep.trials.values()}
        begun = {(f, name) for f in folders for name in storage.names(storage.join(self._directory, f))}
        unread = list[str]()
        for name, labels in sweep.trials.items():
            if labels["directory"].rpartition("/")[::2] not in begun:
                continue
            tags = {k: v for k, v in labels.items() if k != "directory"}
            tags |= {"trial": name, SWEEP_KEY: sweep.key, MLFLOW_PARENT_RUN_ID: parent.run_id}
            directory = SweepDir(self._directory).trial(labels).path
            try:
                self._update_trial(sweep, directory, tags, member=name in members, live=live)
            except Unreadable as error:
                unread.append(f"trial {name}: {error}")
        if summary and not live:
            self._register(sweep, projection.name, summary)
        if unread:
            raise UsageError("; ".join(unread))

    def _update_trial(
        self, sweep: SweepRecord, directory: str, tags: Mapping[str, str], *, member: bool, live: bool
    ) -> None:
        known = self._mirrors.get(directory)
        if known and known.complete == member:
            return
        with reading(directory):
            if (record := RunDir(directory).record()) is None:
                return
            wanted = project_run(
                directory,
                record,
                labels={**tags, "pareto": "true"} if member else tags,
                live=live,
                over=sweep.is_over,
                quality=sweep.quality,
            )
        mirror = self._send(wanted)
        if mirror and wanted.result is not None:
            mirror.complete = member

    def _forget(self) -> None:
        """Forgets what MLflow had."""
        if self._tracking.uri.startswith("http"):  # an empty server lacks the experiment too
            self._tracking = open_tracking(self._tracking.uri, artifacts="")
        self._mirrors.clear()
        self._refused.clear()

    def _find_all(self, key: str) -> None:
        """Finds all trials of a sweep with one search instead of one per trial."""
        if self._mirrors:
            return
        for run in find_by_tag(self._tracking, SWEEP_KEY, key):
            if directory := run.data.tags.get("directory"):
                self._mirrors.setdefault(directory, _Mirror(run, directory))

    def _send(self, wanted: Projection) -> _Mirror | None:
        """Returns None if MLflow refuses the run."""
        if wanted.key in self._refused:
            return None
        try:
            mirror = self._mirror(wanted)
            self._send_batches(mirror, wanted)
            self._send_dataset(mirror, wanted)
            if wanted.status != "RUNNING":
                self._send_files(mirror, wanted)
                if wanted.result is not None and wanted.result.checkpoint:
                    self._send_checkpoint(mirror, wanted, wanted.result)
            self._send_status(mirror, wanted)
        except Exception as error:
            self._mirrors.pop(wanted.directory, None)  # it is not known what arrived
            if not isinstance(error, MlflowException) or error.error_code not in REFUSED:
                raise
            self._refused.add(wanted.key)
            log.warning("MLflow refuses run %s: %s", wanted.name, reason_of(error))
            return None
        self.sent += 1
        return mirror

    def _mirror(self, wanted: Projection) -> _Mirror:
        known = self._mirrors.get(wanted.directory)
        if known is not None and known.tags.get(KEY) == wanted.key:
            return known
        found = find_by_tag(self._tracking, KEY, wanted.key)
        for empty in [run for run in found[1:] if not run.data.metrics and not run.data.params]:
            self._client.delete_run(empty.info.run_id)  # created by a request that seemed lost
        run = found[0] if found else self._create(wanted)
        if run.data.tags.get("directory", wanted.directory) != wanted.directory:
            refuse_copy(self._tracking, run, wanted.key, wanted.directory)
            self._client.update_run(run.info.run_id, name=wanted.name)
        self._mirrors[wanted.directory] = _Mirror(run, wanted.directory)
        return self._mirrors[wanted.directory]

    def _create(self, wanted: Projection) -> Run:
        tags = {KEY: wanted.key, **_cut(wanted.tags)}
        return self._client.create_run(
            self._tracking.experiment_id, int(1000 * wanted.began_s), tags, wanted.name
        )

    def _send_batches(self, mirror: _Mirror, wanted: Projection) -> None:
        tags = _cut(wanted.tags)
        new_tags = [RunTag(name, value) for name, value in tags.items() if mirror.tags.get(name) != value]
        params = [
            Param(name, value[:PARAM_LENGTH])
            for name, value in wanted.params.items()
            if name not in mirror.params
        ]
        with reading(storage.join(wanted.directory, f"{METRICS}.jsonl")):
            metrics = self._new_metrics(mirror, wanted)
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

    def _new_metrics(self, mirror: _Mirror, wanted: Projection) -> list[Metric]:
        last, found = dict(mirror.last), list[Metric]()

        def add(values: Mapping[str, float], *, at: int, time_s: float) -> None:
            for name, value in values.items():
                if math.isfinite(value) and last.get(name, -1) < at:
                    found.append(Metric(name, float(value), int(1000 * time_s), at))
                    last[name] = at

        rows = [row for row in mirror.reports.new() if "metrics" in row]
        for pause in wanted.pauses:  # an undisturbed run has no such report, so none of its rows says this
            images = pause.step * int(wanted.params["data.batch_size"])
            rows.append({"images": images, "time_s": pause.time_s, "metrics": pause.metrics})
        for row in sorted(rows, key=itemgetter("images")):
            charted = {n: v for n, v in row["metrics"].items() if n not in (*CONSTANT, FINGERPRINT)}
            add(charted, at=row["images"], time_s=row["time_s"])
        for row in mirror.load.new():
            add(row["metrics"], at=int(row["time_s"] - wanted.began_s), time_s=row["time_s"])
        add(wanted.metrics, at=int(wanted.ended_s), time_s=wanted.ended_s)
        return found

    def _send_dataset(self, mirror: _Mirror, wanted: Projection) -> None:
        path, digest = wanted.dataset
        name, digest = path.rstrip("/").rsplit("/", 1)[-1], digest[:DIGEST_LENGTH]
        if (name, digest) not in mirror.datasets:
            kind = "local" if storage.is_local(path) else path.split("://")[0]
            dataset = Dataset(name, digest, kind, json.dumps({"uri": path}))
            inputs = [DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, "training")])]
            self._client.log_inputs(mirror.run_id, inputs)
            mirror.datasets.add((name, digest))

    def _send_files(self, mirror: _Mirror, wanted: Projection) -> None:
        """Sends the artifacts whose content is new."""
        sent: dict[str, str] = json.loads(mirror.tags.get(FILES, "{}"))
        contents: dict[str, bytes] = {
            name: json.dumps(table).encode() for name, table in wanted.tables.items()
        }
        for name in wanted.files:
            path = storage.join(wanted.directory, name)
            with reading(path):
                if storage.size(path) is not None:
                    contents[name] = storage.read_bytes(path)
        digests = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.items()}
        if not (changed := [name for name in digests if sent.get(name) != digests[name]]):
            return
        with tempfile.TemporaryDirectory() as folder:
            for name in changed:
                file, parent = Path(folder, name), str(PurePosixPath(name).parent)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(contents[name])
                self._client.log_artifact(mirror.run_id, str(file), None if parent == "." else parent)
        tags = {FILES: json.dumps(sent | digests)}
        if wanted.tables:  # MLflow lists tables in a tag, which its pages read
            listed = [{"path": name, "type": "table"} for name in wanted.tables]
            tags[MLFLOW_LOGGED_ARTIFACTS] = json.dumps(listed)
        self._client.log_batch(mirror.run_id, tags=[RunTag(k, v) for k, v in tags.items()])
        mirror.tags |= tags

    def _send_checkpoint(self, mirror: _Mirror, wanted: Projection, result: Result) -> None:
        uri = storage.join(wanted.directory, result.checkpoint)
        if mirror.tags.get("checkpoint") != uri:
            step = result.step * int(wanted.params["data.batch_size"])
            finite = {name: v for name, v in result.metrics.items() if math.isfinite(v)}
            log_checkpoint(
                self._tracking,
                mirror.run_id,
                name=wanted.tags.get("trial", wanted.name),
                uri=uri,
                digest=result.weights,
                step=step,
                time_s=result.time_s,
                metrics=finite,
            )
            self._client.set_tag(mirror.run_id, "checkpoint", uri)
            mirror.tags["checkpoint"] = uri

    def _send_status(self, mirror: _Mirror, wanted: Projection) -> None:
        if mirror.status == wanted.status:
            return
        if wanted.status == "RUNNING":
            self._client.update_run(mirror.run_id, "RUNNING")
        else:
            self._client.set_terminated(mirror.run_id, wanted.status, int(1000 * wanted.ended_s))
        mirror.status = wanted.status

    def _register(self, sweep: SweepRecord, name: str, summary: Mapping[str, Any]) -> None:
        aliases: Mapping[str, Mapping[str, str]] = summary.get("aliases", {})
        models = {}
        for alias, model in aliases.items():
            trial = SweepDir(self._directory).trial(sweep.trials[model["run"]])
            if mirror := self._mirrors.get(trial.path):
                models[alias] = (mirror.run_id, {**model, "uri": trial.file(model["checkpoint"])})
        register(self._tracking, name, models, key=sweep.key, directory=self._directory)


def _cut(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value[:TAG_LENGTH] for name, value in tags.items()}


class BackgroundSync:
    """Updates MLflow every few seconds while the block lasts, and a last time at its end.

    A server that does not answer delays the end by `PATIENCE_S` at most: what it lacks is sent when it is
    back, or by the next command that works on the directory.
    """

    def __init__(self, tracking: Tracking, directory: str, say: Callable[[str], None] = log.warning) -> None:
        self._sync = Sync(tracking, directory)
        self._where = redact_uri(tracking.uri)
        self._directory = directory
        self._say = say
        self._end = threading.Event()
        self._down = ""
        self._thread = threading.Thread(target=self._work, daemon=True, name="mlflow-sync")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        sent = -1
        while self._thread.is_alive() and self._sync.sent > sent:
            sent = self._sync.sent
            self._thread.join(PATIENCE_S)
        if self._thread.is_alive() or self._down:
            why = f": {self._down}" if self._down else ""
            self._say(
                f"MLflow at {self._where} did not take all results{why}. They are in {self._directory};"
                " the same command, or jobs/report.py, sends them."
            )

    def _work(self) -> None:
        while not self._end.wait(EVERY_S):
            self._update(live=True)
        self._update(live=False)

    def _update(self, *, live: bool) -> None:
        try:
            self._sync.update(live=live)
        except Exception as error:  # MLflow's back ends raise many types
            if not self._down:
                what = "lacks results" if isinstance(error, UsageError) else "does not answer"
                log.warning("MLflow at %s %s: %s", self._where, what, reason_of(error))
            self._down = reason_of(error)
        else:
            if self._down:
                log.warning("MLflow at %s has all results again", self._where)
            self._down = ""
