"""Files of JSON lines that grow while a run trains: its reports (`metrics.jsonl`), the load of the machine.

On S3, which cannot append, a file is a series of numbered segments: metrics-000001.jsonl and so on.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.training.run_directory import run_directory

Metrics = dict[str, float]

METRICS, LOG, SYSTEM = "metrics", "log", "system"  # names of line files
SEGMENT_S = 10.0  # between uploads of a line file to S3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One report. Images seen are the axis of charts; `time_s` is seconds since the epoch."""

    step: int
    images: int
    time_s: float
    metrics: Metrics


class LineWriter:
    """Appends JSON lines to `name` in a directory. One process writes at a time.

    On a local path a line is in the file when `append` returns, and on the disk after `flush`. On S3 it is
    there after `flush`, which `append` calls every `SEGMENT_S` seconds.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._directory, self._name = directory, name
        self._waiting = b""
        self._flushed_s = time.monotonic()
        self._file = -1
        if storage.is_local(directory):
            storage.make_folder(directory)
            path = storage.join(directory, f"{name}.jsonl").removeprefix("file://")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            with open(path, "rb") as file:  # a killed writer may have left half a line
                os.ftruncate(self._file, file.read().rfind(b"\n") + 1)
        else:
            self._number = len(_segments(directory, name))

    def append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        if self._file >= 0:
            if os.write(self._file, line) < len(line):
                raise OSError(f"no space left for {self._name}.jsonl in {self._directory}")
            return
        self._waiting += line
        if time.monotonic() - self._flushed_s > SEGMENT_S:
            self.flush()

    def flush(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
        elif self._waiting:
            self._number += 1
            path = storage.join(self._directory, f"{self._name}-{self._number:06d}.jsonl")
            try:
                storage.write_new(path, self._waiting)
            except FileExistsError:  # a worker that was taken for dead wrote it
                return self.flush()
            self._waiting, self._flushed_s = b"", time.monotonic()

    def close(self) -> None:
        self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LineReader:
    """Reads what a `LineWriter` has written, each line once."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory, self._name = directory, name
        self._offset = 0
        self._read: set[str] = set()

    def new(self) -> list[dict[str, Any]]:
        """Lines that came since the last call, whole ones only."""
        if not storage.is_local(self._directory):
            names = [n for n in _segments(self._directory, self._name) if n not in self._read]
            self._read.update(names)
            parts = [storage.read_bytes(storage.join(self._directory, n)) for n in names]
            return [json.loads(line) for part in parts for line in part.splitlines()]
        path = storage.join(self._directory, f"{self._name}.jsonl").removeprefix("file://")
        try:
            with open(path, "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _segments(directory: str, name: str) -> list[str]:
    return [n for n in storage.names(directory) if n.startswith(f"{name}-") and n.endswith(".jsonl")]


class MetricsWriter:
    """Writes the reports of a run to its directory."""

    def __init__(self, run: RunConfig) -> None:
        self._lines = LineWriter(run_directory(run), METRICS)
        self._batch_size = run.data.batch_size

    def resumed(self, step: int) -> None:
        """Takes back reports of steps after `step`, which are trained again."""
        self._lines.append({"resumed": step})

    def report(self, step: int, metrics: Metrics) -> None:
        row = Row(step=step, images=step * self._batch_size, time_s=time.time(), metrics=metrics)
        self._lines.append(asdict(row))

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


def rows_of(records: Iterable[dict[str, Any]]) -> list[Row]:
    """The reports that count, by step."""
    rows: dict[int, Row] = {}
    for record in records:
        if "resumed" in record:
            rows = {step: row for step, row in rows.items() if step <= record["resumed"]}
        else:
            rows[record["step"]] = Row(**record)
    return [rows[step] for step in sorted(rows)]


def read_metrics(directory: str) -> list[Row]:
    """The reports of a run, by step."""
    return rows_of(LineReader(directory, METRICS).new())
