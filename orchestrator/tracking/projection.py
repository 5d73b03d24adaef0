"""Computes what trackers show of the directory of a run or a sweep."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from orchestrator import storage
from orchestrator.codec import flat
from orchestrator.costs import known_costs
from orchestrator.errors import UsageError, reason_of
from orchestrator.runs.measurements import (
    FOLDER,
    HOST,
    JOB,
    USER,
    Measurement,
    measurement_ids,
    measurements,
    read_measurement,
)
from orchestrator.runs.metrics_file import METRICS, SYSTEM, LineReader
from orchestrator.runs.run_directory import (
    BAD_IMAGES,
    ERROR,
    PROFILE,
    PROFILE_PICTURE,
    ROUTING,
    Result,
    RunDir,
    RunRecord,
    Status,
    read_json,
)
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord

FINGERPRINT = "data/fingerprint"  # a metric that becomes a tag
RUN_FILES = (BAD_IMAGES, PROFILE, PROFILE_PICTURE, ERROR)


class Scalar(NamedTuple):
    """A number of a run: `at` is images seen, or for the load of the machine and results seconds."""

    name: str
    value: float
    at: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The contents of a directory, apart from the reports.

    Attributes:
        key: names this start of the run or the sweep.
        parent: the key of the trial's sweep; else empty.
        metrics: results, at the time `ended_s`.
        note: a description in markdown.
        dataset: path and digest; None: there is none.
        files: names of files that belong to the run, below the directory; some may be missing.
        tables: names of JSON files -> ``columns`` and ``data``, a list of rows.
        measured: the ids of measurements.
    """

    directory: str
    key: str
    name: str
    parent: str = ""
    began_s: float
    status: Status
    ended_s: float
    tags: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    dataset: tuple[str, str] | None = None
    files: tuple[str, ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)
    result: Result | None = None
    pauses: tuple[Result, ...] = ()
    measured: tuple[str, ...] = ()

    def scalars(self) -> list[Scalar]:
        """Returns all numbers of a run, each once, by name in the order of their places.

        Raises:
            Unreadable: for files that cannot be read.
        """
        return ScalarReader(self.directory).new(self, {}) + self.measured_scalars()

    def measured_scalars(self) -> list[Scalar]:
        """Returns the finite figures of its measurements. Raises Unreadable as `scalars`."""
        with reading(self.directory):
            found = [read_measurement(self.directory, name) for name in self.measured]
        return [scalar for each in found if each for scalar in measured_scalars(each)]


class Unreadable(UsageError):
    """A file of a run cannot be read."""


@contextmanager
def reading(location: str) -> Iterator[None]:
    """Raises Unreadable for any error, which then is not one of the tracker."""
    try:
        yield
    except UsageError as error:
        raise Unreadable(str(error)) from error
    except Exception as error:
        raise Unreadable(f"{location} cannot be read: {reason_of(error)}") from error


class ScalarReader:
    """Reads the numbers of a run as they are reported, each once."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._reports, self._load = LineReader(directory, METRICS), LineReader(directory, SYSTEM)

    def new(self, of: Projection, last: Mapping[str, int]) -> list[Scalar]:
        """Returns what the run has reported since the last call, by name in the order of images.

        What is not finite, and what is not beyond `last`, the newest place of each name that the tracker has,
        is left out: a run that resumes repeats its numbers.

        Raises:
            Unreadable: for reports that cannot be read.
        """
        known, found = dict(last), list[Scalar]()

        def add(values: Mapping[str, float], *, at: int, time_s: float) -> None:
            for name, value in values.items():
                if math.isfinite(value) and known.get(name, -1) < at:
                    found.append(Scalar(name, float(value), at, time_s))
                    known[name] = at

        with reading(storage.join(self._directory, f"{METRICS}.jsonl")):
            rows = [row for row in self._reports.new() if "metrics" in row]
            load = self._load.new()
        for pause in of.pauses:  # an undisturbed run has no such report, so none of its rows says this
            images = pause.step * int(of.params["data.batch_size"])
            rows.append({"images": images, "time_s": pause.time_s, "metrics": pause.metrics})
        for row in sorted(rows, key=itemgetter("images")):
            charted = {n: v for n, v in row["metrics"].items() if n not in (*_constants(), FINGERPRINT)}
            add(charted, at=row["images"], time_s=row["time_s"])
        for row in load:
            add(row["metrics"], at=int(row["time_s"] - of.began_s), time_s=row["time_s"])
        add(of.metrics, at=int(of.ended_s), time_s=of.ended_s)
        return found


def _constants() -> list[str]:
    """Returns the metrics that never change, which become parameters."""
    return [metric for metric, cost in known_costs().items() if cost.constant]


def measured_scalars(of: Measurement) -> list[Scalar]:
    """Returns the finite figures of a measurement. The time of day is their place, so that a later
    measurement follows an earlier one.
    """
    return [
        Scalar(name, value, int(of.time_s), of.time_s)
        for name, value in of.metrics.items()
        if math.isfinite(value)
    ]


def project_trials(
    directory: str, sweep: SweepRecord, *, live: bool, wanted: Callable[[str, bool], bool]
) -> Iterator[Projection | Unreadable]:
    """Yields the trials of a sweep that have begun, or why one cannot be read. `wanted` is asked before a
    trial is read, with its directory and whether it is a member of the frontier.
    """
    members = set(SweepDir(directory).summary().get("pareto", ()))
    folders = {labels["directory"].rpartition("/")[0] for labels in sweep.trials.values()}
    begun = {(f, name) for f in folders for name in storage.names(storage.join(directory, f))}
    who = {tag: sweep.labels[tag] for tag in (USER, HOST, JOB) if tag in sweep.labels}
    for name, labels in sweep.trials.items():
        trial = SweepDir(directory).trial(labels)
        if labels["directory"].rpartition("/")[::2] not in begun or not wanted(trial.path, name in members):
            continue
        tags = {**who, **{k: v for k, v in labels.items() if k != "directory"}, "trial": name}
        try:
            with reading(trial.path):
                if (record := trial.record()) is None:
                    continue
                yield project_run(
                    trial.path,
                    record,
                    labels={**tags, "pareto": "true"} if name in members else tags,
                    live=live,
                    over=sweep.is_over,
                    quality=sweep.quality,
                    parent=sweep.key,
                )
        except Unreadable as error:
            yield Unreadable(f"trial {name}: {error}")


def project_run(
    directory: str,
    record: RunRecord,
    *,
    labels: Mapping[str, str],
    live: bool,
    over: bool = True,
    quality: str = "",
    parent: str = "",
) -> Projection:
    """`live`, `over`, `quality`: as of `RunDir.state`."""
    state = RunDir(directory).state(live=live, over=over, quality=quality)
    result = state.result
    tags = {**record.labels, **labels, "directory": directory}
    params = {name: str(value) for name, value in flat(record.config).items()}
    if result is not None:
        params |= {name: f"{result.metrics[name]:.10g}" for name in _constants() if name in result.metrics}
        if FINGERPRINT in result.metrics:
            tags["data_fingerprint"] = f"{result.metrics[FINGERPRINT]:.0f}"
        if result.best_checkpoint:
            tags["best_checkpoint"] = f"{directory}/{result.best_checkpoint}"
        if result.status == "diverged":
            tags |= {"diverged": "true", "error": f"diverged at step {result.step}"}
    elif state.pauses:
        tags["stopped" if state.status == "stopped" else "paused"] = str(state.pauses[-1].step)
    if state.status == "failed":
        tags["error"] = state.reason
    return Projection(
        directory=directory,
        key=record.key,
        name=str(record.config["name"]).rsplit("/", 1)[-1],
        parent=parent,
        began_s=record.began_s,
        status=state.status,
        ended_s=result.time_s if result else time.time(),
        tags=tags,
        params=params,
        dataset=(str(record.config["data"]["path"]), record.data_digest),
        files=RUN_FILES,
        tables={ROUTING: found} if (found := read_json(storage.join(directory, ROUTING))) else {},
        result=result,
        pauses=tuple(state.pauses),
        measured=tuple(measurement_ids(directory)),
    )


def project_sweep(directory: str, record: SweepRecord, *, live: bool) -> Projection:
    summary = SweepDir(directory).summary()
    ends: dict[str, Status] = {"finished": "finished", "failed": "failed"}
    tags = {
        **record.labels,
        "role": "sweep",
        "directory": directory,
        "objective.quality": record.quality,
        "objective.cost": record.cost,
        "seeds": str(max(1, len(record.seeds))),
        "val_images": str(record.val_images),
        **({"claims": "\n".join(record.claims)} if record.claims else {}),
        **({"reference": json.dumps(record.reference)} if record.reference else {}),
        **({"baselines": json.dumps(record.baselines)} if record.baselines else {}),
        **summary.get("tags", {}),
    }
    return Projection(
        directory=directory,
        key=record.key,
        # The name is that of the directory, also after --fresh has moved it aside.
        name="/".join(directory.split("/")[-1 - record.name.count("/") :]),
        began_s=record.began_s,
        status="running" if live else ends.get(record.status, "interrupted"),
        ended_s=summary.get("time_s", time.time()),
        tags=tags,
        metrics=summary.get("metrics", {}),
        note=summary.get("note", ""),
        dataset=(str(record.base["data"]["path"]), record.data_digest),
        files=tuple(summary.get("files", ())),
        tables=summary.get("tables", {}),
        measured=tuple(measurement_ids(directory)),
    )


def project_study(directory: str) -> Projection | None:
    """Returns what trackers show of a folder that holds measurements alone, as a study's; None if it does
    not.
    """
    if not (found := measurements(directory)):
        return None
    first = found[0]
    return Projection(
        directory=directory,
        key=first.id,
        name=directory.rpartition("/")[2],
        began_s=first.time_s,
        status="finished",
        ended_s=found[-1].time_s,
        tags={**first.by, "directory": directory},
        measured=tuple(each.id for each in found),
    )


def artifacts(of: Measurement, directory: str) -> dict[str, bytes]:
    """Returns the files and the tables of a measurement by name."""
    folder = storage.join(directory, FOLDER, of.id)
    contents = {name: json.dumps(table).encode() for name, table in of.tables.items()}
    return contents | {name: storage.read_bytes(storage.join(folder, name)) for name in of.files}
