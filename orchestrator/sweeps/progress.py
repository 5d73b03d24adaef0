"""Shows the progress of a run or a sweep: bars on a terminal, lines in files and notebooks.

Beside `training.console` it is the only place of the library that writes to the standard output.
"""

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from orchestrator.frontier.points import as_shown
from orchestrator.output import duration
from orchestrator.runs.metrics_file import Metrics
from orchestrator.sweeps.queue import Job, Outcome
from orchestrator.sweeps.run import SweepRun, SweepState, Watch
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.console import RunProgress, new_console
from orchestrator.units import amount

EVERY_S = 20  # between lines about one trial, without a terminal


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
    cost = amount(sweep.cost, metrics[sweep.cost])
    return f"{quality}  {sweep.cost} {cost}  {metrics['cost/device_s']:.1f} s"


def status_line(now: SweepState) -> str:
    rungs = "".join(f", {count} paused at step {step}" for step, count in now.paused.items())
    best = f", best trial {now.best:.4f}" if now.best is not None else ""
    left = f", about {duration(now.left_s)} left" if now.left_s else ""
    points = f"{now.front} point{'s' * (now.front != 1)}"
    return (
        f"{now.complete} of {now.trials} complete, {now.running} running{rungs}; frontier {points}{best},"
        f" hypervolume of the trials {now.hypervolume:.4f}; {duration(now.spent_s)} of devices spent{left}"
    )


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
        # A trial whose process died begins again without having ended.
        if (name := job.trial.name) not in self._running:
            bar = self._bars.add_task(name, total=job.until, pace="no report yet")
            self._running[name] = RunProgress(job.until), bar
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
