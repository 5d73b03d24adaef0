"""What a sweep has spent, what is still to come, and whether the budget holds one more job."""

import json
import math
import time
from collections.abc import Iterable, Mapping

import numpy as np

from orchestrator import storage
from orchestrator.sweeps.prices import Budget
from orchestrator.sweeps.queue import Job, TrialState

LIKE = 8  # ended jobs nearest in size, which an estimate is fitted to


class Purse:
    """Counts device-seconds that jobs held, from start to end, over all processes that worked at the sweep.

    Args:
        directory: of the sweep; ``spent.json`` there survives the process.
        predicted: trial -> device-seconds of all of it. Others are estimated from the ended jobs of like
            size; before the first has ended nothing is known, and nothing refused.
    """

    def __init__(self, budget: Budget, directory: str, predicted: Mapping[str, float] | None = None) -> None:
        self.budget = budget
        self.predicted = predicted or {}
        self._file = storage.join(directory, "spent.json")
        kept = json.loads(storage.read_bytes(self._file)) if storage.size(self._file) else {}
        self.spent_s: float = kept.get("device_s", 0.0)
        self._ended: list[tuple[float, float]] = kept.get("jobs", [])  # FLOPs and device-seconds of each
        self._running: dict[str, tuple[float, float, int]] = {}  # trial -> began, predicted, workers

    def admits(self, job: Job, one: TrialState) -> bool:
        """Running jobs count what they were predicted to take, or have taken already if that is more."""
        now = time.monotonic()
        running = sum(max(all_of_it, (now - began) * n) for began, all_of_it, n in self._running.values())
        return self.budget.allows(self.of_job(job, one), spent_s=self.spent_s, running_predicted_s=running)

    def of_job(self, job: Job, one: TrialState) -> float:
        """Device-seconds from where the trial stands to the step of the job."""
        whole = self.predicted.get(job.trial.name)
        return (self._like(one.flops) if whole is None else whole) * one.part(job.until)

    def _like(self, flops: float) -> float:
        """Device-seconds of so many FLOPs, from the `LIKE` ended jobs nearest in size; 0 without one.

        A fixed part, of starting a process, and one by FLOPs, fitted to least relative errors; where these
        jobs do not tell them apart, all of it goes by FLOPs.
        """
        nearest = sorted(self._ended, key=lambda job: abs(math.log(job[0] / flops)))[:LIKE]
        if not nearest:
            return 0.0
        size, seconds = np.array(nearest).T
        if np.ptp(size) > 0.1 * size.max():
            columns = np.stack([1 / seconds, size / seconds], 1)
            (fixed, rate), *_ = np.linalg.lstsq(columns, np.ones(len(size)))
            if fixed >= 0 and rate >= 0:
                return float(fixed + rate * flops)
        return float(flops * seconds.sum() / size.sum())

    def can_estimate(self) -> bool:
        """Whether enough jobs have ended, or are predicted, to estimate the time of the rest."""
        return len(self._ended) >= LIKE // 2 or bool(self.predicted)

    def begin(self, job: Job, one: TrialState) -> None:
        workers = job.trial.run.scale.workers
        self._running[job.trial.name] = time.monotonic(), self.of_job(job, one), workers

    def paid(self, job: Job, one: TrialState) -> float:
        """The job ended: the device-seconds that it held, which are spent."""
        began, _, workers = self._running.pop(job.trial.name)
        held_s = (time.monotonic() - began) * workers
        self.spent_s += held_s
        if trained := one.flops * one.part(job.until):
            self._ended.append((trained, held_s))
        kept = {"device_s": self.spent_s, "jobs": self._ended}
        storage.write_bytes(self._file, json.dumps(kept).encode())
        return held_s

    def left_s(self, states: Iterable[TrialState]) -> float:
        """Device-seconds that everything not complete would take, less what running jobs have taken."""
        left, now = 0.0, time.monotonic()
        for one in states:
            if one.outcome is None:
                began, _, workers = self._running.get(one.name, (now, 0.0, 0))
                whole = self.of_job(Job(state=one, until=one.steps), one)
                left += max(0.0, whole - (now - began) * workers)
        return left
