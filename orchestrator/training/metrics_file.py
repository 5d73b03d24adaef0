"""Files of JSON lines that grow while a run trains: its reports (`metrics.jsonl`), its log, system metrics.

S3 cannot append, so a file there is a series of numbered segments: metrics-000001.jsonl and so on.
"""

import json
import os
import time
from collections.abc import Mapping
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
    """One report after `images` images; `time_s` counts from the epoch."""

    step: int
    images: int
    time_s: float
    metrics: Metrics


class LineWriter:
    """Appends JSON lines to the file `name` of a directory. Only one process may write at a time.

    On a local path a line is in the file when `append` returns, and on the disk after `flush`. On S3 it is
    there after `flush`, which `append` calls every `SEGMENT_S` seconds.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._directory, self._name = directory, name
        self._waiting = b""
        self._flushed_s = time.monotonic()
        self._file = -1
        if not storage.is_local(directory):
            self._number = len(_segments(directory, name))
            return
        storage.make_folder(directory)
        self._file = os.open(_local_path(directory, name), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with open(self._file, "rb", closefd=False) as file:  # a killed writer may have written half a line
            os.ftruncate(self._file, file.read().rfind(b"\n") + 1)

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
        while self._waiting:
            self._number += 1
            path = storage.join(self._directory, f"{self._name}-{self._number:06d}.jsonl")
            try:
                storage.write_new(path, self._waiting)
            except FileExistsError:  # written by a worker that was taken for dead
                continue
            self._waiting, self._flushed_s = b"", time.monotonic()

    def close(self) -> None:
        self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LineReader:
    """Reads what `LineWriter` has written, each line once."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory, self._name = directory, name
        self._offset = 0
        self._read: set[str] = set()

    def new(self) -> list[dict[str, Any]]:
        """Returns the complete lines that were added since the last call."""
        if storage.is_local(self._directory):
            content = self._new_bytes()
        else:
            names = [n for n in _segments(self._directory, self._name) if n not in self._read]
            content = b"".join(storage.read_bytes(storage.join(self._directory, name)) for name in names)
            self._read.update(names)
        return [json.loads(line) for line in content.splitlines()]

    def _new_bytes(self) -> bytes:
        try:
            with open(_local_path(self._directory, self._name), "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return b""
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete


def _local_path(directory: str, name: str) -> str:
    return storage.join(directory, f"{name}.jsonl").removeprefix("file://")


def _segments(directory: str, name: str) -> list[str]:
    return [n for n in storage.names(directory) if n.startswith(f"{name}-") and n.endswith(".jsonl")]


class MetricsWriter(LineWriter):
    def __init__(self, run: RunConfig) -> None:
        super().__init__(run_directory(run), METRICS)
        self._batch_size = run.data.batch_size

    def resumed(self, step: int) -> None:
        """Takes back the reports of steps after `step`, which are trained again."""
        self.append({"resumed": step})

    def report(self, step: int, metrics: Metrics) -> None:
        row = Row(step=step, images=step * self._batch_size, time_s=time.time(), metrics=metrics)
        self.append(asdict(row))


def read_metrics(directory: str) -> list[Row]:
    """Returns the reports of a run that count, by step."""
    rows: dict[int, Row] = {}
    for record in LineReader(directory, METRICS).new():
        if "resumed" in record:
            rows = {step: row for step, row in rows.items() if step <= record["resumed"]}
        else:
            rows[record["step"]] = Row(**record)
    return [rows[step] for step in sorted(rows)]
