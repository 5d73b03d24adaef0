"""Printed progress: a line for every report of a run; a bar or an occasional line for a running trial."""

import sys
import time
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from jobs.show import duration, ended_line, status_line
from orchestrator.config import RunConfig
from orchestrator.sweeps.queue import Job, Outcome
from orchestrator.sweeps.run import SweepRun, Watch
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.metrics_file import Metrics

EVERY_S = 20  # between lines about one trial, where there is no terminal
SHOWN = ("train/loss", "val/acc1", "perf/images_per_s", "data/wait_frac")


class RunProgress:
    """Steps over time since the first report, and when the last step will be done at that rate."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.images_per_s = 0.0
        self._first: tuple[int, float] | None = None
        self._last_s = 0.0

    def report(self, step: int, metrics: Metrics) -> None:
        self._last_s = time.monotonic()
        self._first = self._first or (step, self._last_s)
        self.step, self.images_per_s = step, metrics.get("perf/images_per_s", self.images_per_s)

    def left(self) -> str:
        """Time to the last step in words; empty before two reports, and at the end."""
        if self._first is None or not self._first[0] < self.step < self.steps:
            return ""
        step, began_s = self._first
        left_s = (self._last_s - began_s) / (self.step - step) * (self.steps - self.step)
        return f"about {duration(left_s)} left"

    def __str__(self) -> str:
        if not self.step:
            return "starting"
        parts = (f"step {self.step}/{self.steps}", f"{self.images_per_s:.4g} images/s", self.left())
        return ", ".join(filter(None, parts))


class StepLines:
    """A line for every report of a run."""

    def __init__(self, run: RunConfig) -> None:
        self._pace = RunProgress(run.train.steps)

    def show(self, step: int, metrics: Metrics) -> None:
        self._pace.report(step, metrics)
        values = [f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics]
        print("  ".join([f"step {step}/{self._pace.steps}", *values, self._pace.left()]).rstrip(), flush=True)


class SweepProgress(Watch):
    """Follows the trials of a sweep: a bar each on a terminal, else a line each now and then.

    Args:
        trials: of a search, which draws them one by one.
    """

    def __init__(self, sweep: Sweep, *, trials: int | None = None) -> None:
        self._sweep = sweep
        self._trials = trials
        self._run: SweepRun | None = None
        self._running: dict[str, tuple[RunProgress, TaskID]] = {}
        self._printed_s: dict[str, float] = {}
        pace = TextColumn("{task.fields[pace]}")
        columns = (TextColumn("{task.description:20}"), BarColumn(30), MofNCompleteColumn(), pace)
        self._bars = Progress(*columns, transient=True, disable=not sys.stdout.isatty())

    def outcomes(self) -> dict[str, Outcome]:
        """run -> how it ended, of those that did."""
        return {**self._run.outcomes(), **self._run.retrained} if self._run else {}

    def trials(self) -> int:
        return self._trials or (len(self._run.queue.states) if self._run else 0)

    def trials_left(self) -> int:
        return self._run.trials_left() if self._run else 0

    def paused(self) -> int:
        return sum(one.outcome is None for one in self._run.queue.states.values()) if self._run else 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, run: SweepRun) -> None:
        self._run = run

    def began(self, job: Job) -> None:
        self._add(job.trial.name, job.until)

    def retraining(self, arm: str, run: RunConfig) -> None:
        print(f"confirming {arm}: {run.train.steps} steps on {run.scale.workers} workers", flush=True)
        self._add(f"confirm/{arm}", run.train.steps)

    def _add(self, name: str, steps: int) -> None:
        if name not in self._running:  # else its process died, and this is another
            self._running[name] = RunProgress(steps), self._bars.add_task(name, total=steps, pace="starting")
            self._printed_s[name] = time.monotonic()

    def report(self, name: str, step: int, metrics: Metrics) -> None:
        pace, bar = self._running[name]
        pace.report(step, metrics)
        self._bars.update(bar, completed=step, pace=f"{pace.images_per_s:.4g} images/s  {pace.left()}")
        if self._bars.disable and time.monotonic() - self._printed_s[name] > EVERY_S:
            self._printed_s[name] = time.monotonic()
            print(f"        {name:18} {pace}", flush=True)

    def ended(self, name: str, outcome: Outcome) -> None:
        if name in self._running:  # else it failed before it began
            self._bars.remove_task(self._running.pop(name)[1])
        ended = len(self._run.outcomes()) if self._run else 0
        done = " " * 7 if name.startswith("confirm/") else f"[{ended:2}/{self.trials()}]"
        print(f"{done} {name:18} {ended_line(self._sweep, outcome)}", flush=True)

    def status(self) -> None:
        if self._run:
            print(f"        {status_line(self._run.snapshot())}", flush=True)

    def say(self, line: str) -> None:
        print(line, flush=True)
