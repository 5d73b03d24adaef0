"""Prints training: the model and the data, the progress of a run or a sweep, and the end of each trial."""

import sys
import time
from contextlib import suppress
from statistics import median
from typing import Self

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from moe.vit import ViTConfig
from orchestrator.config import RunConfig
from orchestrator.data.images import BadImage, Picture
from orchestrator.data.manifest import open_manifest
from orchestrator.data.shards import DataSet
from orchestrator.sweeps.queue import Job, Outcome
from orchestrator.sweeps.run import Snapshot, SweepRun, Watch
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.metrics_file import Metrics

EVERY_S = 20  # between lines about one trial, without a terminal
SHOWN = ("train/loss", "val/acc1", "perf/images_per_s", "data/wait_frac")
MOST_EPOCHS = 300  # of the longest common ImageNet recipes; runs with more are pointed out
HEADERS_READ = 16  # images whose headers show the data's own size


def describe_model(model: ViTConfig) -> str:
    size = f"width {model.width}, {model.depth} blocks, patches of {model.patch_size} px"
    if not model.moe:
        return f"dense ViT without experts ({size})"
    blocks = ", ".join(map(str, model.moe_blocks()))
    return f"ViT with {model.moe.num_experts} {model.family()} experts in blocks [{blocks}] ({size})"


def describe_data(run: RunConfig) -> str:
    """The images of a run, the passes over them, and the accuracy that guessing would reach."""
    manifest, size = open_manifest(run.data.path), run.model.image_size
    rows, seen = manifest.rows("train"), run.train.steps * run.data.batch_size
    own, epochs = own_size(run), f"{seen / rows:.3g}" if seen < 1000 * rows else f"{seen / rows:,.0f}"
    scaled = "" if own in (None, (size, size)) else f" (the data's median: {own[0]} x {own[1]} px)"
    floor = manifest.val_majority and manifest.val_majority / manifest.rows("val")
    floors = f"; always guessing the largest class: val/acc1 {floor:.4f}" if floor else ""
    repeats = f", more than {MOST_EPOCHS}: fewer train.steps may do" if seen > MOST_EPOCHS * rows else ""
    return (
        f"images of {size} x {size} px{scaled}, batch {run.data.batch_size}, {run.train.steps} steps ="
        f" {epochs} epochs of {rows:,} images{repeats}{floors}"
    )


def own_size(run: RunConfig) -> tuple[int, int] | None:
    """Median width and height in pixels of some validation images as stored; None if all are damaged."""
    path, cache = run.data.path, int(run.data.cache_gb * 1e9)
    data = DataSet(path=path, manifest=open_manifest(path), cache_bytes=cache)
    rows = data.manifest.splits["val"][0].rows
    row = np.arange(0, rows, -(-rows // HEADERS_READ))
    shard = np.zeros_like(row)
    pictures = []
    for image in data.images("val", shard, data.records("val", shard, row))[0]:
        with suppress(BadImage):
            pictures.append(Picture(image()))
    if not pictures:
        return None
    return int(median(p.width for p in pictures)), int(median(p.height for p in pictures))


def ended_line(sweep: Sweep, outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return f"failed: {outcome}"
    metrics = outcome.metrics
    if outcome.status == "diverged":
        return f"diverged: {outcome.reason or f'at step {outcome.step}'}"
    quality = f"{sweep.quality} {metrics[sweep.quality]:.4f}"
    if sweep.cost not in metrics:  # a run that only cooldown runs begin from
        return f"{quality}  {metrics['cost/device_s']:.1f} s"
    if outcome.status == "paused":
        return f"paused at step {outcome.step}, {quality}"
    return f"{quality}  {sweep.cost} {metrics[sweep.cost]:.3g}  {metrics['cost/device_s']:.1f} s"


def status_line(now: Snapshot) -> str:
    rungs = "".join(f", {count} paused at step {step}" for step, count in now.paused.items())
    best = f", best trial {now.best:.4f}" if now.best is not None else ""
    left = f", about {duration(now.left_s)} left" if now.left_s else ""
    points = f"{now.front} point{'s' * (now.front != 1)}"
    return (
        f"{now.complete} of {now.trials} complete, {now.running} running{rungs}; frontier {points}{best},"
        f" hypervolume {now.hypervolume:.4f}; {duration(now.spent_s)} of devices spent{left}"
    )


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


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
    """Follows the trials of a sweep: a bar for each on a terminal, else a line for each now and then.

    Args:
        trials: arms that a search draws one by one; each is a trial for every seed.
    """

    def __init__(self, sweep: Sweep, *, trials: int | None = None) -> None:
        self._sweep = sweep
        self._trials = trials
        self.run: SweepRun | None = None
        self._running: dict[str, tuple[RunProgress, TaskID]] = {}
        self._printed_s: dict[str, float] = {}
        pace = TextColumn("{task.fields[pace]}")
        columns = (TextColumn("{task.description:20}"), BarColumn(30), MofNCompleteColumn(), pace)
        self._bars = Progress(*columns, transient=True, disable=not sys.stdout.isatty())

    def trials(self) -> int:
        known = len(self.run.queue.states) if self.run else 0
        return max(known, (self._trials or 0) * max(1, len(self._sweep.seeds)))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, run: SweepRun) -> None:
        self.run = run

    def began(self, job: Job) -> None:
        self._add(job.trial.name, job.until)

    def retraining(self, arm: str, run: RunConfig) -> None:
        print(f"confirming {arm}: {run.train.steps} steps on {run.scale.workers} workers", flush=True)
        self._add(f"confirm/{arm}", run.train.steps)

    def _add(self, name: str, steps: int) -> None:
        # A trial whose process died begins again without having ended.
        if name not in self._running:
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
        if name in self._running:  # not so if the trial failed before it began
            self._bars.remove_task(self._running.pop(name)[1])
        ended = len(self.run.outcomes()) if self.run else 0
        done = " " * 7 if name.startswith("confirm/") else f"[{ended:2}/{self.trials()}]"
        print(f"{done} {name:18} {ended_line(self._sweep, outcome)}", flush=True)

    def status(self) -> None:
        if self.run:
            print(f"        {status_line(self.run.snapshot())}", flush=True)

    def say(self, line: str) -> None:
        print(line, flush=True)
