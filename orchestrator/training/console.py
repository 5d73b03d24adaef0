"""Prints the progress of a run, in lines.

With the bars of a sweep it is the only place of the library that writes to the standard output, and only for
callers that want it.
"""

import sys
import time
from typing import Any

from rich.console import Console

from orchestrator.config import RunConfig
from orchestrator.output import IN_BITS, UnfailingOutput, duration
from orchestrator.runs.metrics_file import Metrics

STILL_S = 90  # without a report, or three times as long as between two of them, until a line says so


def new_console() -> Console:
    """Returns a console that prints lines as they are. In a notebook they are text, as in a file: bars would
    need ipywidgets there. A line that cannot be written is dropped, and never ends a training.
    """
    file: Any = UnfailingOutput(sys.stdout)
    return Console(file=file, markup=False, emoji=False, highlight=False, soft_wrap=True, force_jupyter=False)


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
