"""Entries of the outbox as requests to MLflow: as few as possible, and none that writes anything twice.

A run is created once, because it carries a key of ours as a tag and is searched by it whenever an earlier
attempt may have got through. A metric is written only past the newest step that the store has of it. What is
left (tags, params, status, files) can be said again.
"""

import json
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_LOGGED_ARTIFACTS, MLFLOW_PARENT_RUN_ID

from orchestrator.tracking.checkpoints import write_checkpoint
from orchestrator.tracking.journal import Entry
from orchestrator.tracking.known import BY_ID, KEY, Gone, Known, find_known

BATCHED = ("metrics", "params", "tags")
MOST_METRICS, MOST_PARAMS, MOST_TAGS = 800, 100, 100  # of a request: MLflow takes 1000 of all
REFUSED = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")
UNSURE = (TypeError, ValueError, LookupError, AttributeError, AssertionError)
MOST_ATTEMPTS = 8  # at what MLflow may refuse for good or for a moment: about half a minute

Item = Metric | Param | RunTag
# run -> its entries in order; those that are delivered are taken out
Pending = dict[str, deque[Entry]]
# called with what the server will never take, and its reason
Refuse = Callable[[dict[str, Any], str], None]


class Delivery:
    """Attributes:
    ids: key -> run id, of the runs that were started.
    refused: keys of runs that could not be.
    """

    def __init__(self, client: MlflowClient, experiment_id: str, *, process: str, folder: Path) -> None:
        """`process`, `folder`: of the outbox whose entries these are."""
        self.ids: dict[str, str] = {}
        self.refused: set[str] = set()
        self._client = client
        self._experiment_id = experiment_id
        self._process = process
        self._folder = folder
        self._known: dict[str, Known] = {}
        self._doubtful: set[str] = set()  # runs of which something may have got through unseen
        self._attempts = 0

    def deliver(self, pending: Pending, refuse: Refuse) -> None:
        """Empties `pending`; raises, with what is left in it, if the server does not answer."""
        for run in list(pending):
            try:
                self._deliver_run(run, pending[run], refuse)
            except Exception:
                self._attempts += 1
                self._known.pop(run, None)
                self._doubtful.add(run)
                raise
            del pending[run]

    def _deliver_run(self, run: str, entries: deque[Entry], refuse: Refuse) -> None:
        while entries:
            done = list(takewhile(lambda entry: entry["op"] in BATCHED, entries)) or [entries[0]]
            try:
                if done[0]["op"] in BATCHED:
                    self._write_batch(run, done, refuse)
                else:
                    getattr(self, f"_{done[0]['op']}")(done[0])
            except Exception as error:
                if not self._refuses(error):
                    raise
                if done[0]["op"] == "start":
                    self.refused.add(run)
                for entry in done:
                    refuse(entry, str(error))
            self._attempts = 0
            for _ in done:
                entries.popleft()

    def _refuses(self, error: Exception) -> bool:
        """Whether the server will never take it."""
        if isinstance(error, MlflowException):
            unsure, code = error.error_code == "BAD_REQUEST", error.error_code
            return code in REFUSED or (unsure and self._attempts >= MOST_ATTEMPTS)
        if isinstance(error, Gone | FileNotFoundError):
            return True
        return (
            isinstance(error, UNSURE) and not isinstance(error, OSError) and self._attempts >= MOST_ATTEMPTS
        )

    def _of(self, run: str) -> Known:
        if run not in self._known:
            known = find_known(self._client, self._experiment_id, run)
            if known is None:
                raise Gone("the run was deleted")
            self._known[run] = known
        return self._known[run]

    def _start(self, entry: Entry) -> None:
        run = entry["run"]
        sure = entry["new"] and entry["process"] == self._process and run not in self._doubtful
        known = None if sure else find_known(self._client, self._experiment_id, run)
        if known is None:
            tags = {**entry["first"], **entry["tags"], KEY: run}
            if entry["parent"] and (parent := self._id_of(entry["parent"])):
                tags[MLFLOW_PARENT_RUN_ID] = parent
            made = self._client.create_run(
                self._experiment_id, start_time=entry["ms"], tags=tags, run_name=entry["name"]
            )
            self._known[run] = Known(made)
        else:
            self._known[run] = known
            if known.status != "RUNNING":
                self._client.update_run(known.run_id, status="RUNNING")
            self._write(run, [], {}, entry["tags"], lambda *_: None)
        self.ids[run] = self._known[run].run_id

    def _id_of(self, run: str) -> str | None:
        if run not in self.ids:
            known = find_known(self._client, self._experiment_id, run)
            if known is None:
                return None
            self.ids[run] = known.run_id
        return self.ids[run]

    def _write_batch(self, run: str, entries: list[Entry], refuse: Refuse) -> None:
        last, metrics = dict(self._of(run).last), []
        params, tags = dict[str, str](), dict[str, str]()
        for entry in entries:
            if entry["op"] == "metrics":
                for name, value in entry["values"].items():
                    if last.get(name, -1) < entry["step"]:
                        metrics.append(Metric(name, value, entry["ms"], entry["step"]))
                        last[name] = entry["step"]
            else:
                (params if entry["op"] == "params" else tags).update(entry["values"])
        self._write(run, metrics, params, tags, refuse)

    def _write(
        self, run: str, metrics: list[Metric], params: dict[str, str], tags: dict[str, str], refuse: Refuse
    ) -> None:
        known = self._of(run)
        new_params = [Param(key, value) for key, value in params.items() if key not in known.params]
        new_tags = [RunTag(key, value) for key, value in tags.items() if known.tags.get(key) != value]
        while metrics or new_params or new_tags:
            items = [*new_params[:MOST_PARAMS], *metrics[:MOST_METRICS], *new_tags[:MOST_TAGS]]
            self._send(run, items, refuse)
            new_params, metrics = new_params[MOST_PARAMS:], metrics[MOST_METRICS:]
            new_tags = new_tags[MOST_TAGS:]

    def _send(self, run: str, items: list[Item], refuse: Refuse) -> None:
        """In one request; if it is refused, in two halves, until what is bad stands alone."""
        run_id = self._of(run).run_id
        try:
            self._client.log_batch(
                run_id,
                metrics=[item for item in items if isinstance(item, Metric)],
                params=[item for item in items if isinstance(item, Param)],
                tags=[item for item in items if isinstance(item, RunTag)],
            )
        except Exception as error:
            if not self._refuses(error):
                raise
            if self._client.get_run(run_id).info.lifecycle_stage != "active":
                raise Gone("the run was deleted") from error
            if len(items) == 1:
                return refuse({"op": type(items[0]).__name__, "run": run, **dict(items[0])}, str(error))
            self._send(run, items[: len(items) // 2], refuse)
            self._send(run, items[len(items) // 2 :], refuse)
        else:
            self._of(run).learn(items)

    def _untag(self, entry: Entry) -> None:
        known = self._of(entry["run"])
        for name in entry["names"]:
            if name in known.tags:
                self._client.delete_tag(known.run_id, name)
                del known.tags[name]

    def _finish(self, entry: Entry) -> None:
        if entry["run"] in self._doubtful and not entry["run"].startswith(BY_ID):
            self._known.pop(entry["run"], None)  # looks once more for a second one
        known = self._of(entry["run"])
        if entry["status"] == "FINISHED":
            self._untag({"run": entry["run"], "names": ["error"]})  # of an earlier attempt
        self._client.set_terminated(known.run_id, entry["status"], entry["ms"])
        known.status = entry["status"]

    def _file(self, entry: Entry) -> None:
        """`name` may have folders."""
        folder = str(Path(entry["name"]).parent)
        self._client.log_artifact(
            self._of(entry["run"]).run_id,
            str(self._folder / entry["file"]),
            None if folder == "." else folder,
        )

    def _table(self, entry: Entry) -> None:
        """MLflow lists tables in a tag, which its pages read."""
        self._file(entry)
        listed: list[dict[str, Any]] = json.loads(
            self._client.get_run(self._of(entry["run"]).run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")
        )
        table = {"path": entry["name"], "type": "table"}
        if table not in listed:
            self._client.set_tag(
                self._of(entry["run"]).run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*listed, table])
            )

    def _dataset(self, entry: Entry) -> None:
        known, name, digest = self._of(entry["run"]), entry["name"], entry["digest"]
        if (name, digest) not in known.datasets:
            source = json.dumps({"uri": entry["path"]})
            dataset = Dataset(name, digest, entry["source_type"], source)
            context = InputTag(MLFLOW_DATASET_CONTEXT, "training")
            self._client.log_inputs(known.run_id, [DatasetInput(dataset, [context])])
            known.datasets.add((name, digest))

    def _checkpoint(self, entry: Entry) -> None:
        write_checkpoint(self._client, self._experiment_id, self._of(entry["run"]).run_id, entry)
