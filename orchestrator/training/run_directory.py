"""The directory of a run or a sweep: the only record of what happened there.

    RUN/config.json           its config, the digest of its data, and a key that names this start of it
    RUN/metrics.jsonl         every report; on S3, which cannot append, metrics-000001.jsonl and so on
    RUN/checkpoints/step-N/   a checkpoint exists once its manifest does
    RUN/paused-N.json         how the run stood when it paused at step N
    RUN/result.json           how it ended
    RUN/error.txt             why its last attempt failed
    SWEEP/sweep.json          metrics to judge by, seeds, reference point, trials; its runs lie below it

A report is written before the checkpoint that contains it, so a run that resumes leaves no gap. The last line
of a step counts; a line ``{"resumed": n}`` takes back the lines before it of steps above n.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn

from orchestrator import storage
from orchestrator.codec import changed_fields, flat, to_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError, last_line

Mode = Literal["auto", "resume"]

CONFIG, SWEEP, RESULT, ERROR = "config.json", "sweep.json", "result.json", "error.txt"
LOCK = "lock"
STOP = "stop"  # its appearance asks the workers of a run to save and stop
UNTRAINED = (CONFIG, ERROR, LOCK, STOP, "refused.txt", "log.jsonl")  # files of attempts that trained nothing
DATA = "data.digest"
LEASE_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended, or where it paused.

    Attributes:
        metrics: as last reported.
        time_s: seconds since the epoch.
        checkpoint: the folder of its last checkpoint, relative to the run's directory; empty without one.
        weights: digest of that checkpoint's weights.
    """

    status: Literal["finished", "diverged", "paused"]
    step: int
    metrics: dict[str, float]
    time_s: float = 0.0
    checkpoint: str = ""
    weights: str = ""


def run_directory(run: RunConfig) -> str:
    return storage.join(run.storage, run.name)


def checkpoint_directory(run: RunConfig) -> str:
    return storage.join(run_directory(run), "checkpoints")


def result_of(run: RunConfig) -> Result | None:
    """None while the run is not complete."""
    return read_result(run_directory(run))


def pause_of(run: RunConfig, step: int) -> Result | None:
    """How the run stood when it paused at `step`; None if it did not."""
    return read_result(run_directory(run), f"paused-{step}.json")


def pauses_of(run: RunConfig) -> list[Result]:
    """All pauses of a run, by step."""
    return read_pauses(run_directory(run))


def read_pauses(directory: str) -> list[Result]:
    names = [name for name in storage.names(directory) if name.startswith("paused-")]
    found = [read_result(directory, name) for name in names]
    return sorted((pause for pause in found if pause), key=lambda pause: pause.step)


def read_result(directory: str, name: str = RESULT) -> Result | None:
    content = read_json(storage.join(directory, name))
    return Result(**content) if content is not None else None


def write_result(directory: str, result: Result) -> None:
    name = f"paused-{result.step}.json" if result.status == "paused" else RESULT
    write_json(storage.join(directory, name), asdict(result))


def read_error(directory: str) -> str:
    """The reason of the last failure in one line; empty if there was none."""
    path = storage.join(directory, ERROR)
    return last_line(storage.read_bytes(path).decode()) if storage.size(path) else ""


def write_error(directory: str, reason: str) -> None:
    """Records why a run failed, unless its own process has left a traceback."""
    path = storage.join(directory, ERROR)
    if storage.size(path) is None:
        storage.write_bytes(path, reason.encode())


def read_json(location: str) -> Any:
    """The content of a JSON file; None if there is no file. Raises UsageError if it is damaged."""
    if storage.size(location) is None:
        return None
    try:
        return json.loads(storage.read_bytes(location))
    except ValueError:
        raise UsageError(f"{location} is damaged: delete it to start over, or use another --name") from None


def write_json(location: str, content: Any) -> None:
    storage.write_bytes(location, json.dumps(content, indent=1).encode())


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of `config.json`.

    Attributes:
        key: names this start of the run; a run that starts over gets another.
        began_s: seconds since the epoch.
        config: the run, as `codec.to_dict` writes it.
        data_digest: digest of its data's manifest.
        labels: tags in MLflow, such as the role of a run that belongs to no sweep.
    """

    key: str
    began_s: float
    config: dict[str, Any]
    data_digest: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """The content of `sweep.json`.

    Attributes:
        key: names this start of the sweep; a sweep that starts over gets another.
        base: the run that every arm changes, as `codec.to_dict` writes it.
        data_digest: digest of the base's data.
        quality, cost: the metrics to maximise and to minimise, with their units in their names.
        seeds: every arm is trained once with each; none: once, with the base's seed.
        arms: name -> dotted changes of the base, those that a search has drawn among them.
        drawn: names of the arms that a search has drawn.
        reference: metric -> the worst value that hypervolumes count; measured costs follow once known.
        trials: name -> ``directory``, relative to the sweep's, and labels: role, arm, seed and so on.
        labels: further tags in MLflow.
        status: ``running`` until the command ends.
    """

    key: str
    name: str
    began_s: float
    base: dict[str, Any]
    data_digest: str
    quality: str
    cost: str
    seeds: list[int] = field(default_factory=list)
    trunk: dict[str, Any] | None = None
    claims: list[str] = field(default_factory=list)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    reference: dict[str, float] = field(default_factory=dict)
    trials: dict[str, dict[str, str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    status: Literal["running", "finished", "failed", "killed"] = "running"


def read_run(directory: str) -> RunRecord | None:
    """Raises UsageError if the record is damaged."""
    content = read_json(storage.join(directory, CONFIG))
    return RunRecord(**content) if content is not None else None


def read_sweep(directory: str) -> SweepRecord | None:
    """Raises UsageError if the record is damaged."""
    content = read_json(storage.join(directory, SWEEP))
    return SweepRecord(**content) if content is not None else None


def write_sweep(directory: str, record: SweepRecord) -> None:
    write_json(storage.join(directory, SWEEP), asdict(record))


def acquire_run_dir(
    run: RunConfig, data_digest: str, mode: Mode = "auto", labels: Mapping[str, str] | None = None
) -> RunRecord:
    """Makes the run's directory that of `run`.

    ``auto`` continues what is there if its config and data are the same, else starts; ``resume`` insists that
    something is there. A run that failed before it trained anything leaves its name free.

    Raises:
        UsageError: naming every field that changed; or that there is nothing to resume.
    """
    directory = run_directory(run)
    check_kind(directory, "run")
    now, was = to_dict(run), read_run(directory)
    if was is None:
        check_resumable(directory, mode)
    else:
        before = flat(was.config) | {DATA: was.data_digest}
        changes = changed_fields(before, json.loads(json.dumps(flat(now) | {DATA: data_digest})))
        if not changes:
            storage.delete(storage.join(directory, ERROR))
            return was
        if mode != "auto" or _trained(directory):
            raise_changed(directory, changes, run.data.path)
        for name in storage.names(directory):
            if name != LOCK:
                storage.delete(storage.join(directory, name))
    record = RunRecord(
        key=new_key(), began_s=time.time(), config=now, data_digest=data_digest, labels=dict(labels or {})
    )
    write_json(storage.join(directory, CONFIG), asdict(record))
    return record


def check_kind(directory: str, kind: Literal["run", "sweep"]) -> None:
    """Raises UsageError if the directory is that of another kind."""
    other, file = ("sweep", SWEEP) if kind == "run" else ("run", CONFIG)
    if storage.size(storage.join(directory, file)) is not None:
        raise UsageError(f"{directory} belongs to a {other}, and this is a {kind}: use another --name")


def check_resumable(directory: str, mode: Mode) -> None:
    """Raises UsageError for `--resume` where nothing is."""
    if mode == "resume":
        raise UsageError(f"nothing to resume at {directory}; leave out --resume to start")


def raise_changed(directory: str, changes: Mapping[str, tuple[Any, Any]], data: str) -> NoReturn:
    """Raises UsageError that names the changed fields: name -> (before, now)."""
    if DATA in changes and "data.path" not in changes:
        raise UsageError(
            f"the data at {data} changed since {directory} was started: use another --name, or --fresh to"
            " start over"
        )
    listed = "; ".join(f"{name}: {before!r} -> {after!r}" for name, (before, after) in changes.items())
    raise UsageError(
        f"{directory} was started with another config ({listed}); use another --name, or --fresh to start"
        " over"
    )


def move_aside(directory: str) -> str | None:
    """Renames what is there to a free name, and returns that name; None if nothing is there.

    Raises:
        UsageError: on S3, which has no rename.
    """
    if set(storage.names(directory)) <= {LOCK}:
        return None
    if not storage.is_local(directory):
        raise UsageError(f"--fresh cannot move {directory} aside: S3 has no rename; use another --name")
    aside = next(path for n in range(1, 1_000_000) if not os.path.exists(path := f"{directory}.old-{n}"))
    os.rename(directory, aside)
    return aside


def check_run_dir_visible(directory: str) -> None:
    """Raises UsageError where a worker does not see what its driver wrote."""
    if storage.size(storage.join(directory, CONFIG)) is None:
        raise UsageError(
            f"{socket.gethostname()} does not see {directory}: with several nodes use --storage"
            " s3://bucket/prefix, or a directory that every node mounts"
        )


@contextmanager
def locked(directory: str, *, fresh: bool = False) -> Iterator[str | None]:
    """Keeps other processes from the directory of a run or a sweep while the block lasts.

    With `fresh`, what is there is moved aside first, and the new name of it is yielded.

    A local directory is locked by the file system, so the lock ends with the process. On S3 the lock is an
    object that is renewed every `LEASE_S` / 3 and expires after `LEASE_S` seconds.

    Raises:
        UsageError: if another process works there.
    """
    aside = None
    if fresh:
        with locked(directory):
            aside = move_aside(directory)
    path = storage.join(directory, LOCK)
    storage.make_folder(directory)
    if storage.is_local(directory):
        with open(path.removeprefix("file://"), "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"another process works in {directory}: wait for it, or end it") from None
            yield aside
        return
    holder, ended = uuid.uuid4().hex, threading.Event()

    def lease() -> bytes:
        return json.dumps({"holder": holder, "host": socket.gethostname(), "time_s": time.time()}).encode()

    def renew() -> None:
        while not ended.wait(LEASE_S / 3):
            with suppress(OSError):  # the next one may arrive
                storage.write_bytes(path, lease())

    try:
        storage.write_new(path, lease())
    except FileExistsError:
        other = json.loads(storage.read_bytes(path))
        age_s = time.time() - other["time_s"]
        if age_s < LEASE_S:
            raise UsageError(
                f"a process on {other['host']} works in {directory}, or was killed {age_s:.0f} s ago: its"
                f" lock expires {LEASE_S:.0f} s after its last sign of life"
            ) from None
        storage.write_bytes(path, lease())
        time.sleep(1)  # of two processes that found it expired, the last to write has it
        if json.loads(storage.read_bytes(path))["holder"] != holder:
            raise UsageError(f"another process works in {directory}: wait for it, or end it") from None
    thread = threading.Thread(target=renew, daemon=True, name="lease")
    thread.start()
    try:
        yield aside
    finally:
        ended.set()
        thread.join()
        storage.delete(path)


def new_key() -> str:
    return uuid.uuid4().hex


def _trained(directory: str) -> bool:
    """Whether anything lies there but the records of an attempt that never trained, and Ray's own files."""
    return any(
        size > 0 and name not in UNTRAINED and not name.startswith("ray/")
        for name, size in storage.files(directory).items()
    )
