"""Observations of a sweep whose trials end at once: their order, the frontier, the lines for the user."""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from orchestrator import tracking
from orchestrator.codec import override, to_dict
from orchestrator.costs import computed
from orchestrator.frontier.claims import check_claim
from orchestrator.frontier.frontier import Frontier
from orchestrator.runs.metrics_file import Metrics
from orchestrator.runs.run_directory import Result, RunDir
from orchestrator.sweeps import driver, run as sweep_run
from orchestrator.sweeps.build import sweep_frontier
from orchestrator.sweeps.driver import SweepOptions
from orchestrator.sweeps.queue import Job, TrialQueue
from orchestrator.sweeps.sweep import Sweep
from tests.made_directories import begin, end
from tests.orchestrator.effects import NUMBERS


def trials(sweep: Sweep, options: SweepOptions) -> dict[str, Any]:
    """Returns the trials that a sweep has."""
    found = sweep.trials().values()
    return {t.name: (to_dict(t.run), t.role, t.arm, t.after, t.labels(bool(sweep.seeds))) for t in found}


class _Watch(sweep_run.Watch):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def _ended(job: Job, metrics: Metrics) -> Result:
    run = job.trial.run
    if job.until < run.train.steps:
        return Result(status="paused", step=job.until, metrics=metrics)
    begin(run)
    values: dict[str, Any] = {name.replace("/", "__"): value for name, value in metrics.items()}
    end(run, job.until, **values)
    result = RunDir.of(run).result()
    assert result
    return result


def swept(sweep: Sweep, options: SweepOptions) -> dict[str, Any]:
    """Runs a sweep on a cluster of 4 CPUs, whose trials end at once: wide models are better."""
    root = Path(sweep.base.storage)
    asked: dict[str, Any] = {"order": [], "events": [], "together": 0}

    def run_jobs(queue: TrialQueue, hooks: Any) -> None:
        running: list[Job] = []
        while (job := queue.next()) or running:
            if job:
                hooks.began(job)
                running.append(job)
                asked["events"].append(("began", job.trial.name))
                asked["order"].append((job.trial.name, job.until))
                asked["together"] = max(asked["together"], len(running))
                continue
            job = running.pop(0)
            asked["events"].append(("ended", job.trial.name))
            width: Any = job.trial.run.model
            part = job.until / job.trial.run.train.steps
            values = computed(job.trial.run, job.until) | {"cost/device_s": 1.0}
            metrics = {"val/acc1": part * width.width / 100, "val/acc5": part * 8 / width.width}
            queue.done(job.trial.name, _ended(job, values | metrics))
        asked["judged"] = [(state.name, state.cost, state.reached) for state in queue.states.values()]

    def drawn(directory: str) -> Frontier:
        return sweep_frontier(directory)[0]

    watch, followed = _Watch(), list[Any]()
    store: Any = SimpleNamespace()
    patches: list[Any] = [
        patch.object(driver, "preflight", lambda *_, **given: asked.update(retrain=given["retrain"]) or []),
        patch.object(driver, "SAMPLED", 4),
        patch.object(driver, "publish", drawn),
        patch.object(driver, "following", lambda followers, *_: followed.extend(followers) or nullcontext()),
        patch.object(driver, "SystemMetrics", lambda *_: nullcontext()),
        patch.object(tracking, "check_original", lambda *_: None),
        patch.object(driver, "linear_baseline", lambda run: {}),
        *(
            patch.object(each, "Sync", lambda *_: SimpleNamespace(where="MLflow", update=lambda **_: []))
            for each in (driver, tracking)
        ),
        patch.object(driver, "complete_measurement", lambda *_, say, **_more: say("measures its arms")),
        patch.object(sweep_run, "most_resources", lambda: {"CPU": 4.0}),
        patch.object(sweep_run, "run_jobs", run_jobs),
    ]
    was = sorted(path.name for path in root.iterdir())
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        frontier = driver.run_sweep(sweep, options, progress=watch, store=store)
    record = json.loads(Path(RunDir.of(sweep.base).path, "sweep.json").read_text())
    found = sorted(path.name for path in root.iterdir())
    points = [(p.arm, p.cost, p.quality, p.status) for p in frontier.points]
    verdicts = [asdict(check_claim(claim, frontier.points)) for claim in frontier.claims]
    return asked | {
        "points": points,
        "verdicts": verdicts,
        "names": (frontier.quality_name, frontier.cost_name),
        "labels": record["labels"],
        "aside": len(found) - len(was),
        "said": watch.lines,
        "followed": [follower.where for follower in followed],
        "drawn": [record["arms"][name] for name in record["drawn"]],
    }


SWEEP: dict[str, Callable[[Sweep, SweepOptions], Any]] = {each.__name__: each for each in (trials, swept)}


_SEEN: dict[str, Any] = {}


def seen(effect: str, sweep: Sweep, options: SweepOptions) -> Any:
    """As `effects.observed`, of a sweep, in a copy of its storage."""
    name, _, part = effect.partition(":")
    if (key := f"{name} {sweep} {options}") not in _SEEN:
        _SEEN[key] = seen_anew(name, sweep, options)
    return _SEEN[key][part] if part else _SEEN[key]


def seen_anew(name: str, sweep: Sweep, options: SweepOptions) -> Any:
    folder = f"{sweep.base.storage}-{next(NUMBERS)}"
    shutil.copytree(sweep.base.storage, folder)
    try:
        found = SWEEP[name](replace(sweep, base=override(sweep.base, {"storage": folder})), options)
    finally:
        shutil.rmtree(folder)
    return json.loads(json.dumps(found, default=str).replace(folder, ""))
