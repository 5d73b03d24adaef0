"""Which trial trains next, and how far: what waits, what fits the devices that are free, what it may cost.

Pure: it is told what happened and says what to do; the engine does it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.sweeps.branches import branch_step
from orchestrator.sweeps.sweep import Trial
from orchestrator.training.resources import fits
from orchestrator.training.run_directory import Result

PATIENCE = 8  # admissions that may overtake a trial whose devices are not free; then they wait for it

Outcome = Result | str  # how a trial ended, or why it failed


@dataclass(frozen=True, kw_only=True)
class Job:
    """Train `trial` to step `until`."""

    trial: Trial
    until: int


class Standing:
    """Where a trial stands.

    Attributes:
        cost: of the whole trial, known before it starts; what early stopping judges by.
        flops: of the steps that it trains itself: a branch's trunk is paid for already.
        need: resources that it keeps busy while it trains.
        reached: step -> quality, where it paused.
    """

    def __init__(
        self, trial: Trial, *, cost: float, need: Mapping[str, float], flops: float | None = None
    ) -> None:
        self.trial = trial
        self.cost = cost
        self.flops = cost if flops is None else flops
        self.need = need
        self.reached: dict[int, float] = {}
        self.outcome: Outcome | None = None
        self.running = False
        self.overtaken = 0

    @property
    def steps(self) -> int:
        return self.trial.run.train.steps

    @property
    def begins_at(self) -> int:
        """The last step it paused at, else where it branches, else 0."""
        return max(self.reached, default=branch_step(self.trial.run))

    @property
    def waiting(self) -> bool:
        return not self.running and self.outcome is None


class Policy(Protocol):
    def jobs(self, standings: Sequence[Standing]) -> Iterable[Job]:
        """What could be done now, best first. All standings of the sweep, in its order."""
        ...


class ToTheEnd:
    """Every trial is trained to its end; those with the largest demand first, for small ones fill gaps."""

    def jobs(self, standings: Sequence[Standing]) -> Iterator[Job]:
        waiting = [one for one in standings if one.waiting]
        for one in sorted(waiting, key=lambda one: -sum(one.need.values())):
            yield Job(trial=one.trial, until=one.steps)


class Agenda:
    """Args:
    most: resources of the cluster, up or still to come.
    quality: the metric that early stopping judges by.
    at_once: jobs that run at the same time, however many would fit.
    admits: whether a job may be paid for, beside those that run.
    more: draws the trials of another arm; none: there are no more.
    """

    def __init__(
        self,
        standings: Iterable[Standing],
        policy: Policy,
        *,
        most: Mapping[str, float],
        quality: str,
        at_once: int | None = None,
        admits: Callable[[Job, Standing], bool] = lambda job, one: True,
        more: Callable[[], Sequence[Standing]] = lambda: (),
    ) -> None:
        self.standings = {one.trial.name: one for one in standings}
        self.policy = policy
        self.free = dict(most)
        self.quality = quality
        self.at_once = at_once or math.inf
        self.admits = admits
        self.more = more
        self.out_of_budget = False
        self._held = False  # something waits for the budget, or for devices that nobody may overtake

    def next(self) -> Job | None:
        """The job to start now, which is then running. None: wait for one that runs; if none does, all is
        done, or the budget holds no more.
        """
        if self.running() >= self.at_once:
            return None
        while (job := self._chosen()) is None:
            if self._held or not self._has_room() or not (drawn := self.more()):
                return None
            self.standings |= {one.trial.name: one for one in drawn}
        one = self.standings[job.trial.name]
        one.running = True
        self._take(one.need, -1)
        return job

    def done(self, name: str, outcome: Outcome) -> None:
        """The running job of that trial ended: for good, or with a pause."""
        one = self.standings[name]
        one.running = False
        self._take(one.need, +1)
        self.record(name, outcome)

    def record(self, name: str, outcome: Outcome) -> None:
        """What is known of a trial: `done`, or left by an earlier process."""
        one = self.standings[name]
        if isinstance(outcome, Result) and outcome.status == "paused":
            one.reached[outcome.step] = outcome.metrics.get(self.quality, math.nan)
            return
        one.outcome = outcome
        if isinstance(outcome, Result) and outcome.status == "finished":
            one.reached[one.steps] = outcome.metrics.get(self.quality, math.nan)
        if isinstance(outcome, str) or outcome.status != "finished":
            for branch in self.standings.values():
                if branch.trial.after == name and branch.waiting:
                    branch.outcome = f"its trunk {name} did not finish"

    def _chosen(self) -> Job | None:
        overtaken: list[Standing] = []
        self._held = self.out_of_budget = False
        for job in self.policy.jobs(list(self.standings.values())):
            one = self.standings[job.trial.name]
            if one.trial.after and not isinstance(self.standings[one.trial.after].outcome, Result):
                continue
            if not self.admits(job, one):
                self.out_of_budget = self._held = True
                continue
            if fits(one.need, self.free):
                for passed in overtaken:
                    passed.overtaken += 1
                return job
            if one.overtaken >= PATIENCE:
                self._held = True
                return None
            overtaken.append(one)
        return None

    def running(self) -> int:
        return sum(one.running for one in self.standings.values())

    def _has_room(self) -> bool:
        """For the smallest trial there is: another arm is drawn when it can start, not before."""
        needs = [one.need for one in self.standings.values()]
        return not needs or any(fits(need, self.free) for need in needs)

    def _take(self, need: Mapping[str, float], sign: int) -> None:
        for name, amount in need.items():
            self.free[name] += sign * amount
