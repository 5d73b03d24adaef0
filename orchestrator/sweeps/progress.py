"""Shows the progress of a run or a sweep: bars on a terminal, lines in files and notebooks.

It is the only place of the library that writes to the standard output, and only for callers that want it.
"""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from orchestrator.config import RunConfig
from orchestrator.frontier.points import IN_BITS, as_shown
from orchestrator.output import UnfailingOutput, duration
from orchestrator.sweeps.queue import Job, Outcome
from orchestrator.sweeps.run import SweepRun, SweepState, Watch
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.metrics_file import Metrics

EVERY_S = 20  # between lines about one trial, without a terminal
STILL_S = 90  # without a report, or three times as long as between two of them, until a line says so


def new_console() -> Console:
    """Returns a console that prints lines as they are. In a notebook they are text, as in a file: bars would
    need ipywidgets there. Lines that nobody takes are dropped: no training ends because of them.
    """
    file: Any = UnfailingOutput(sys.stdout)
    return Console(file=file, markup=False, emoji=False, highlight=False, soft_wrap=True, force_jupyter=False)


def ended_line(sweep: Sweep, outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return f"failed: {outcome}"
    metrics = outcome.metrics
    if outcome.status == "diverged":
        return f"diverged: {outcome.reason or f'at step {outcome.step}'}"
    name, shown = as_shown(sweep.quality, metrics[sweep.quality])
    quality = f"{name} {shown:.4f}"
    if sweep.cost not in metrics:  # a run that only cooldown runs begin from
        return f"{quality}  {metrics['cost/device_s']:.1f} s"
    if outcome.status == "paused":
        return f"paused at step {outcome.step}, {quality}"
    return f"{quality}  {sweep.cost} {metrics[sweep.cost]:.3g}  {metrics['cost/device_s']:.1f} s"


def status_line(now: SweepState) -> str:
    rungs = "".join(f", {count} paused at step {step}" for step, count in now.paused.items())
    best = f", best trial {now.best:.4f}" if now.best is not None else ""
    left = f", about {duration(now.left_s)} left" if now.left_s else ""
    points = f"{now.front} point{'s' * (now.front != 1)}"
    return (
        f"{now.complete} of {now.trials} complete, {now.running} running{rungs}; frontier {points}{best},"
        f" hypervolume of the trials {now.hypervolume:.4f}; {duration(now.spent_s)} of devices spent{left}"
    )


class RunProgress:
    """Steps over time since the first report of these workers, and when the last step will be done at that
    rate.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.images_per_s = 0.0
        self._first: tuple[int, float] | None = None
        self._last_s = time.monotonic()
        self._still_s = STILL_S

    def report(self, step: int, metrics: Metrics) -> None:
        now = time.monotonic()
        if self._first is None or "resumed/step" in metrics:
            self._first = (step, now)
        else:
            self._still_s = max(self._still_s, 3 * (now - self._last_s))
        self._last_s = now
        self.step, self.images_per_s = step, metrics.get("perf/images_per_s", self.images_per_s)

    def left(self) -> str:
        """Time to the last step in words; empty before two reports that were read apart, and at the end."""
        step, began_s = self._first or (0, self._last_s)
        if not step < self.step < self.steps or began_s == self._last_s:
            return ""
        left_s = (self._last_s - began_s) / (self.step - step) * (self.steps - self.step)
        return f"about {duration(left_s)} left"

    def still(self) -> str:
        """Says for how long no report came, if that is long; later not before twice the time."""
        silent_s = time.monotonic() - self._last_s
        if silent_s < self._still_s:
            return ""
        self._still_s = 2 * silent_s
        return (
            f"no report for {duration(silent_s)}: {self}"
            if self.step
            else f"{self}, for {duration(silent_s)}"
        )

    def __str__(self) -> str:
        if not self.step:
            return "training, no report yet"
        parts = (f"step {self.step}/{self.steps}", f"{self.images_per_s:.4g} images/s", self.left())
        return ", ".join(filter(None, parts))


class StepLines:
    """A line for every report of a run."""

    def __init__(self, run: RunConfig) -> None:
        self._pace = RunProgress(run.train.steps)
        quality = IN_BITS.get(run.task.quality, run.task.quality)
        self._shown = ("train/loss", quality, "perf/images_per_s", "data/wait_frac")
        self._console = new_console()

    def say(self, line: str) -> None:
        self._console.print(line)

    def show(self, step: int, metrics: Metrics) -> None:
        self._pace.report(step, metrics)
        values = [f"{name} {metrics[name]:.4g}" for name in self._shown if name in metrics]
        self.say("  ".join([f"step {step}/{self._pace.steps}", *values, self._pace.left()]).rstrip())


class SweepProgress(Watch):
    """Follows the trials of a sweep: a bar for each on a terminal, else a line for each now and then.

    Attributes:
        run: the sweep once it has begun.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self.run: SweepRun | None = None
        self._running: dict[str, tuple[RunProgress, TaskID]] = {}
        self._printed_s: dict[str, float] = {}
        self._console = new_console()
        pace = TextColumn("{task.fields[pace]}")
        columns = (TextColumn("{task.description:20}"), BarColumn(30), MofNCompleteColumn(), pace)
        on_terminal = self._console.file.isatty()
        self._bars = Progress(*columns, console=self._console, transient=True, disable=not on_terminal)

    def trials(self) -> int:
        """Returns the number of trials, with those that a search has yet to draw."""
        if self.run is None:
            return 0
        arms = len(self._sweep.arms) + self.run.search.count if self.run.search else 0
        return max(arms * max(1, len(self._sweep.seeds)), len(self.run.queue.states))

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, run: SweepRun) -> None:
        self.run = run

    def began(self, job: Job) -> None:
        self._add(job.trial.name, job.until)

    def retraining(self, arm: str, run: RunConfig) -> None:
        self.say(f"retraining {arm}: {run.train.steps} steps on {run.scale.workers} workers")
        self._add(f"confirm/{arm}", run.train.steps)

    def _add(self, name: str, steps: int) -> None:
        # A trial whose process died begins again without having ended.
        if name not in self._running:
            self._running[name] = (
                RunProgress(steps),
                self._bars.add_task(name, total=steps, pace="no report yet"),
            )
            self._printed_s[name] = time.monotonic()

    def report(self, name: str, step: int, metrics: Metrics) -> None:
        pace, bar = self._running[name]
        pace.report(step, metrics)
        self._bars.update(bar, completed=step, pace=f"{pace.images_per_s:.4g} images/s  {pace.left()}")
        if self._bars.disable and time.monotonic() - self._printed_s[name] > EVERY_S:
            self._printed_s[name] = time.monotonic()
            self.say(f"        {name:18} {pace}")

    def ended(self, name: str, outcome: Outcome) -> None:
        if name in self._running:  # not so if the trial failed before it began
            self._bars.remove_task(self._running.pop(name)[1])
        ended = len(self.run.outcomes()) if self.run else 0
        done = " " * 7 if name.startswith("confirm/") else f"[{ended:2}/{self.trials()}]"
        self.say(f"{done} {name:18} {ended_line(self._sweep, outcome)}")

    def status(self) -> None:
        for name, (pace, _) in self._running.items():
            if still := pace.still():
                self.say(f"        {name:18} {still}")
        if self.run:
            self.say(f"        {status_line(self.run.snapshot())}")

    def say(self, line: str) -> None:
        self._console.print(line)
