"""The trial that trains next, and its next step: a policy orders the trials, devices and budget admit them.

The queue itself starts nothing. It is called with what happened, and returns the next job; Ray Tune runs it
(`scheduler.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from moe.config import Family
from orchestrator.estimate import branch_step
from orchestrator.runs.run_directory import Result
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.resources import fits

# A trial whose devices are not free is passed by so many later ones. Then all wait for it.
PATIENCE = 8

Outcome = Result | str  # the result of a trial, or why it failed


class TrialState:
    """The state of a trial in the queue.

    Attributes:
        arm: trials of the same arm are its seeds, and together one point of the frontier.
        cost: cost of the whole trial, known before it starts. Early stopping judges by it.
        steps: last step of the trial.
        need: resources that the trial keeps busy while it trains.
        start: first step of the trial. A branch starts where it leaves its trunk.
        after: name of the trial that must be complete before.
        trial: the sweep's own trial.
        flops: cost of the steps that the trial trains itself, without those of its trunk.
        reached: step -> quality, at its pauses and its end.
        until: step at which the running job ends.
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
        """The step of its last pause, or its start."""
        return max(self.reached, default=self.start)

    def part(self, until: int) -> float:
        """The fraction of its own steps between its last pause and `until`."""
        return max(0, until - self.begins_at) / (self.steps - self.start)

    @property
    def waiting(self) -> bool:
        return not self.running and self.outcome is None

    @property
    def finished(self) -> bool:
        """Whether the quality of its last step is known. A run may end before, by ``train.stop_at``."""
        return self.steps in self.reached

    @property
    def failed(self) -> bool:
        return self.outcome is not None and not self.finished


def new_trial_state(
    trial: Trial, *, cost: float, need: Mapping[str, float], flops: float | None = None
) -> TrialState:
    """Returns the state of a sweep's trial that has not begun."""
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


class Policy(Family, ABC, default="run_to_completion"):
    """Decides which trials train next, and how far, from what all trials have reached.

    A policy is a class in a file, which may be a plugin. It has no memory: a sweep that was stopped goes on
    from the states of its trials. All its methods get the states of all trials of the sweep, in order.
    """

    @abstractmethod
    def jobs(self, states: Sequence[TrialState]) -> Iterable[Job]:
        """Returns the jobs that could start now, best first."""

    def for_sweep(self, sweep: Sweep, *, known: Collection[str], budgeted: bool) -> Self:
        """Returns the policy with what a sweep decides.

        Args:
            known: the costs that are known before a trial begins. If the sweep's own is not one of them,
                `TrialState.cost` is that of training in FLOPs.
            budgeted: whether the money may run out.

        Raises:
            UsageError: if the policy cannot judge this sweep.
        """
        return self

    def predictions(self, states: Sequence[TrialState]) -> Mapping[Hashable, float]:
        """Returns arm -> its predicted final quality, from which a search learns while the arm is paused."""
        return {}

    def passed_by(self, states: Sequence[TrialState]) -> Mapping[Hashable, tuple[float, float]]:
        """Returns the arms that are left untrained on purpose -> what each was expected to add, as part of
        the hypervolume, and the cost that it still needs, as part of all cost. The page names them.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class RunToCompletion(Policy):
    """Trains every trial to its end: the largest demand first, so that small trials fill the gaps. Where the
    money may run out, `cheapest_first`: most of the frontier is complete by then.
    """

    kind: Literal["run_to_completion"] = "run_to_completion"
    cheapest_first: bool = False

    def for_sweep(self, sweep: Sweep, *, known: Collection[str], budgeted: bool) -> Self:
        return replace(self, cheapest_first=self.cheapest_first or budgeted)

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        def rank(state: TrialState) -> tuple[float, str]:
            # The seeds of an arm follow each other: a point counts once all are complete.
            return (state.cost, str(state.arm)) if self.cheapest_first else (-sum(state.need.values()), "")

        for state in sorted((s for s in states if s.waiting), key=rank):
            yield Job(state=state, until=state.steps)


class TrialQueue:
    """Chooses the next job from the policy's, by free devices and budget.

    Args:
        cluster_resources: returns the resources of the cluster now, including those that its autoscaler may
            add: machines go, and others join.
        quality: metric that early stopping judges by.
        max_concurrent: highest number of jobs that run at the same time.
        admits: whether the budget holds a job beside those that run.
        more: draws the trials of another arm, or returns no trials at the end of a search.
        ended: is called with every job that has ended or paused, and with how.
    """

    def __init__(
        self,
        states: Iterable[TrialState],
        policy: Policy,
        *,
        cluster_resources: Callable[[], Mapping[str, float]],
        quality: str,
        max_concurrent: int | None = None,
        admits: Callable[[Job, TrialState], bool] = lambda job, state: True,
        more: Callable[[], Sequence[TrialState]] = lambda: (),
        ended: Callable[[Job, Outcome], None] = lambda job, outcome: None,
    ) -> None:
        self.states = {state.name: state for state in states}
        self.policy = policy
        self.cluster_resources = cluster_resources
        self.quality = quality
        self.max_concurrent = max_concurrent or math.inf
        self.admits = admits
        self.more = more
        self.ended = ended
        self.out_of_budget = False
        self.num_running = 0
        # The cluster as it was when the last answer was to wait; None once something has changed since.
        self._idle: Mapping[str, float] | None = None
        # A job waits for the budget, or for devices that no other trial may take before it.
        self._held = False

    def add(self, state: TrialState) -> None:
        self.states[state.name] = state
        self._idle = None

    def next(self) -> Job | None:
        """Returns the job to start now, which then counts as running. None means to wait for a running job.
        If none runs, everything is done or the budget is exhausted.
        """
        cluster = self.cluster_resources()
        if self._idle == cluster:
            return None
        job = None
        if self.num_running < self.max_concurrent:
            free = self._free(cluster)
            job = self._chosen(free) if self._has_room(free) else None
        if job is None:
            self._idle = cluster
            return None
        job.state.running, job.state.until = True, job.until
        self.num_running += 1
        return job

    def done(self, name: str, outcome: Outcome) -> None:
        """Records that the running job of a trial ended, for good or with a pause."""
        state = self.states[name]
        self.release(name)
        self.ended(Job(state=state, until=state.until), self.record(name, outcome))

    def release(self, name: str) -> None:
        """Lets a trial wait again, whose job has stopped before its end; does nothing if none runs."""
        state = self.states[name]
        # A process may also die after its trial has paused.
        if state.running:
            state.running = False
            self.num_running -= 1
            self._idle = None

    def record(self, name: str, outcome: Outcome) -> Outcome:
        """Records the outcome or a pause of a trial, also of an earlier process. Returns what it recorded: a
        quality that is not finite is a failure.
        """
        state = self.states[name]
        self._idle = None
        if isinstance(outcome, Result):
            outcome = outcome.unknown_quality(self.quality) or outcome
        if isinstance(outcome, Result) and outcome.status == "paused":
            state.reached[outcome.step] = outcome.metrics[self.quality]
            return outcome
        state.outcome = outcome
        if isinstance(outcome, Result) and outcome.status == "finished":
            state.reached[state.steps] = outcome.metrics[self.quality]
        if state.failed:
            for branch in self.states.values():
                if branch.after == name and branch.waiting:
                    branch.outcome = f"its trunk {name} did not finish"
        return outcome

    def _chosen(self, free: Mapping[str, float]) -> Job | None:
        drawn: Sequence[TrialState] = ()
        while (job := self._admitted(free)) is None:
            # A running trial may still make the last arm worth its cost.
            waits = self._held or (drawn and self.num_running)
            if waits or not (drawn := self.more()):
                return None
            self.states |= {state.name: state for state in drawn}
        return job

    def _admitted(self, free: Mapping[str, float]) -> Job | None:
        """Returns the policy's first job whose trunk is complete and whose devices and budget are free.

        While none runs, the devices are not up: then the first job waits for them at Ray.
        """
        skipped: list[Job] = []
        self.out_of_budget = self._held = False
        for job in self.policy.jobs(list(self.states.values())):
            state = job.state
            if state.after and not isinstance(self.states[state.after].outcome, Result):
                continue
            if not self.admits(job, state):
                self.out_of_budget = self._held = True
                continue
            if fits(state.need, free):
                for passed in skipped:
                    passed.state.skipped_count += 1
                return job
            skipped.append(job)
            if state.skipped_count >= PATIENCE:
                self._held = True
                break
        return skipped[0] if skipped and not self.num_running else None

    def _has_room(self, free: Mapping[str, float]) -> bool:
        """Whether any trial fits. Another arm is drawn when it can start, not before."""
        needs = {tuple(state.need.items()) for state in self.states.values()}
        return not self.num_running or any(fits(dict(need), free) for need in needs)

    def _free(self, cluster: Mapping[str, float]) -> dict[str, float]:
        """Returns the resources that no running trial needs."""
        free = dict(cluster)
        for state in self.states.values():
            if state.running:
                for name, amount in state.need.items():
                    free[name] = free.get(name, 0.0) - amount
        return free
