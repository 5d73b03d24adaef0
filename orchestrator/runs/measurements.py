"""What commands find out about trained models, in the directories of their runs and sweeps.

RUN/measurements/ID/record.json    one measurement: figures, tables, who made it, when, and on which data
RUN/measurements/ID/FILE           pages and pictures that belong to it

A measurement is written once and never replaced. It exists once its record does. Trackers follow.
"""

import getpass
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator import storage
from orchestrator.runs.run_directory import read_json

FOLDER, RECORD = "measurements", "record.json"
USER, HOST, JOB = "mlflow.user", "host", "ray.job_id"  # labels; the first is MLflow's own name

TableColumns = Mapping[str, Sequence[Any]]  # column -> values


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The content of `record.json`.

    Attributes:
        metrics: name -> value; names begin with the kind of the measurement, as ``eval/digits/val/step-40/``.
        tables: name of a JSON file -> the `table`.
        files: names of the files beside the record; they may lie in folders.
        data: name in `metrics` -> ``path`` and ``digest`` of a data set.
        labels: tags of the run in trackers.
        by: the user, the host, the job of Ray and the command.
        time_s: seconds since the epoch.
        id: the name of its folder; it is not written.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    data: dict[str, dict[str, str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    time_s: float = 0.0
    id: str = ""


def made_by() -> dict[str, str]:
    """Returns who runs this process: the user, the host, and the job if Ray has started it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    found = {USER: user, HOST: socket.gethostname()}
    config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    if job := config.get("metadata", {}).get("job_submission_id"):
        found[JOB] = job
    return found


def write_measurement(
    directory: str,
    metrics: Mapping[str, float],
    *,
    tables: Mapping[str, TableColumns] | None = None,
    files: Mapping[str, bytes] | None = None,
    data: Mapping[str, Mapping[str, str]] | None = None,
    labels: Mapping[str, str] | None = None,
    by: Mapping[str, str] | None = None,
) -> Measurement:
    """Writes a measurement to the directory of a run or a sweep, and returns it.

    `by`: further facts about who made it, such as the command.

    Raises:
        OSError: if it cannot be written; then nothing is recorded.
    """
    now = time.time()
    # Microseconds, because names are the order.
    when = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}.{int(now % 1 * 1e6):06}Z"
    written = Measurement(
        metrics={name: float(value) for name, value in metrics.items()},
        tables={name: table(columns) for name, columns in (tables or {}).items()},
        files=list(files or ()),
        data={name: dict(where) for name, where in (data or {}).items()},
        labels=dict(labels or {}),
        by={**made_by(), **(by or {})},
        time_s=now,
        id=f"{when}-{uuid.uuid4().hex[:8]}",
    )
    folder = storage.join(directory, FOLDER, written.id)
    storage.make_folder(folder)
    for name, content in (files or {}).items():
        storage.write_bytes(storage.join(folder, name), content)
    record = {name: value for name, value in asdict(written).items() if name != "id"}
    storage.write_bytes(storage.join(folder, RECORD), json.dumps(record, indent=1).encode())
    return written


def measurement_ids(directory: str) -> list[str]:
    """Returns the names of the folders of measurements, oldest first; the newest may not be complete."""
    return sorted(storage.names(storage.join(directory, FOLDER)))


def read_measurement(directory: str, name: str) -> Measurement | None:
    """Returns None if its record is not written yet."""
    content = read_json(storage.join(directory, FOLDER, name, RECORD))
    return Measurement(**content, id=name) if content is not None else None


def measurements(directory: str) -> list[Measurement]:
    """Returns all measurements of a run or a sweep, oldest first."""
    found = (read_measurement(directory, name) for name in measurement_ids(directory))
    return [each for each in found if each is not None]


def data_names(directory: str, data: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Names data sets, given as path -> digest: name -> ``path`` and ``digest``.

    A name is the last part of the path, or as many parts as distinguish it from other data that the run was
    measured on. Data that was moved keeps its name, because its digest is the same.
    """
    known = {name: where for each in measurements(directory) for name, where in each.data.items()}
    named = dict[str, dict[str, str]]()
    for path, digest in data.items():
        parts = [metric_name(part) for part in path.split("/") if part]
        tails = ["-".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        same = [n for n, where in known.items() if where["digest"] == digest and n not in named]
        same.sort(key=lambda n: known[n]["path"] != path)
        new = (tail for tail in [*tails, f"{tails[0]}-{digest[:8]}"] if tail not in known)
        name = same[0] if same else next(new)
        known[name] = named[name] = {"path": path, "digest": digest}
    return named


def metric_name(text: str) -> str:
    """Returns `text` as part of a metric's name: characters that MLflow does not allow become dashes."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def table(columns: TableColumns) -> dict[str, Any]:
    """Returns ``columns`` and ``data``, a list of rows. JSON has no NaN, and no numbers of numpy."""
    rows = [[_cell(value) for value in row] for row in zip(*columns.values(), strict=True)]
    return {"columns": list(columns), "data": rows}


def rows_of(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a `table` of numbers and text, each by column. What was not finite is NaN."""
    rows = ([math.nan if cell is None else cell for cell in row] for row in table["data"])
    return [dict(zip(table["columns"], row, strict=True)) for row in rows]


def _cell(value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
