"""Files of JSON lines that grow while a run trains: its reports (`metrics.jsonl`), its log, system metrics.

Object storages cannot append: a file there is a series of numbered segments, metrics-000001.jsonl and so on.
A directory that was copied from a disk to an object storage goes on with segments, and one that was copied
back goes on in the last of them: so the order of lines is that of the names, metrics.jsonl first.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.runs import notice
from orchestrator.runs.run_directory import RunDir

Metrics = dict[str, float]

log = logging.getLogger(__name__)
METRICS, LOG, SYSTEM = "metrics", "log", "system"  # names of line files
SEGMENT_S = 10.0  # between uploads of a line file to an object storage
POLL_S, S3_POLL_S = 0.2, 5.0  # between looks at what another process writes


def poll_s(directory: str) -> float:
    return POLL_S if storage.is_local(directory) else S3_POLL_S


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """One report after `images` images; `time_s` counts from the epoch."""

    step: int
    images: int
    time_s: float
    metrics: Metrics


class LineWriter:
    """Appends JSON lines to the file `name` of a directory. Only one process may write at a time; its threads
    may append and flush together.

    On a local path a line is in the file when `add` returns, and on the disk after `flush`. In an object
    storage it is there after `flush`, which `append` calls every `SEGMENT_S` seconds.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._directory, self._name = directory, name
        self._waiting: list[bytes] = []
        self._uploading = threading.Lock()
        self._flushed_s = time.monotonic()
        self._file = -1
        files = _files_of(directory, name)
        if not storage.is_local(directory):
            self._number = len([file for file in files if file != f"{name}.jsonl"])
            return
        storage.make_folder(directory)
        path = storage.join(directory, files[-1] if files else f"{name}.jsonl").removeprefix("file://")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with open(self._file, "rb", closefd=False) as file:  # a killed writer may have written half a line
            os.ftruncate(self._file, file.read().rfind(b"\n") + 1)

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds a line, in an object storage without writing it. Raises OSError if a local disk is full."""
        line = json.dumps(record).encode() + b"\n"
        if self._file < 0:
            self._waiting.append(line)
        elif (written := os.write(self._file, line)) < len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(f"no space left for {self._name}.jsonl in {self._directory}")

    def append(self, record: Mapping[str, Any]) -> None:
        self.add(record)
        if self._file < 0 and time.monotonic() - self._flushed_s > SEGMENT_S:
            self.flush()

    def flush(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
        with self._uploading:
            while self._waiting:
                lines = self._waiting[:]  # other threads may append meanwhile
                self._number += 1
                path = storage.join(self._directory, f"{self._name}-{self._number:06d}.jsonl")
                try:
                    storage.write_new(path, b"".join(lines))
                except FileExistsError:  # written by a worker that was taken for dead
                    continue
                del self._waiting[: len(lines)]
                self._flushed_s = time.monotonic()

    def close(self) -> None:
        self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LineReader:
    """Reads what `LineWriter` has written, each line once.

    A full disk or a power cut may leave half lines and zeros: they are left out, with a warning.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.directory, self._name = directory, name
        self._read: dict[str, tuple[int, int]] = {}  # file -> bytes, lines

    def new(self) -> list[dict[str, Any]]:
        """Returns the complete lines that were added since the last call."""
        return [record for path, first, content in self._new() for record in _records(path, first, content)]

    def _new(self) -> list[tuple[str, int, bytes]]:
        """Returns the path of each file with new lines, the number of its first new line, and these lines."""
        found = list[tuple[str, int, bytes]]()
        for name in _files_of(self.directory, self._name):
            path, (offset, lines) = storage.join(self.directory, name), self._read.get(name, (0, 0))
            if storage.is_local(path):
                with storage.open_to_read(path) as file:
                    file.seek(offset)
                    content = file.read()
            elif name in self._read:
                continue
            else:
                content = storage.read_bytes(path)
            complete = content[: content.rfind(b"\n") + 1]
            self._read[name] = offset + len(complete), lines + complete.count(b"\n")
            found.append((path, lines + 1, complete))
        return found


def _records(path: str, first: int, content: bytes) -> list[dict[str, Any]]:
    """Returns the JSON objects in the lines of `content`, and warns of other lines."""
    found, damaged = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], start=first):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            damaged.append(str(number))
    if damaged:
        listed = ", ".join(damaged[:3]) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")
        log.warning("%s: line %s was damaged by a full disk or a power cut, and is left out", path, listed)
    return found


def _files_of(directory: str, name: str) -> list[str]:
    """Returns the names of the files that hold the lines, in the order of the lines."""
    names = (n for n in storage.names(directory) if re.fullmatch(rf"{name}(-\d+)?\.jsonl", n))
    return sorted(names, key=lambda n: (n != f"{name}.jsonl", n))


class LogFile(logging.Handler):
    """Writes log lines to `log.jsonl` of a run's directory.

    A thread flushes them every `SEGMENT_S` seconds, so that training waits for no upload. A line that cannot
    be written does not end training: in an object storage it waits for the next flush.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._lines = LineWriter(directory, LOG)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._flush_by_time, daemon=True, name="log")
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.add({"time_s": time.time(), "line": self.format(record)})
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            self._lines.close()
        super().close()

    def _flush_by_time(self) -> None:
        while not self._ended.wait(SEGMENT_S):
            with suppress(OSError):
                self._lines.flush()


class MetricsWriter(LineWriter):
    def __init__(self, run: RunConfig) -> None:
        super().__init__(RunDir.of(run).path, METRICS)
        self._batch_size = run.data.batch_size

    def resumed(self, step: int) -> None:
        """Takes back the reports of steps after `step`, which are trained again."""
        self.append({"resumed": step})

    def report(self, step: int, metrics: Metrics) -> None:
        row = MetricsRow(step=step, images=step * self._batch_size, time_s=time.time(), metrics=metrics)
        self.append(asdict(row))


def asked_by(own: RunDir) -> Callable[[], bool]:
    """Returns a function to be called after each step: whether this process has got a notice, or the run's
    directory asks to stop. It looks there from time to time.
    """
    due, found = time.monotonic(), False

    def asked() -> bool:
        nonlocal due, found
        if not found and time.monotonic() > due:
            found = storage.size(own.stop) is not None
            due = time.monotonic() + poll_s(own.path)
        return found or notice.given()

    return asked


def read_metrics(directory: str) -> list[MetricsRow]:
    """Returns the reports of a run that count, by step."""
    rows: dict[int, MetricsRow] = {}
    for record in LineReader(directory, METRICS).new():
        if "resumed" in record:
            rows = {step: row for step, row in rows.items() if step <= record["resumed"]}
        else:
            rows[record["step"]] = MetricsRow(**record)
    return [rows[step] for step in sorted(rows)]
