"""Computes what MLflow shows of the directory of a run or a sweep."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from orchestrator.codec import flat
from orchestrator.errors import UsageError, reason_of
from orchestrator.tracking.find import CONFIG, RunInfo
from orchestrator.training.run_directory import BAD_IMAGES, ERROR, PROFILE, Result, RunDir, RunRecord, Status
from orchestrator.training.sweep_directory import SweepDir, SweepRecord

CONSTANT = ("cost/params", "cost/forward_gflops_2mac")  # constant metrics, which become params
FINGERPRINT = "data/fingerprint"  # a metric that becomes a tag
REMOVABLE = ("error", "diverged", "paused", "stopped", "pareto", "data_fingerprint")  # tags
RUN_FILES = (BAD_IMAGES, PROFILE, ERROR)
TAG_LENGTH = 5000  # that every MLflow store accepts

MLflowStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

# MLflow's word for the status of a run; the tags `diverged` and `stopped` tell the rest.
STATUSES: dict[Status, MLflowStatus] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "diverged": "FAILED",
    "failed": "FAILED",
    "stopped": "KILLED",
    "interrupted": "KILLED",
}


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The contents of a directory's MLflow run, apart from the reports.

    Attributes:
        metrics: results, at the time `ended_s`.
        dataset: path and digest.
        files: names of artifacts, below the directory.
        tables: artifacts in the format of MLflow's tables: name -> columns and rows.
    """

    directory: str
    key: str
    name: str
    began_s: float
    status: MLflowStatus
    ended_s: float
    tags: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    dataset: tuple[str, str]
    files: tuple[str, ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)
    result: Result | None = None
    pauses: tuple[Result, ...] = ()


class Unreadable(UsageError):
    """A file of a run cannot be read."""


@contextmanager
def reading(location: str) -> Iterator[None]:
    """Raises Unreadable for any error, which then is not one of MLflow."""
    try:
        yield
    except UsageError as error:
        raise Unreadable(str(error)) from error
    except Exception as error:
        raise Unreadable(f"{location} cannot be read: {reason_of(error)}") from error


def status_of(run: RunInfo) -> Status:
    """Returns the status of a run from MLflow, as `project_run` has written it."""
    if "diverged" in run.tags:
        return "diverged"
    if "stopped" in run.tags:
        return "stopped"
    # The others are the last of their word.
    last: dict[str, Status] = {theirs: status for status, theirs in STATUSES.items()}
    return last[run.status]


def project_run(
    directory: str,
    record: RunRecord,
    *,
    labels: Mapping[str, str],
    live: bool,
    over: bool = True,
    quality: str = "",
) -> Projection:
    """`live`, `over`, `quality`: as of `RunDir.state`."""
    state = RunDir(directory).state(live=live, over=over, quality=quality)
    result = state.result
    tags = {**labels, "directory": directory}
    params = {name: str(value) for name, value in flat(record.config).items()}
    if result is not None:
        params |= {name: f"{result.metrics[name]:.10g}" for name in CONSTANT if name in result.metrics}
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
    text = json.dumps(record.config, separators=(",", ":"))
    parts = [text[i : i + TAG_LENGTH] for i in range(0, len(text), TAG_LENGTH)]
    tags |= {f"{CONFIG}.{i}" if i else CONFIG: part for i, part in enumerate(parts)}
    return Projection(
        directory=directory,
        key=record.key,
        name=str(record.config["name"]).rsplit("/", 1)[-1],
        began_s=record.began_s,
        status=STATUSES[state.status],
        ended_s=result.time_s if result else time.time(),
        tags=tags,
        params=params,
        dataset=(str(record.config["data"]["path"]), record.data_digest),
        files=RUN_FILES,
        result=result,
        pauses=tuple(state.pauses),
    )


def project_sweep(directory: str, record: SweepRecord, *, live: bool) -> Projection:
    summary = SweepDir(directory).summary()
    ends: dict[str, MLflowStatus] = {"finished": "FINISHED", "failed": "FAILED"}
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
    if note := summary.get("note"):
        tags[MLFLOW_RUN_NOTE] = note
    return Projection(
        directory=directory,
        key=record.key,
        # The name is that of the directory, also after --fresh has moved it aside.
        name="/".join(directory.split("/")[-1 - record.name.count("/") :]),
        began_s=record.began_s,
        status="RUNNING" if live else ends.get(record.status, "KILLED"),
        ended_s=summary.get("time_s", time.time()),
        tags=tags,
        metrics=summary.get("metrics", {}),
        dataset=(str(record.base["data"]["path"]), record.data_digest),
        files=tuple(summary.get("files", ())),
        tables=summary.get("tables", {}),
    )
