"""The directory of a run: the only record of what happened there, and of what became of it.

    RUN/config.json, .toml    its config, the digest of its data, and a key that names this start of the run
    RUN/metrics.jsonl         every report; in an object storage metrics-000001.jsonl and so on
    RUN/checkpoints/step-N/   a checkpoint exists once its manifest does
    RUN/paused-N.json         the state of the run when it paused at step N
    RUN/result.json           how it ended
    RUN/error.txt             why its last attempt failed
    RUN/bad_images.csv, profile.csv    images that could not be read, and where the time of a step went
    RUN/routing.json          a table of what routers say of their layers and experts, at the last report
    RUN/plugins/              copies of the user's own files that its config needs

A report is written before the checkpoint that contains it, so a run that resumes leaves no gap. The last line
of a step counts; a line ``{"resumed": n}`` takes back the lines before it of steps above n.
"""

import json
import math
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NoReturn, Self

from moe.model import Model
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.models import load_checkpoint
from orchestrator.codec import changed_fields, flat, override, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.config_file import CONFIG_TOML, to_toml
from orchestrator.errors import UsageError, last_line
from orchestrator.plugins import FOLDER, save_plugins
from orchestrator.records import CONFIG, Move
from orchestrator.runs.contents import contents_of, moved

StartMode = Literal["auto", "resume"]

# running      it has begun, and the command that trains it or its sweep runs
# finished     it has reached its end, and its quality is known
# diverged     its loss was not finite
# failed       an exception, or a quality that is not finite
# stopped      it paused, and early stopping did not go on with it by the end of the sweep
# interrupted  it has begun, and none of the above: Ctrl-C, a kill, the end of the budget
Status = Literal["finished", "stopped", "interrupted", "diverged", "failed", "running"]

SWEEP, ERROR = "sweep.json", "error.txt"
BAD_IMAGES, PROFILE, PROFILE_PICTURE = "bad_images.csv", "profile.csv", "profile.png"
ROUTING = "routing.json"
LOCK, STOP, REFUSED = "lock", "stop", "refused.txt"
# files of attempts that trained nothing
UNTRAINED = (CONFIG, CONFIG_TOML, ERROR, LOCK, STOP, REFUSED, "log.jsonl")
DATA = "data.digest"


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended, or where it paused.

    Attributes:
        metrics: the last report.
        reason: why a run diverged; else empty.
        time_s: seconds since the epoch.
        checkpoint: folder of the last checkpoint, relative to the run's directory; empty if there is none.
        weights: digest of that checkpoint's weights.
        best_checkpoint, best_quality: the checkpoint of the best quality among those that are kept; empty and
            None if none of them was evaluated.
        directory: the run's, as it was read from; it is not written.
    """

    status: Literal["finished", "diverged", "paused"]
    step: int
    metrics: dict[str, float] = field(repr=False)
    reason: str = ""
    time_s: float = field(default=0.0, repr=False)
    checkpoint: str = ""
    weights: str = field(default="", repr=False)
    best_checkpoint: str = ""
    best_quality: float | None = None
    directory: str = field(default="", repr=False, compare=False)

    def load(self) -> Model:
        """Returns the trained model in evaluation mode.

        Raises:
            UsageError: if the run has no checkpoint, or its weights are damaged.
        """
        if not self.checkpoint:
            raise UsageError(f"the run in {self.directory} is {self.status} and has no checkpoint to load")
        return load_checkpoint(storage.join(self.directory, self.checkpoint))

    def better_checkpoint(self) -> str:
        """Names the best checkpoint and its quality if it is not the last; else empty."""
        if self.best_checkpoint in ("", self.checkpoint):
            return ""
        return f"{self.best_checkpoint}, {self.best_quality:.4g}"

    def unknown_quality(self, quality: str) -> str:
        """Says that the quality of a result or a pause is not finite; empty if it is, or the run diverged."""
        value = self.metrics.get(quality, math.nan)
        known = math.isfinite(value) or self.status == "diverged"
        return "" if known else f"{quality} is {value} at step {self.step}"


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
        config: the run, as `codec.to_dict` writes it; read with the name and the places of today.
        labels: tags in MLflow, such as the role of a run outside any sweep.
        contents: digests of what it read or started from, by the field that names the place.
    """

    key: str
    began_s: float
    config: dict[str, Any]
    data_digest: str
    labels: dict[str, str] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunState:
    """How far the run in a directory has come.

    Attributes:
        reason: why it failed; else empty.
        pauses: by step.
    """

    status: Status
    reason: str
    result: Result | None
    pauses: list[Result]


@dataclass(frozen=True)
class Directory:
    """The directory of a run or a sweep."""

    path: str

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """Returns the directory of a run, or of the sweep with that base."""
        return cls(storage.join(run.storage, run.name))

    def file(self, name: str) -> str:
        return storage.join(self.path, name)


class RunDir(Directory):
    """The directory of a run."""

    @property
    def checkpoints(self) -> str:
        return self.file("checkpoints")

    @property
    def stop(self) -> str:
        """Where this file appears, the workers of the run save and stop."""
        return self.file(STOP)

    def ask_to_stop(self, *, for_good: bool = False) -> None:
        """Lets the workers of the run save and stop; unless for good, they start again from there."""
        storage.write_bytes(self.stop, b"for good" if for_good else b"")

    def asked_for_good(self) -> bool:
        return bool(storage.size(self.stop))

    @property
    def refused(self) -> str:
        """The error of a worker that the user can correct."""
        return self.file(REFUSED)

    @property
    def error_file(self) -> str:
        return self.file(ERROR)

    @property
    def bad_images(self) -> str:
        return self.file(BAD_IMAGES)

    def record(self) -> RunRecord | None:
        if content := read_json(self.file(CONFIG)):
            content["config"] = Move(content["config"], self.path).config(content["config"])
        return RunRecord(**content) if content is not None else None

    def result(self) -> Result | None:
        """Returns None while the run is not complete."""
        return self._result("result.json")

    def pause(self, step: int) -> Result | None:
        """Returns the first pause of the run at `step` or later; None if there is none."""
        return next((pause for pause in self.pauses() if pause.step >= step), None)

    def pauses(self) -> list[Result]:
        """Returns all pauses, by step."""
        found = [self._result(name) for name in storage.names(self.path) if name.startswith("paused-")]
        return sorted((pause for pause in found if pause), key=lambda pause: pause.step)

    def _result(self, name: str) -> Result | None:
        content = read_json(self.file(name))
        return Result(**content, directory=self.path) if content is not None else None

    def write_result(self, result: Result) -> None:
        content = asdict(result)
        del content["directory"]
        name = f"paused-{result.step}.json" if result.status == "paused" else "result.json"
        write_json(self.file(name), content)

    def error(self) -> str:
        """Returns the reason of the last failure in one line; empty if there was none."""
        there = storage.size(self.error_file)
        return last_line(storage.read_bytes(self.error_file).decode()) if there else ""

    def write_error(self, reason: str) -> None:
        """Records why a run failed, unless its own process has written a traceback."""
        if storage.size(self.error_file) is None:
            storage.write_bytes(self.error_file, reason.encode())

    def state(self, *, live: bool, over: bool = True, quality: str = "") -> RunState:
        """Reads how far the run has come: for MLflow, the frontier and tables alike.

        Args:
            live: the command that trains there is running.
            over: the run's sweep has come to its end.
            quality: a metric without which a result or a pause is a failure; empty: none.
        """
        result, pauses = self.result(), self.pauses()
        last = result or (pauses[-1] if pauses else None)
        reason = last.unknown_quality(quality) if last and quality else ""
        status: Status
        if result and not reason:
            status = "finished" if result.status == "finished" else "diverged"
        elif reason := reason or self.error():
            status = "failed"
        elif live:
            status = "running"
        else:
            status = "stopped" if pauses and over else "interrupted"
        return RunState(status, reason, result, pauses)

    def check_visible(self) -> None:
        """Raises UsageError on a worker's node that does not see what the driver wrote."""
        if storage.size(self.file(CONFIG)) is None:
            raise UsageError(
                f"{socket.gethostname()} does not see {self.path}: with several nodes use `storage`"
                " s3://bucket/prefix (gs://, az://), or a directory that every node mounts"
            )


def acquire_run_dir(
    run: RunConfig, data_digest: str, mode: StartMode = "auto", labels: Mapping[str, str] | None = None
) -> RunRecord:
    """Starts or continues `run` in its directory.

    ``auto`` continues a run that is there if its config and data are the same, wherever they lie, and starts
    one otherwise; ``resume`` requires a run. The name of a run that failed before it trained anything can be
    used again. The config of the newest checkpoint must be the same too, and checkpoints alone are a run.

    Raises:
        UsageError: naming every field that changed; or that there is nothing to resume.
    """
    directory = (own := RunDir.of(run)).path
    check_kind(directory, "run")
    previous, saved = own.record(), manifests.newest_readable(own.checkpoints)
    if not (previous or saved):
        check_resumable(directory, mode)
    changes: dict[str, tuple[Any, Any]] = {}
    before = run
    for there in filter(None, (previous, saved)):
        try:
            config = Move(there.config, directory).config(there.config)
            before = read_config(RunConfig, config)  # a field that an old config lacks had its default
        except UsageError as error:
            raise UsageError(
                f"{directory} was started with a config that cannot be read ({error}); use another `name`,"
                " or `mode=fresh` to start over"
            ) from None
        lanes = {"data.lanes": before.lane_count()}  # which it keeps
        changes |= changed_fields(flat(before) | lanes, flat(run) | ({} if run.data.lanes else lanes))
    known = previous.contents | {"data.path": previous.data_digest} if previous else {}
    places = {name: changes.pop(name)[1] for name in moved(changes, known)}
    if previous and previous.data_digest != data_digest:
        changes[DATA] = previous.data_digest, data_digest
    if changes:
        if mode != "auto" or _trained(directory):
            raise_changed(directory, changes, run.data.path, _ways_to_go_on(own, before, changes))
        for name in storage.names(directory):
            if name != LOCK:
                storage.delete(storage.join(directory, name))
    elif previous:
        storage.delete(own.error_file)
        if places:
            now = override(read_config(RunConfig, previous.config), places)
            write_json(own.file(CONFIG), asdict(previous := replace(previous, config=to_dict(now))))
        return previous
    record = RunRecord(
        key=new_key(),
        began_s=time.time(),
        config=to_dict(run),
        data_digest=data_digest,
        labels=dict(labels or {}),
        contents=contents_of(flat(run)),
    )
    save_plugins(directory, run.plugins)
    storage.write_bytes(own.file(CONFIG_TOML), to_toml(run).encode())
    write_json(storage.join(directory, CONFIG), asdict(record))
    return record


def kind_of(directory: str) -> Literal["run", "sweep", ""]:
    """Returns what the directory is of; empty: neither."""
    if storage.size(storage.join(directory, SWEEP)) is not None:
        return "sweep"
    return "run" if storage.size(storage.join(directory, CONFIG)) is not None else ""


def check_kind(directory: str, kind: Literal["run", "sweep"]) -> None:
    """Raises UsageError if the directory belongs to the other kind."""
    if (other := kind_of(directory)) not in ("", kind):
        raise UsageError(f"{directory} belongs to a {other}, and this is a {kind}: use another `name`")


def check_resumable(directory: str, mode: StartMode) -> None:
    if mode == "resume":
        raise UsageError(f"nothing to resume at {directory}; leave out `mode=resume` to start")


def raise_changed(
    directory: str, changes: Mapping[str, tuple[Any, Any]], data: str, instead: str = ""
) -> NoReturn:
    """Raises a UsageError that names the changed fields, given as name -> (before, now), and what to do
    `instead`.
    """
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
        f" `mode=fresh` to start over{instead}"
    )


def _ways_to_go_on(own: RunDir, before: RunConfig, changes: Mapping[str, Any]) -> str:
    """Says how another run goes on where this one ended, if it would only be longer or have another rate."""
    if not changes or not {*changes} <= {"train.steps", "train.lr"}:
        return ""
    schedule, steps = before.train.schedule, before.train.steps
    warmup, cooldown = schedule.phases(steps)
    text = (
        ". To go on with what it has learned, give another `name` and train.init_from"
        f"={own.checkpoints} train.init_optimizer=true train.schedule.warmup_steps=0"
    )
    if "train.lr" in changes or schedule.knows_end:
        return text
    falls = steps - cooldown
    early = [step for step in manifests.steps(own.checkpoints) if step <= falls]
    if not early:
        return f"{text}; no checkpoint is left to branch from, of before its cooldown at step {falls}"
    trunk = manifests.folder_of(own.checkpoints, max(early))
    return (
        f"{text}; or branch from step {max(early)}, before its cooldown: train.trunk={trunk}"
        f" train.schedule.warmup_steps={warmup}"
    )


def new_key() -> str:
    return uuid.uuid4().hex


def _trained(directory: str) -> bool:
    """Returns whether there is more than plugins and what attempts left that never trained."""
    return any(
        size > 0 and name not in UNTRAINED and not name.startswith(f"{FOLDER}/")
        for name, size in storage.files(directory).items()
    )
