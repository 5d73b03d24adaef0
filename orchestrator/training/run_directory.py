"""The directory of a run or a sweep: the only record of what happened there.

    RUN/config.json           its config, the digest of its data, and a key that names this start of the run
    RUN/metrics.jsonl         every report; on S3, which cannot append, metrics-000001.jsonl and so on
    RUN/checkpoints/step-N/   a checkpoint exists once its manifest does
    RUN/paused-N.json         the state of the run when it paused at step N
    RUN/result.json           how it ended
    RUN/error.txt             why its last attempt failed
    RUN/plugins/              copies of the user's own files that its config needs
    SWEEP/sweep.json          objectives, seeds, reference point, trials; its runs lie below it

A report is written before the checkpoint that contains it, so a run that resumes leaves no gap. The last line
of a step counts; a line ``{"resumed": n}`` takes back the lines before it of steps above n.
"""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn

from moe.model import Model
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.models import load_checkpoint
from orchestrator.codec import changed_fields, flat, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError, last_line
from orchestrator.plugins import FOLDER, save_plugins

StartMode = Literal["auto", "resume"]

CONFIG, SWEEP, RESULT, ERROR = "config.json", "sweep.json", "result.json", "error.txt"
LOCK = "lock"
STOP = "stop"  # where this file appears, the workers of the run save and stop
REFUSED = "refused.txt"  # the error of a worker that the user can correct
UNTRAINED = (CONFIG, ERROR, LOCK, STOP, REFUSED, "log.jsonl")  # files of attempts that trained nothing
DATA = "data.digest"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended, or where it paused.

    Attributes:
        metrics: the last report.
        reason: why a run diverged; else empty.
        time_s: seconds since the epoch.
        checkpoint: folder of the last checkpoint, relative to the run's directory; empty if there is none.
        weights: digest of that checkpoint's weights.
        directory: the run's, as it was read from; it is not written.
    """

    status: Literal["finished", "diverged", "paused"]
    step: int
    metrics: dict[str, float] = field(repr=False)
    reason: str = ""
    time_s: float = field(default=0.0, repr=False)
    checkpoint: str = ""
    weights: str = field(default="", repr=False)
    directory: str = field(default="", repr=False, compare=False)

    def load(self) -> Model:
        """Returns the trained model in evaluation mode.

        Raises:
            UsageError: if the run has no checkpoint, or its weights are damaged.
        """
        if not self.checkpoint:
            raise UsageError(f"the run in {self.directory} is {self.status} and has no checkpoint to load")
        return load_checkpoint(storage.join(self.directory, self.checkpoint))


def run_directory(run: RunConfig) -> str:
    return storage.join(run.storage, run.name)


def checkpoint_directory(run: RunConfig) -> str:
    return storage.join(run_directory(run), "checkpoints")


def result_of(run: RunConfig) -> Result | None:
    """Returns None while the run is not complete."""
    return read_result(run_directory(run))


def pause_of(run: RunConfig, step: int) -> Result | None:
    """Returns the state of a run that paused at `step`; None if it did not."""
    return read_result(run_directory(run), f"paused-{step}.json")


def pauses_of(run: RunConfig) -> list[Result]:
    return read_pauses(run_directory(run))


def read_pauses(directory: str) -> list[Result]:
    """Returns all pauses of a run, by step."""
    names = [name for name in storage.names(directory) if name.startswith("paused-")]
    pauses = [read_result(directory, name) for name in names]
    return sorted((pause for pause in pauses if pause), key=lambda pause: pause.step)


def read_result(directory: str, name: str = RESULT) -> Result | None:
    content = read_json(storage.join(directory, name))
    return Result(**content, directory=directory) if content is not None else None


def write_result(directory: str, result: Result) -> None:
    name = f"paused-{result.step}.json" if result.status == "paused" else RESULT
    content = asdict(result)
    del content["directory"]
    write_json(storage.join(directory, name), content)


def read_error(directory: str) -> str:
    """Returns the reason of the last failure in one line; empty if there was none."""
    path = storage.join(directory, ERROR)
    return last_line(storage.read_bytes(path).decode()) if storage.size(path) else ""


def write_error(directory: str, reason: str) -> None:
    """Records why a run failed, unless its own process has written a traceback."""
    path = storage.join(directory, ERROR)
    if storage.size(path) is None:
        storage.write_bytes(path, reason.encode())


def read_json(location: str) -> Any:
    """Returns the content of a JSON file; None if there is no file. Raises UsageError if it is damaged."""
    if storage.size(location) is None:
        return None
    try:
        return json.loads(storage.read_bytes(location))
    except ValueError:
        raise UsageError(f"{location} is damaged: delete it to start over, or use another `name`") from None


def write_json(location: str, content: Any) -> None:
    storage.write_bytes(location, json.dumps(content, indent=1).encode())


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of `config.json`.

    Attributes:
        key: names this start of the run; a run that starts over gets another key.
        began_s: seconds since the epoch.
        config: the run, as `codec.to_dict` writes it.
        labels: tags in MLflow, such as the role of a run outside any sweep.
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
        key: names this start of the sweep; a sweep that starts over gets another key.
        base: the run that every arm changes, as `codec.to_dict` writes it.
        val_images: images of the val split of the base's data; 0 in records that do not know it.
        quality, cost: the metrics to maximise and to minimise, with their units in their names.
        seeds: every arm is trained with each; if empty, once, with the base's seed.
        arms: name -> dotted changes of the base.
        drawn: names of the arms that a search has drawn.
        reference: metric -> the worst value that hypervolumes count; measured costs are added once known.
        baselines: what is no arm of the sweep -> its quality, such as a linear classifier on pixels.
        passed: arms that early stopping passed by -> what each was expected to add, as a part of the
            hypervolume, and the cost that it still needed, as a part of the cost of all arms.
        trials: name -> ``directory``, relative to the sweep's, and labels: role, arm, seed and so on.
        labels: further tags in MLflow.
        plugins: those that its trials were made with.
        status: ``running`` until its trials have ended, or its command. ``interrupted`` if trials are left.
    """

    key: str
    name: str
    began_s: float
    base: dict[str, Any]
    data_digest: str
    quality: str
    cost: str
    val_images: int = 0
    seeds: list[int] = field(default_factory=list)
    trunk: dict[str, Any] | None = None
    claims: list[str] = field(default_factory=list)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    reference: dict[str, float] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)
    passed: dict[str, tuple[float, float]] = field(default_factory=dict)
    trials: dict[str, dict[str, str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)
    status: Literal["running", "finished", "failed", "interrupted"] = "running"

    def drawn_arms(self) -> dict[str, dict[str, Any]]:
        """Returns the arms that a search has drawn: name -> dotted changes of the base."""
        return {name: self.arms[name] for name in self.drawn}


def read_run(directory: str) -> RunRecord | None:
    content = read_json(storage.join(directory, CONFIG))
    return RunRecord(**content) if content is not None else None


def read_sweep(directory: str) -> SweepRecord | None:
    content = read_json(storage.join(directory, SWEEP))
    return SweepRecord(**content) if content is not None else None


def write_sweep(directory: str, record: SweepRecord) -> None:
    write_json(storage.join(directory, SWEEP), asdict(record))


def acquire_run_dir(
    run: RunConfig, data_digest: str, mode: StartMode = "auto", labels: Mapping[str, str] | None = None
) -> RunRecord:
    """Starts or continues `run` in its directory.

    ``auto`` continues a run that is there if its config and data are the same, and starts one otherwise;
    ``resume`` requires a run. The name of a run that failed before it trained anything can be used again.
    The config of the newest checkpoint must be the same too, and its checkpoints alone are a run.

    Raises:
        UsageError: naming every field that changed; or that there is nothing to resume.
    """
    directory = run_directory(run)
    check_kind(directory, "run")
    previous, saved = read_run(directory), manifests.newest_readable(checkpoint_directory(run))
    if not (previous or saved):
        check_resumable(directory, mode)
    changes: dict[str, tuple[Any, Any]] = {}
    for there in filter(None, (previous, saved)):
        try:
            before = read_config(RunConfig, there.config)  # a field that an old config lacks had its default
        except UsageError as error:
            raise UsageError(
                f"{directory} was started with a config that cannot be read ({error}); use another `name`,"
                " or `mode=fresh` to start over"
            ) from None
        lanes = {"data.lanes": before.lane_count()}  # which it keeps
        changes |= changed_fields(flat(before) | lanes, flat(run) | ({} if run.data.lanes else lanes))
    if previous and previous.data_digest != data_digest:
        changes[DATA] = previous.data_digest, data_digest
    if changes:
        if mode != "auto" or _trained(directory):
            raise_changed(directory, changes, run.data.path)
        for name in storage.names(directory):
            if name != LOCK:
                storage.delete(storage.join(directory, name))
    elif previous:
        storage.delete(storage.join(directory, ERROR))
        return previous
    record = RunRecord(
        key=new_key(),
        began_s=time.time(),
        config=to_dict(run),
        data_digest=data_digest,
        labels=dict(labels or {}),
    )
    save_plugins(directory, run.plugins)
    write_json(storage.join(directory, CONFIG), asdict(record))
    return record


def check_kind(directory: str, kind: Literal["run", "sweep"]) -> None:
    """Raises UsageError if the directory belongs to the other kind."""
    other, file = ("sweep", SWEEP) if kind == "run" else ("run", CONFIG)
    if storage.size(storage.join(directory, file)) is not None:
        raise UsageError(f"{directory} belongs to a {other}, and this is a {kind}: use another `name`")


def check_resumable(directory: str, mode: StartMode) -> None:
    if mode == "resume":
        raise UsageError(f"nothing to resume at {directory}; leave out `mode=resume` to start")


def raise_changed(directory: str, changes: Mapping[str, tuple[Any, Any]], data: str) -> NoReturn:
    """Raises a UsageError that names the changed fields, given as name -> (before, now)."""
    if DATA in changes and "data.path" not in changes:
        raise UsageError(
            f"the data at {data} changed since {directory} was started: use another `name`, or `mode=fresh`"
            " to start over"
        )
    # Other data has another digest, and the path says more than two digests.
    shown = {name: change for name, change in changes.items() if name != DATA}
    first = sorted(shown, key=lambda name: name != "data.path")
    listed = "; ".join("{}: {!r} -> {!r}".format(name, *shown[name]) for name in first)
    raise UsageError(
        f"{directory} was started with another config ({listed}); give the old values, use another `name`, or"
        " `mode=fresh` to start over"
    )


def move_aside(directory: str) -> str | None:
    """Renames the directory to a free name, and returns that name; None if it is empty.

    Raises:
        UsageError: on S3, which has no rename.
    """
    if set(storage.names(directory)) <= {LOCK}:
        return None
    if not storage.is_local(directory):
        raise UsageError(f"`mode=fresh` cannot move {directory} aside: S3 has no rename; use another `name`")
    aside = next(path for n in range(1, 1_000_000) if not os.path.exists(path := f"{directory}.old-{n}"))
    os.rename(directory, aside)
    return aside


def check_run_dir_visible(directory: str) -> None:
    """Raises UsageError on a worker's node that does not see what the driver wrote."""
    if storage.size(storage.join(directory, CONFIG)) is None:
        raise UsageError(
            f"{socket.gethostname()} does not see {directory}: with several nodes use `storage`"
            " s3://bucket/prefix, or a directory that every node mounts"
        )


def new_key() -> str:
    return uuid.uuid4().hex


def _trained(directory: str) -> bool:
    """Returns whether there is more than plugins, Ray's files and what attempts left that never trained."""
    return any(
        size > 0 and name not in UNTRAINED and not name.startswith(("ray/", f"{FOLDER}/"))
        for name, size in storage.files(directory).items()
    )
