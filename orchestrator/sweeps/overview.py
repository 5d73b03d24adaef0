"""Lists the runs and sweeps of a storage, with their state, owner, result, cost and size."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.codec import read_config
from orchestrator.errors import UsageError
from orchestrator.frontier.points import as_shown
from orchestrator.names import RESERVED
from orchestrator.runs.lock import holder_of
from orchestrator.runs.measurements import HOST, JOB, USER
from orchestrator.runs.run_directory import CONFIG, LOCK, SWEEP, RunDir, read_json
from orchestrator.runs.state import State, state_of_run, state_of_sweep
from orchestrator.runs.sweep_directory import SUMMARY, SweepDir, SweepRecord
from orchestrator.tasks import TaskConfig
from orchestrator.tracking.registry import KNEE

READERS = 16  # directories that are read at the same time


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run or a sweep of a storage.

    Attributes:
        state: ``unreadable`` if its record is damaged.
        key: names this start of it.
        user, host, job: who began it, on which machine, and in which job of Ray; empty: not recorded.
        began_s: seconds since the epoch.
        arms_done, arms: of a sweep; an arm is done when all its seeds have ended.
        front: arms on the frontier of a sweep, by its last report; 0: there was none yet.
        knee: arm at the knee of that frontier.
        quality_name, quality: the best of that frontier, or of the results so far; None: no result.
        device_s, usd: spent so far; dollars are 0 where no price was known, and of runs outside sweeps.
        size: bytes of all its files.
    """

    name: str
    kind: Literal["run", "sweep"]
    state: State | Literal["unreadable"]
    key: str = ""
    user: str = ""
    host: str = ""
    job: str = ""
    began_s: float = 0.0
    arms_done: int = 0
    arms: int = 0
    front: int = 0
    knee: str = ""
    quality_name: str = ""
    quality: float | None = None
    device_s: float = 0.0
    usd: float = 0.0
    size: int = 0

    @property
    def age_s(self) -> float:
        return time.time() - self.began_s


def entries(root: str) -> list[Entry]:
    """Returns the runs and sweeps of a storage, the newest last. Lists each directory once, and reads none of
    its files twice.
    """
    names = [name for name in storage.names(root) if name not in RESERVED]
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(lambda name: _entry(storage.join(root, name), name), names)
        return sorted(filter(None, found), key=lambda entry: (entry.began_s, entry.name))


def _entry(directory: str, name: str) -> Entry | None:
    files = storage.files(directory)
    kind = "sweep" if SWEEP in files else "run" if CONFIG in files else None
    if kind is None:
        return None
    size = sum(files.values())
    try:
        return (_sweep if kind == "sweep" else _run)(directory, name, files, size)
    except (UsageError, TypeError, KeyError):  # of a record that is damaged, or of another version
        return Entry(name=name, kind=kind, state="unreadable", size=size)


def _sweep(directory: str, name: str, files: Mapping[str, int], size: int) -> Entry:
    own = SweepDir(directory)
    record = SweepRecord(**read_json(own.file(SWEEP)))  # as written: places are not asked for
    spent = read_json(own.spent) if "spent.json" in files else {}
    running = spent.get("running", [])
    trials = {name: of for name, of in record.trials.items() if of["role"] == "trial"}
    ended = {name for name, of in trials.items() if f"{of['directory']}/result.json" in files}
    arms = {of["arm"] for of in trials.values()}
    best = _of_summary(own.summary(), record) if SUMMARY in files else _so_far(own, record, ended)
    return Entry(
        name=name,
        kind="sweep",
        state=state_of_sweep(record, holder_of(directory) if LOCK in files else None),
        **_begun(record.key, record.labels, record.began_s),
        **best,
        arms_done=len(arms - {of["arm"] for name, of in trials.items() if name not in ended}),
        arms=len(arms),
        device_s=spent.get("device_s", 0.0) + sum(each["device_s"] for each in running),
        usd=spent.get("usd", 0.0) + sum(each.get("usd", 0.0) for each in running),
        size=size,
    )


def _of_summary(summary: Mapping[str, Any], record: SweepRecord) -> dict[str, Any]:
    metrics, prefix = summary["metrics"], "frontier/best/"
    qualities = {name.removeprefix(prefix): v for name, v in metrics.items() if name.startswith(prefix)}
    shown = [as_shown(name, value) for name, value in qualities.items()]
    quality_name, quality = shown[0] if shown else ("", None)
    knee = summary["aliases"].get(KNEE, {}).get("run")
    return {
        "front": int(metrics["frontier/points"]),
        "knee": record.trials[knee]["arm"] if knee else "",
        "quality_name": quality_name,
        "quality": quality,
    }


def _so_far(own: SweepDir, record: SweepRecord, ended: set[str]) -> dict[str, Any]:
    results = (own.trial(record.trials[name]).result() for name in sorted(ended))
    known = [r.metrics[record.quality] for r in results if r and r.status == "finished"]
    if not known:
        return {}
    quality_name, quality = as_shown(record.quality, max(known))
    return {"quality_name": quality_name, "quality": quality}


def _run(directory: str, name: str, files: Mapping[str, int], size: int) -> Entry:
    own, record = RunDir(directory), read_json(storage.join(directory, CONFIG))
    state, found = state_of_run(own, holder_of(directory) if LOCK in files else None)
    if found.result:
        metrics = found.result.metrics
    else:
        saved = manifests.newest_readable(own.checkpoints)
        metrics = {"cost/device_s": saved.progress["device_s"]} if saved else {}
    quality = ""
    with suppress(UsageError):  # the task of a plugin that is not loaded
        quality = read_config(TaskConfig, record["config"].get("task", {})).quality
    quality_name, shown = as_shown(quality, metrics[quality]) if quality in metrics else ("", None)
    return Entry(
        name=name,
        kind="run",
        state=state,
        **_begun(record["key"], record.get("labels", {}), record["began_s"]),
        quality_name=quality_name,
        quality=shown,
        device_s=metrics.get("cost/device_s", 0.0),
        size=size,
    )


def _begun(key: str, labels: Mapping[str, str], began_s: float) -> dict[str, Any]:
    who = {"user": USER, "host": HOST, "job": JOB}
    return {"key": key, "began_s": began_s, **{name: labels.get(tag, "") for name, tag in who.items()}}
