"""The runs that we write: one per directory, continued by whoever continues there."""

import json
import math
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from orchestrator import storage
from orchestrator.codec import flat, to_dict
from orchestrator.config import RunConfig
from orchestrator.tracking.find import CONFIG, Found
from orchestrator.tracking.known import BY_ID, KEY
from orchestrator.tracking.store import Tracking, shown

TAG_LENGTH = 5000  # of a tag that every MLflow takes whole
DIGEST_LENGTH = 36  # of a data set

Status = Literal["FINISHED", "FAILED", "KILLED"]


class TrackedRun:
    """A run with one writer. What it is told reaches MLflow soon, in this order. Attributes:
    key: names the run before MLflow does.
    batch_size: images per step, which is the axis of all metrics.
    began_s: seconds since the epoch.
    """

    def __init__(self, tracking: Tracking, key: str, *, batch_size: int = 1, began_s: int = 0) -> None:
        self.key = key
        self.batch_size = batch_size
        self.began_s = began_s
        self._outbox = tracking.outbox

    def run_id(self) -> str:
        """Waits until MLflow has the run. Raises UsageError if it refuses it."""
        return self.key.removeprefix(BY_ID) if self.key.startswith(BY_ID) else self._outbox.run_id(self.key)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics at `step`, on the axis of images seen; those that stand there or further on stay out.

        What is not finite never reaches the store, which knows no infinity: the run is tagged diverged.
        """
        self.log_at(step * self.batch_size, metrics)

    def log_at(self, place: int, metrics: Mapping[str, float]) -> None:
        """As `log`, but on an axis of their own."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.put("metrics", step=place, values=finite)
        if len(finite) < len(metrics):
            self.tag(diverged="true")

    def tag(self, **tags: str) -> None:
        self.put("tags", values={name: str(value) for name, value in tags.items()})

    def untag(self, *names: str) -> None:
        self.put("untag", names=names)

    def finish(self, status: Status) -> None:
        """A run that is FINISHED keeps no tag `error` of an earlier attempt."""
        self.put("finish", status=status)

    def write_text(self, name: str, text: str) -> None:
        """`name` may have folders."""
        self._outbox.put_file("file", self.key, name, lambda file: file.write_text(text, encoding="utf-8"))

    def write_file(self, path: Path, *, folder: str = "") -> None:
        """Copied: the caller may delete it. `folder`: of the artifacts."""
        name = str(PurePosixPath(folder) / path.name)
        self._outbox.put_file("file", self.key, name, lambda file: shutil.copyfile(path, file))

    def write_table(self, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """As MLflow's own tables, which its pages show. `name` ends in ``.json``."""
        rows = [[_cell(value) for value in row] for row in zip(*columns.values(), strict=True)]
        text = json.dumps({"columns": list(columns), "data": rows})
        self._outbox.put_file("table", self.key, name, lambda file: file.write_text(text, encoding="utf-8"))

    def put(self, op: str, **content: Any) -> None:
        """An entry of the outbox, as `delivery.py` knows them."""
        self._outbox.put(op, self.key, ms=_now_ms(), **content)


def track(
    tracking: Tracking, directory: str, name: str, *, batch_size: int = 1, tags: Mapping[str, str]
) -> TrackedRun:
    """The MLflow run of `directory`: the one that it had before, running again, or a new one.

    It is tagged with its `directory`, by which `close_orphans` finds it.
    """
    return _track(tracking, directory, name, batch_size=batch_size, tags=tags, first={}, parent=None)


def track_training(
    tracking: Tracking,
    run: RunConfig,
    directory: str,
    *,
    parent: TrackedRun | None = None,
    dataset: tuple[str, str] | None = None,
    **tags: str,
) -> TrackedRun:
    """`track` for training: with the flat config as params, and whole in tags, which rebuild the run.

    Both are those of the start: a resumed run may have other workers, but MLflow's params never change.

    `dataset`: its path and digest.
    """
    text = json.dumps(to_dict(run), separators=(",", ":"))
    parts = [text[i : i + TAG_LENGTH] for i in range(0, len(text), TAG_LENGTH)]
    tracked = _track(
        tracking,
        directory,
        run.name.rsplit("/", 1)[-1],
        batch_size=run.data.batch_size,
        tags=tags,
        first={f"{CONFIG}.{i}" if i else CONFIG: part for i, part in enumerate(parts)},
        parent=parent.key if parent else None,
    )
    if dataset:
        path, digest = dataset
        tracked.put(
            "dataset",
            name=path.rstrip("/").rsplit("/", 1)[-1],
            digest=digest[:DIGEST_LENGTH],
            path=path,
            source_type="local" if storage.is_local(path) else path.split("://")[0],
        )
    # last, for what follows goes out with them
    tracked.put("params", values={name: str(value) for name, value in flat(run).items()})
    return tracked


def writer(tracking: Tracking, found: Found) -> TrackedRun:
    """Of a run that is there, whoever made it; its status stays."""
    return TrackedRun(tracking, found.tags.get(KEY) or f"{BY_ID}{found.run_id}")


def _track(
    tracking: Tracking,
    directory: str,
    name: str,
    *,
    batch_size: int,
    tags: Mapping[str, str],
    first: Mapping[str, str],
    parent: str | None,
) -> TrackedRun:
    """`first`: tags that only a new run gets; `parent`: a run's key."""
    file, uri = storage.join(directory, "mlflow_run.json"), shown(tracking.uri)
    record = json.loads(storage.read_bytes(file)) if storage.size(file) else {}
    new = record.get("uri") != uri or "key" not in record
    if new:  # before MLflow hears of it: the next process asks for this key, whatever happens to this one
        record = {"uri": uri, "key": uuid.uuid4().hex, "began_s": int(time.time())}
        storage.write_bytes(file, json.dumps(record).encode())
    tracking.outbox.put(
        "start",
        record["key"],
        name=name,
        tags={**tags, "directory": directory},
        first=dict(first),
        parent=parent,
        new=new,
        process=tracking.outbox.process,
        ms=_now_ms(),
    )
    return TrackedRun(tracking, record["key"], batch_size=batch_size, began_s=record["began_s"])


def _now_ms() -> int:
    return int(1000 * time.time())


def _cell(value: Any) -> Any:
    """JSON knows no NaN, and no numbers of numpy's."""
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
