"""The runs that are there, ours and those of other tools."""

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from orchestrator.codec import from_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.tracking.search import alike, all_runs
from orchestrator.tracking.store import Tracking, shown

CONFIG = "moe_frontier.config"  # tag: the config as JSON; what is too long for it follows in .1, .2, ..
OLDEST, NEWEST = "attributes.start_time ASC", "attributes.start_time DESC"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A run as MLflow has it. Attributes:
    metrics: the newest values.
    start_s, end_s: seconds since the epoch; None while it runs.
    url: its page, if a server shows one.
    """

    run_id: str
    name: str
    status: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    start_s: float
    end_s: float | None
    url: str | None
    tracking: Tracking = field(repr=False, compare=False)

    def config(self) -> RunConfig:
        """Raises UsageError if the run is none of ours, or of another version."""
        text, number = self.tags.get(CONFIG, ""), 1
        while part := self.tags.get(f"{CONFIG}.{number}"):
            text, number = text + part, number + 1
        if not text:
            raise UsageError(f"run {self.name} ({self.run_id}) has no config of ours in its tag {CONFIG}")
        return from_dict(RunConfig, json.loads(text))

    def read_text(self, name: str) -> str:
        """An artifact. Raises UsageError if there is none of that name."""
        with reading(self.tracking), tempfile.TemporaryDirectory() as folder:
            return Path(self.tracking.client.download_artifacts(self.run_id, name, folder)).read_text()

    def history(self, metric: str) -> list[tuple[int, float]]:
        """(images seen, value), in the order of images."""
        with reading(self.tracking):
            rows = self.tracking.client.get_metric_history(self.run_id, metric)
        return sorted((row.step, row.value) for row in rows)


def find_sweep(tracking: Tracking, name: str) -> Found:
    """The newest sweep of that name. Raises UsageError if there is none."""
    query = f"tags.role = 'sweep' and {alike('attributes.run_name', name)}"
    for run in _search(tracking, tracking.experiment_id, query, NEWEST):
        if run.name == name:
            return run
    raise UsageError(f"no sweep {name!r} at {shown(tracking.uri)}")


def children(tracking: Tracking, parent_run_id: str) -> list[Found]:
    """Runs of a sweep, oldest first."""
    query = f"tags.`mlflow.parentRunId` = '{parent_run_id}'"
    return list(_search(tracking, tracking.experiment_id, query, OLDEST))


def find_runs(tracking: Tracking, experiment: str, filter: str) -> list[Found]:
    """Of any tool's experiment, oldest first; `filter` as MLflow's search has it.

    Raises:
        UsageError: if there is no such experiment, or MLflow refuses the filter.
    """
    with reading(tracking):
        known = tracking.client.get_experiment_by_name(experiment)
    if known is None:
        raise UsageError(f"no experiment {experiment!r} at {shown(tracking.uri)}")
    return list(_search(tracking, known.experiment_id, filter, OLDEST))


def found_run(tracking: Tracking, run_id: str) -> Found:
    """Raises UsageError if there is no such run."""
    with reading(tracking):
        return _found(tracking, tracking.client.get_run(run_id))


def newest_of(tracking: Tracking, directory: str) -> Found | None:
    """The newest run of a directory of ours, as `runs.track` tags it; None if MLflow knows none."""
    query = alike("tags.directory", directory)
    found = _search(tracking, tracking.experiment_id, query, NEWEST)
    return next((run for run in found if run.tags["directory"] == directory), None)


def close_orphans(tracking: Tracking, directory: str, keep: Collection[str]) -> list[Found]:
    """Ends as KILLED what still runs of sweeps in `directory`, and of their children: nobody goes on there.

    `keep`: run ids of sweeps that somebody does go on with. Returns what was ended.
    """
    query = f"tags.role = 'sweep' and {alike('tags.directory', directory)}"
    sweeps = _search(tracking, tracking.experiment_id, query, OLDEST)
    ended = []
    for sweep in [s for s in sweeps if s.tags["directory"] == directory and s.run_id not in keep]:
        for run in [sweep, *children(tracking, sweep.run_id)]:
            if run.status == "RUNNING" and run.run_id not in keep:
                with reading(tracking):
                    tracking.client.set_terminated(run.run_id, "KILLED")
                ended.append(run)
    return ended


@contextmanager
def reading(tracking: Tracking) -> Iterator[None]:
    """What MLflow does not have, or a server that does not answer, is the user's to mend."""
    try:
        yield
    except (MlflowException, OSError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"MLflow at {shown(tracking.uri)}: {reason}") from None


def _search(tracking: Tracking, experiment_id: str, query: str, order: str) -> Iterator[Found]:
    with reading(tracking):
        runs = list(all_runs(tracking.client, experiment_id, query, order))
    return (_found(tracking, run) for run in runs)


def _found(tracking: Tracking, run: Run) -> Found:
    page = f"{tracking.uri.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    return Found(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        status=run.info.status,
        tags=run.data.tags,
        params=run.data.params,
        metrics=run.data.metrics,
        start_s=run.info.start_time / 1000,
        end_s=run.info.end_time / 1000 if run.info.end_time else None,
        url=page if tracking.uri.startswith("http") else None,
        tracking=tracking,
    )
