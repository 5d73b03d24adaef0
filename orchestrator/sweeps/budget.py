"""The budget of a sweep, in device-hours or money: what was spent, and whether the next job still fits."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import yaml

from moe.config import Config, NonNegativeFloat, PositiveFloat
from orchestrator import storage
from orchestrator.checkpoint import manifest as checkpoints
from orchestrator.codec import read_config
from orchestrator.errors import BudgetExhausted, UsageError
from orchestrator.runs.run_directory import Result, RunDir, read_json, write_json
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.queue import Job, Outcome, TrialState
from orchestrator.sweeps.spending import OthersSpending, month_of, months_of

PRICES = str(Path(__file__).parents[2] / "jobs" / "prices.yaml")  # for users to edit
CORE = "CPU-core"  # the kind of device that a thread of inference takes
SAVE_EVERY_S = 30.0
MORE = "Run again with a larger `hours` or `usd` to continue"
NEAREST = 8  # ended jobs of similar size that an estimate is fitted to


@dataclass(frozen=True, kw_only=True)
class Device(Config):
    """The price and the speed of the device of one worker: an entry of the price table.

    Attributes:
        peak_tflops: dense matmuls in the fastest format that training uses, 1e12 FLOPs per second.
        memory_gib: None: fitting into memory is not checked.
    """

    usd_per_hour: NonNegativeFloat
    peak_tflops: PositiveFloat
    memory_gib: PositiveFloat | None = None

    def flops_per_s(self, mfu: float) -> float:
        """FLOPs per second at `mfu`, the part of the peak that training FLOPs (6mac) reach."""
        if not 0 < mfu <= 1:
            peak = f"{self.peak_tflops:g} TFLOP/s"
            raise UsageError(f"mfu={mfu:g} must be above 0 and at most 1: a part of {peak}")
        return mfu * self.peak_tflops * 1e12


def load_prices(path: str) -> dict[str, Device]:
    """Reads a YAML table: kind of device -> Device. Raises UsageError naming what is wrong with it."""
    try:
        table = yaml.safe_load(storage.read_bytes(path))
    except FileNotFoundError:
        raise UsageError(f"no price table at {path}: copy jobs/prices.yaml and edit it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())  # it shows the place on lines of their own
        raise UsageError(f"{path} is not YAML: {reason}") from None
    if not isinstance(table, Mapping) or not table:
        raise UsageError(f"{path} holds no devices: write `H100-80: {{usd_per_hour: 7, peak_tflops: 989}}`")
    return {str(kind): _device(f"{path}: {kind}", entry) for kind, entry in table.items()}


def core_usd_per_hour() -> float:
    """Returns the price of a CPU core in `PRICES`; NaN if it has none above 0, or is missing. Raises
    UsageError for a table that cannot be read.
    """
    core = load_prices(PRICES).get(CORE) if Path(PRICES).exists() else None
    return core.usd_per_hour if core and core.usd_per_hour else math.nan


def _device(where: str, entry: object) -> Device:
    if not isinstance(entry, Mapping) or not {"usd_per_hour", "peak_tflops"} <= set(entry):
        raise UsageError(f"{where} needs the fields usd_per_hour and peak_tflops, got {entry!r}")
    try:
        return read_config(Device, {str(name): value for name, value in entry.items()})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A bound on device-hours, and on money at `usd_per_hour` of a device; None: no bound.

    Attributes:
        owner_hours: device-hours of all runs and sweeps of the sweep's owner in its storage, in a calendar
            month (UTC).
    """

    hours: float | None = None
    usd: float | None = None
    usd_per_hour: float = 0.0
    owner_hours: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("hours", self.hours), ("usd", self.usd), ("owner_hours", self.owner_hours)):
            if value is not None and not value > 0:  # also refuses nan
                raise UsageError(f"`{name}` must be above 0, got {value:g}")
        if self.usd is not None and self.usd_per_hour <= 0:
            raise UsageError(
                f"`usd` {self.usd:g} needs the price of a device, which is {self.usd_per_hour:g} per"
                " hour: name a device of jobs/prices.yaml, or use `hours`"
            )

    @property
    def is_bound(self) -> bool:
        """Whether there is any bound."""
        return math.isfinite(self.limit_s()) or self.owner_hours is not None

    def limit_s(self) -> float:
        """Device-seconds of the sweep; infinite without bounds."""
        hours = math.inf if self.hours is None else self.hours
        return 3600 * (hours if self.usd is None else min(hours, self.usd / self.usd_per_hour))

    def less(self, spent_s: float) -> "Budget":
        """Returns what is left of the budget. Raises BudgetExhausted if these device-seconds exhaust
        it.
        """
        left_s = self.limit_s() - spent_s
        if left_s <= 0:
            raise BudgetExhausted(
                f"Budget exhausted: {spent_s / 3600:.3g} of {self.limit_s() / 3600:.3g} device-hours are"
                f" spent. {MORE}"
            )
        return self if math.isinf(left_s) else replace(self, hours=left_s / 3600, usd=None)


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """A running job; `reports` has the step and the time of its first and its last report."""

    state: TrialState
    began: float
    predicted_s: float
    first_step: int
    reports: list[tuple[int, float]] = field(default_factory=list)

    def held_s(self) -> float:
        """Device-seconds since its start."""
        return self._device_s(time.monotonic() - self.began)

    def pace(self) -> list[tuple[float, float]]:
        """FLOPs and device-seconds between its reports, without the start of its process; none before two."""
        if len(self.reports) < 2:
            return []
        (first, began), (last, now) = self.reports
        return [(_flops(self.state, first, last), self._device_s(now - began))]

    def _device_s(self, seconds: float) -> float:
        return seconds * self.state.trial.run.scale.workers


class BudgetTracker:
    """Counts the device-seconds that jobs hold, from start to end, over all processes that run the sweep.
    Each save charges those since the last one to the month and to the owner of this process.

    The duration of a job is predicted from the ended jobs nearest in FLOPs. A job that did not end before its
    process did is charged all the same, and teaches its pace: by `leave`, or by the next process from what
    the last `save` wrote.

    Args:
        directory: of the sweep; its file ``spent.json`` survives the process.
        owner: the user whom this process runs for.
        flops_per_s: of a device, until the first job has ended. By default such jobs are predicted to take
            no time, so all of them are admitted.

    Attributes:
        way_out: what is to be done about the last job that was not admitted.
    """

    def __init__(
        self, budget: Budget, directory: str, *, owner: str = "", flops_per_s: float = math.inf
    ) -> None:
        self.budget = budget
        self.flops_per_s = flops_per_s
        self.way_out = MORE
        self._owner = owner
        self._others = OthersSpending(directory, owner)
        own = SweepDir(directory)
        self._file = own.spent
        kept = read_json(self._file) or {}
        self.spent_s: float = kept.get("device_s", 0.0)
        self.spent_usd: float = kept.get("usd", 0.0)  # at the price of each process
        self._ended: list[tuple[float, float]] = []  # (FLOPs, device-seconds), both above 0
        self._running: dict[str, RunningJob] = {}
        self._saved_s = time.monotonic()
        self._charge(0.0, 0.0, kept.get("jobs", ()))
        for left in kept.get("running", ()):
            self._charge(held_s := left["device_s"], left.get("usd", self._usd(held_s)), left["pace"])
        self._months = months_of(own, kept)
        self._counted_s = self.spent_s  # of which the months are known

    def admits(self, job: Job, state: TrialState) -> bool:
        """Whether the job fits beside what is spent and what running jobs still need."""
        if state.name in self._running:
            return True  # it was admitted: its process died, and this is another
        running = sum(max(each.predicted_s, each.held_s()) for each in self._running.values())
        needed = running + self.predict_s(_flops(state, state.begins_at, job.until))
        if self.spent_s + needed > self.budget.limit_s():
            self.way_out = MORE
            return False
        return self._owner_affords(needed - self.held_s())

    def _owner_affords(self, needed_s: float) -> bool:
        """Whether the owner's month holds so many device-seconds beside all that was spent in it."""
        if (bound := self.budget.owner_hours) is None:
            return True
        month = self._count()
        spent_s = self._months[month][self._owner] + self._others.device_s(month)
        if spent_s + needed_s <= 3600 * bound:
            return True
        more = f", and {needed_s / 3600:.4g} more are needed" if needed_s else ""
        self.way_out = (
            f"{self._owner} has spent {spent_s / 3600:.4g} of {bound:g} device-hours in {month} (UTC) below"
            f" {self._others.root}{more}. Run again with a larger `owner_hours`, or next month, to continue"
        )
        return False

    def begin(self, job: Job) -> None:
        """Notes the start of a job. It continues from the newest checkpoint of its run."""
        saved = checkpoints.steps(RunDir.of(job.trial.run).checkpoints)
        first = max([job.state.begins_at, *saved])
        predicted = self.predict_s(_flops(job.state, first, job.until))
        self._running[job.trial.name] = RunningJob(
            state=job.state, began=time.monotonic(), predicted_s=predicted, first_step=first
        )
        self.save()

    def report(self, name: str, step: int, time_s: float) -> None:
        """Notes that a running job has reached a step; `time_s` counts from the epoch."""
        if job := self._running.get(name):
            job.reports[1:] = [(step, time_s)]
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self.save()

    def record(self, job: Job, outcome: Outcome) -> None:
        """Notes the end of a job: the device-seconds that it held are spent.

        Later predictions use only the steps that it trained; a failed job says nothing about speed.
        """
        ended = self._running.pop(job.trial.name)
        held_s = ended.held_s()
        flops = _flops(job.state, ended.first_step, outcome.step) if isinstance(outcome, Result) else 0.0
        self._charge(held_s, self._usd(held_s), [(flops, held_s)] if flops else [])
        self.save()

    def held_s(self) -> float:
        """Device-seconds of jobs that run, which are spent when they end."""
        return sum(job.held_s() for job in self._running.values())

    def leave(self) -> None:
        """Notes that this process ends, and with it all jobs that still run."""
        for job in self._running.values():
            held_s = job.held_s()
            self._charge(held_s, self._usd(held_s), job.pace())
        self._running.clear()
        self.save()

    def _count(self) -> str:
        """Charges what was spent since the last call to the month that it is, which it returns."""
        month, total_s = month_of(time.time()), self.spent_s + self.held_s()
        of = self._months.setdefault(month, {})
        of[self._owner] = of.get(self._owner, 0.0) + total_s - self._counted_s
        self._counted_s = total_s
        return month

    def save(self) -> None:
        """Writes what is spent, and what running jobs hold so far: every half minute while they run."""
        self._saved_s = time.monotonic()
        self._count()
        running = [
            {"device_s": (held_s := job.held_s()), "usd": self._usd(held_s), "pace": job.pace()}
            for job in self._running.values()
        ]
        spent = {"device_s": self.spent_s, "usd": self.spent_usd, "months": self._months}
        write_json(self._file, spent | {"jobs": self._ended, "running": running})

    def _usd(self, device_s: float) -> float:
        return device_s / 3600 * self.budget.usd_per_hour

    def _charge(self, held_s: float, usd: float, pace: Iterable[tuple[float, float]]) -> None:
        self.spent_s += held_s
        self.spent_usd += usd
        # A trial that started again may have reported no step beyond its first, and clocks are set back.
        self._ended += [each for each in pace if min(each) > 0]

    def predict_s(self, flops: float) -> float:
        """Device-seconds of a job with that many FLOPs.

        A constant for starting the process plus a rate, fitted to the `NEAREST` ended jobs by least relative
        error; a rate alone where their sizes do not determine both.
        """
        if not flops or not self._ended:
            return flops / self.flops_per_s
        nearest = sorted(self._ended, key=lambda job: abs(math.log(job[0] / flops)))[:NEAREST]
        size, seconds = np.array(nearest).T
        if np.ptp(size) > 0.1 * size.max():
            columns = np.stack([1 / seconds, size / seconds], 1)
            (constant, rate), *_ = np.linalg.lstsq(columns, np.ones(len(size)))
            if constant >= 0 and rate >= 0:
                return float(constant + rate * flops)
        return float(flops * seconds.sum() / size.sum())

    def can_estimate(self) -> bool:
        """Whether enough jobs have ended to estimate the time that the others need."""
        return len(self._ended) >= NEAREST // 2

    def remaining_s(self, states: Iterable[TrialState]) -> float:
        """Device-seconds that all unfinished trials still need."""
        total = 0.0
        for state in states:
            if state.outcome is not None:
                continue
            if job := self._running.get(state.trial.name):
                rest = self.predict_s(_flops(state, job.first_step, state.steps)) - job.held_s()
                total += max(0.0, rest)
            else:
                total += self.predict_s(_flops(state, state.begins_at, state.steps))
        return total


def _flops(state: TrialState, first: int, last: int) -> float:
    """FLOPs of a trial's steps after `first` and up to `last`."""
    return state.flops * max(0, last - first) / (state.steps - state.start)
