"""Opens the store of a storage, and sets right what it shows as running although nothing runs any more."""

import logging
import os
from pathlib import Path

from mlflow.exceptions import MlflowException

from orchestrator import storage
from orchestrator.runs.state import State, directory_state
from orchestrator.tracking.find import KEY, SWEEP_KEY, record_of, unfinished
from orchestrator.tracking.store import Tracking, open_tracking, store_uri

log = logging.getLogger(__name__)

_ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "lost": "KILLED"}


def open_store(root: str, uri: str | None = None, experiment: str | None = None) -> Tracking:
    """The MLflow store of a storage, after `set_right`. A database on a disk has its files on a disk: in the
    storage, or beside itself, for MLflow knows other object storages than we do.

    Raises:
        UsageError: if it cannot be opened.
    """
    uri = store_uri(root, uri)
    at = storage.absolute(root) if storage.is_local(root) else os.path.dirname(uri.removeprefix("sqlite:///"))
    artifacts = Path(at, "mlartifacts").absolute().as_uri()  # in a plain path MLflow replaces %XX
    return set_right(open_tracking(uri, artifacts=artifacts, experiment=experiment))


def set_right(tracking: Tracking) -> Tracking:
    """Ends the runs in MLflow whose directories say that they have ended, or have lost their process, which
    it logs. A trial ends as its own directory says.

    It writes states alone: what else MLflow lacks is sent by the next command that works in the directory.
    Returns the same store.
    """
    states: dict[tuple[str, str], State | None] = {}
    for run in unfinished(tracking):
        tags = run.data.tags
        directory, key = tags.get("directory", ""), tags.get(KEY, "")
        if SWEEP_KEY in tags:
            directory, key = directory.rpartition("/")[0].rpartition("/")[0], tags[SWEEP_KEY]
        if (directory, key) not in states:
            states[directory, key] = state = _state(directory, key)
            if state == "lost":
                log.warning("%s is lost: its process was killed; the same command continues", directory)
        if (state := states[directory, key]) and state != "running":
            try:
                own = directory_state(tags["directory"]) if SWEEP_KEY in tags else state
                tracking.client.set_terminated(run.info.run_id, _ENDS.get(own or "lost", "KILLED"))
            except MlflowException:  # of another user
                continue
    return tracking


def _state(directory: str, key: str) -> State | None:
    """The state of a directory; None if it is not here, or is that of another run."""
    try:
        record = record_of(directory) if directory and key else None
        return directory_state(directory) if record and record.key == key else None
    except (OSError, ValueError):
        return None
