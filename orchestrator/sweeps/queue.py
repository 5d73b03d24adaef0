"""Which trial trains next, and to which step: the order is the policy's; devices and budget admit.

Pure: the queue is told what happened and answers what to do. Ray Tune does it (`scheduler.py`).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.sweeps.estimate import branch_step
from orchestrator.sweeps.sweep import Trial
from orchestrator.training.resources import fits
from orchestrator.training.run_directory import Result

PATIENCE = 8  # later trials may start before one whose devices are not free so often; then all wait for it

Outcome = Result | str  # how a trial ended, or why it failed


class TrialState:
    """Where a trial stands.

    Attributes:
        arm: trials of the same arm are its seeds, and one point of the frontier.
        cost: of the whole trial, known before it starts; early stopping judges by it.
        steps, start: where the trial ends and begins; a branch begins where it leaves its trunk.
        need: resources that the trial keeps busy while it trains.
        after: the trial that must be complete before.
        trial: the trial as its owner knows it.
        flops: of the steps that it trains itself: the trunk of a branch is already paid for.
        reached: step -> quality, at its pauses and its end.
        until: the step that it trains to while it runs.
    """

    def __init__(
        self,
        name: str,
        *,
        arm: Hashable,
        cost: float,
        steps: int,
        need: Mapping[str, float],
        start: int = 0,
        after: str | None = None,
        trial: Any = None,
        flops: float | None = None,
    ) -> None:
        self.name = name
        self.arm = arm
        self.cost = cost
        self.steps = steps
        self.need = need
        self.start = start
        self.after = after
        self.trial = trial
        self.flops = cost if flops is None else flops
        self.reached: dict[int, float] = {}
        self.outcome: Outcome | None = None
        self.running = False
        self.until = 0
        self.skipped_count = 0

    @property
    def begins_at(self) -> int:
        """The last step that it paused at, else its start."""
        return max(self.reached, default=self.start)

    def part(self, until: int) -> float:
        """The fraction of its own steps that lies between its last pause and `until`."""
        return max(0, until - self.begins_at) / (self.steps - self.start)

    @property
    def waiting(self) -> bool:
        return not self.running and self.outcome is None

    @property
    def finished(self) -> bool:
        """Whether it has the quality of its last step. A run may end before by ``train.stop_at``."""
        return self.steps in self.reached

    @property
    def failed(self) -> bool:
        return self.outcome is not None and not self.finished


def state_of(
    trial: Trial, *, cost: float, need: Mapping[str, float], flops: float | None = None
) -> TrialState:
    """The state of a sweep's trial that has not begun."""
    return TrialState(
        trial.name,
        arm=trial.arm,
        cost=cost,
        steps=trial.run.train.steps,
        need=need,
        start=branch_step(trial.run),
        after=trial.after,
        trial=trial,
        flops=flops,
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """Train the trial of `state` to step `until`."""

    state: TrialState
    until: int

    @property
    def trial(self) -> Trial:
        return self.state.trial


class Policy(Protocol):
    def jobs(self, states: Sequence[TrialState]) -> Iterable[Job]:
        """Returns what could be done now, best first. `states`: all trials of the sweep, in its order."""
        ...


class RunToCompletion:
    """Trains every trial to its end, those with the largest demand first: small trials fill the gaps."""

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        for state in sorted((s for s in states if s.waiting), key=lambda s: -sum(s.need.values())):
            yield Job(state=state, until=state.steps)


class TrialQueue:
    """Args:
    cluster_resources: resources of the cluster, up or still to come.
    quality: the metric that early stopping judges by.
    max_concurrent: jobs that run at the same time, however many would fit.
    admits: whether a job can be paid for, beside those that run.
    more: draws the trials of another arm; none: there are no more.
    """

    def __init__(
        self,
        states: Iterable[TrialState],
        policy: Policy,
        *,
        cluster_resources: Mapping[str, float],
        quality: str,
        max_concurrent: int | None = None,
        admits: Callable[[Job, TrialState], bool] = lambda job, state: True,
        more: Callable[[], Sequence[TrialState]] = lambda: (),
    ) -> None:
        self.states = {state.name: state for state in states}
        self.policy = policy
        self.free = dict(cluster_resources)
        self.quality = quality
        self.max_concurrent = max_concurrent or math.inf
        self.admits = admits
        self.more = more
        self.out_of_budget = False
        self._num_running = 0
        # The last answer was "wait", and nothing has happened since that could change it.
        self._idle = False
        # A job waits for the budget, or for devices that no other trial may take before it.
        self._held = False

    def add(self, state: TrialState) -> None:
        self.states[state.name] = state
        self._idle = False

    def next(self) -> Job | None:
        """Returns the job to start now, which then counts as running. None: wait for one that runs; if none
        does, everything is done, or the budget is exhausted.
        """
        if self._idle:
            return None
        job = self._chosen() if self._num_running < self.max_concurrent and self._has_room() else None
        if job is None:
            self._idle = True
            return None
        job.state.running, job.state.until = True, job.until
        self._num_running += 1
        self._take(job.state.need, -1)
        return job

    def done(self, name: str, outcome: Outcome) -> None:
        """The running job of that trial ended: for good, or with a pause."""
        state = self.states[name]
        if state.running:  # else its process died when it had paused
            state.running = False
            self._num_running -= 1
            self._take(state.need, +1)
        self.record(name, outcome)

    def record(self, name: str, outcome: Outcome) -> None:
        """Takes over what is known of a trial: from `done`, or what an earlier process left."""
        state = self.states[name]
        self._idle = False
        if isinstance(outcome, Result) and outcome.status == "paused":
            state.reached[outcome.step] = outcome.metrics.get(self.quality, math.nan)
            return
        state.outcome = outcome
        if isinstance(outcome, Result) and outcome.status == "finished":
            state.reached[state.steps] = outcome.metrics.get(self.quality, math.nan)
        if state.failed:
            for branch in self.states.values():
                if branch.after == name and branch.waiting:
                    branch.outcome = f"its trunk {name} did not finish"

    def running(self) -> int:
        return self._num_running

    def _chosen(self) -> Job | None:
        while (job := self._admitted()) is None:
            if self._held or not (drawn := self.more()):
                return None
            self.states |= {state.name: state for state in drawn}
        return job

    def _admitted(self) -> Job | None:
        """The first job of the policy that has its trunk, its devices and its budget."""
        skipped: list[TrialState] = []
        self.out_of_budget = self._held = False
        for job in self.policy.jobs(list(self.states.values())):
            state = job.state
            if state.after and not isinstance(self.states[state.after].outcome, Result):
                continue
            if not self.admits(job, state):
                self.out_of_budget = self._held = True
                continue
            if fits(state.need, self.free):
                for passed in skipped:
                    passed.skipped_count += 1
                return job
            if state.skipped_count >= PATIENCE:
                self._held = True
                return None
            skipped.append(state)
        return None

    def _has_room(self) -> bool:
        """Whether the smallest trial fits: another arm is drawn when it can start, not before."""
        needs = {tuple(state.need.items()): state.need for state in self.states.values()}
        return not needs or any(fits(need, self.free) for need in needs.values())

    def _take(self, need: Mapping[str, float], sign: int) -> None:
        for name, amount in need.items():
            self.free[name] = self.free.get(name, 0.0) + sign * amount
