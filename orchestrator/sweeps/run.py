"""The trials of a sweep: what its directory has of them, which is next, what they may cost."""

import math
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

import numpy as np

from orchestrator.checkpoint.manager import drop_optimizer
from orchestrator.costs import TRAIN_FLOPS, computed, known_costs
from orchestrator.estimate import branch_step
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.pareto import hypervolume_2d, pareto_front
from orchestrator.frontier.points import as_shown
from orchestrator.runs import notice
from orchestrator.runs.metrics_file import METRICS, LineReader, Metrics, poll_s
from orchestrator.runs.run_directory import Result, RunDir
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.budget import BudgetTracker
from orchestrator.sweeps.engine import run_jobs
from orchestrator.sweeps.queue import (
    Job,
    Outcome,
    Policy,
    RunToCompletion,
    TrialQueue,
    TrialState,
    new_trial_state,
)
from orchestrator.sweeps.search import OptunaSearch
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.resources import most_resources, run_resources

STATUS_EVERY_S = 30


class Watch:
    """Callbacks of a sweep, all of which do nothing here: override those that you need.

    The sweep enters its watch as a context, and leaves it at the end.
    """

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

    def start(self, run: "SweepRun") -> None:
        """The sweep begins, or goes on. `run.snapshot()` is its state from now on."""

    def began(self, job: Job) -> None:
        """A trial begins, or goes on after a pause: `job.trial.name`, up to the step `job.until`."""

    def report(self, name: str, step: int, metrics: Metrics) -> None:
        """A trial has reached a step."""

    def ended(self, name: str, outcome: Outcome) -> None:
        """It has ended or paused: with a `Result`, or with the reason of its failure."""

    def status(self) -> None:
        """Half a minute has passed."""

    def say(self, line: str) -> None:
        """A line for the user."""


QUIET = Watch()


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """The state of a sweep, in the few numbers of the status line.

    Attributes:
        complete: trials that have finished, diverged or failed.
        paused: step -> trials that wait there for their promotion.
        best: the highest quality; None before the first trial has finished.
        front, hypervolume: of finished trials, each seed for itself.
        spent_s: device-seconds, also of trials that run.
        left_s: wall time that the rest takes on the devices that run now; 0: unknown.
    """

    trials: int
    complete: int
    running: int
    paused: Mapping[int, int]
    best: float | None
    front: int
    hypervolume: float
    spent_s: float
    left_s: float


class SweepRun:
    """Works through the trials of a sweep, from what its directory has to the end.

    Attributes:
        queue: where every trial stands.
        retrained: how the retrained arms ended.
        unpaid: arms that would have been trained again, had the budget held it.
    """

    def __init__(
        self,
        sweep: Sweep,
        budget: BudgetTracker,
        policy: Policy,
        max_concurrent: int | None = None,
        search: OptunaSearch | None = None,
        watch: Watch = QUIET,
    ) -> None:
        known = [name for name, cost in known_costs().items() if cost.known_before]
        self.sweep = sweep
        self.budget = budget
        self.policy = policy.for_sweep(sweep, known=known, budgeted=budget.budget.is_bound)
        self.search = search
        self.watch = watch
        self.retrained: dict[str, Outcome] = {}
        self.unpaid: list[str] = []
        self._predicted = set[Hashable]()
        self._directory = SweepDir.of(sweep.base)
        self._reports: dict[str, LineReader] = {}  # of running trials
        self._readers = ThreadPoolExecutor(16)
        self._followed_s = self._status_s = time.monotonic()
        self._new_queue = partial(
            TrialQueue,
            cluster_resources=most_resources,
            quality=sweep.quality,
            max_concurrent=max_concurrent,
            admits=lambda job, state: not notice.given() and budget.admits(job, state),
            ended=self._ended,
        )
        trials = sweep.trials(self._drawn()).values()
        self.queue = self._new_queue(map(self.state_of, trials), self.policy, more=self._draw)

    def work(self) -> None:
        """Works until nothing is left to do, or to pay for; from the results and pauses that earlier
        processes have written to the directory.
        """
        trials = [state.trial for state in self.queue.states.values()]
        record = self._directory.record()
        assert record is not None
        assert self.queue.states.keys() <= record.trials.keys(), "what is trained must be in sweep.json"
        for trial, ends in zip(trials, self._readers.map(_ends_of, trials), strict=True):
            for outcome in ends:
                self.queue.record(trial.name, outcome)
        if self.search:
            drawn = [(arm, changes, *self._values(arm)) for arm, changes in self._drawn().items()]
            self.search.restore(drawn, record.answers)
        self.watch.start(self)
        if complete := sum(state.outcome is not None for state in self.queue.states.values()):
            self.watch.say(f"{complete} of {len(trials)} trials are complete already")
        run_jobs(self.queue, self)
        self._tell_predictions()

    def retrain(self, arm: str) -> None:
        """Trains an arm again, for twice its steps, outside the frontier; if the budget holds it."""
        trial = self.sweep.confirmed(self.trial_of(arm))
        queue = self._new_queue([state := self.state_of(trial)], RunToCompletion())
        for outcome in _ends_of(trial):
            queue.record(trial.name, outcome)
        if state.outcome is None:
            if not self.budget.admits(Job(state=state, until=state.steps), state):
                self.watch.say(f"{arm} is not trained again: the budget does not hold it")
                self.unpaid.append(arm)
                return
            labels = trial.labels(False)
            self._directory.update(lambda was: {"trials": {**was.trials, trial.name: labels}})
            self.watch.say(f"retraining {arm} for {trial.run.train.steps} steps")
            run_jobs(queue, self)
        if state.outcome is not None:
            self.retrained[trial.name] = state.outcome

    def began(self, job: Job) -> None:
        if job.trial.name in self._reports:
            return  # its process died, and this is another
        self.budget.begin(job)
        self.watch.began(job)
        reports = self._reports[job.trial.name] = LineReader(RunDir.of(job.trial.run).path, METRICS)
        reports.new()  # skips the lines of earlier attempts

    def follow(self) -> None:
        """Passes on what running trials have reported in their directories, and the status now and then.
        After a notice it asks them to save and stop, again and again: one that just starts may miss it.
        """
        now = time.monotonic()
        if now - self._followed_s < poll_s(self._directory.path):
            return
        if notice.given():
            running = [RunDir(reports.directory) for reports in self._reports.values()]
            list(self._readers.map(lambda run: run.ask_to_stop(for_good=True), running))
        self._pass_on([*self._reports])
        self._followed_s = time.monotonic()
        if now - self._status_s > STATUS_EVERY_S:
            self._status_s = now
            self.budget.save()
            self.watch.status()

    def _pass_on(self, names: Sequence[str]) -> None:
        for name, rows in zip(names, self._readers.map(lambda n: self._reports[n].new(), names), strict=True):
            for row in rows:
                if "metrics" in row:
                    self.budget.report(name, row["step"], row["time_s"])
                    self.watch.report(name, row["step"], row["metrics"])

    def _ended(self, job: Job, outcome: Outcome) -> None:
        self.began(job)  # Ray may not have started any process for it
        self._pass_on([job.trial.name])
        del self._reports[job.trial.name]
        self.budget.record(job, outcome)
        if isinstance(outcome, str):
            RunDir.of(job.trial.run).write_error(outcome)
        quality, cost = self._values(job.trial.arm)
        if self.search and cost is not None and job.trial.role == "trial":
            self.search.tell(job.trial.arm, quality, cost)
        self.watch.ended(job.trial.name, outcome)

    def snapshot(self) -> SweepState:
        """Returns the state of the sweep. Its hypervolume ends at 1.1 times the highest cost of a trial."""
        states = list(self.queue.states.values())
        ends = [(state, state.outcome) for state in states if state.trial.role == "trial"]
        rows = [
            (math.log10(state.cost), 1 - end.metrics[self.sweep.quality])
            for state, end in ends
            if isinstance(end, Result) and end.status == "finished"
        ]
        points = np.array(rows, dtype=np.float64).reshape(-1, 2)
        chance = self.sweep.base.task.chance(self.sweep.base.model)
        highest = 1.1 * max((state.cost for state in states), default=1.0)
        running = [state for state in states if state.running]
        devices = sum(state.trial.run.scale.workers for state in running)
        known = devices and self.budget.can_estimate()
        return SweepState(
            trials=len(states),
            complete=sum(state.outcome is not None for state in states),
            running=len(running),
            paused=dict(sorted(Counter(s.begins_at for s in states if s.waiting and s.reached).items())),
            best=as_shown(self.sweep.quality, 1 - float(points[:, 1].min()))[1] if rows else None,
            front=int(pareto_front(points).sum()),
            hypervolume=hypervolume_2d(points, np.array([math.log10(highest), 1 - chance])),
            spent_s=self.budget.spent_s + self.budget.held_s(),
            left_s=self.budget.remaining_s(states) / devices if known else 0.0,
        )

    def trials_left(self) -> int:
        """Trials that the budget did not hold."""
        waiting = sum(state.outcome is None for state in self.queue.states.values())
        return waiting if self.queue.out_of_budget else 0

    def passed_by(self) -> dict[str, tuple[float, float]]:
        """Returns the arms that early stopping passed by, as `Policy.passed_by` does."""
        if self.trials_left():
            return {}
        found = self.policy.passed_by(list(self.queue.states.values()))
        return {str(arm): worth for arm, worth in found.items()}

    def end(self) -> Literal["interrupted", "failed", "finished"]:
        """Returns how the sweep has ended, once no trial runs."""
        return "interrupted" if self.trials_left() else "failed" if self.failures() else "finished"

    def failures(self) -> dict[str, str]:
        """run -> why it failed, of trials and retrained arms."""
        ends = {**self.outcomes(), **self.retrained}
        return {name: end for name, end in ends.items() if isinstance(end, str)}

    def trial_of(self, arm: str) -> Trial:
        """The first seed of an arm."""
        trials = (state.trial for state in self.queue.states.values())
        return next(trial for trial in trials if trial.arm == arm and trial.role == "trial")

    def outcomes(self) -> dict[str, Outcome]:
        """trial -> how it ended, for trials that have ended."""
        states = self.queue.states.items()
        return {name: state.outcome for name, state in states if state.outcome is not None}

    def state_of(self, trial: Trial) -> TrialState:
        return unbegun(trial, self.sweep.cost)

    def _tell_predictions(self) -> None:
        """Tells the search what is predicted of paused arms. None is currently worth resuming."""
        if (search := self.search) is None:
            return
        states = list(self.queue.states.values())
        waiting = {state.arm: state for state in states if state.waiting}
        running = {state.arm for state in states if state.running}
        for arm, quality in self.policy.predictions(states).items():
            if arm in waiting and arm not in running | self._predicted:
                self._predicted.add(arm)
                search.tell(waiting[arm].trial.arm, quality, waiting[arm].cost)

    def _draw(self) -> list[TrialState]:
        if not self.search or notice.given():
            return []
        self._tell_predictions()
        known = {state.trial.arm for state in self.queue.states.values()}
        while (arm := self.search.next()) and arm.name in known:
            pass  # an earlier process began it
        if arm is None:
            return []
        trials = self.sweep.of_arm(arm.name, arm.changes)
        self._directory.update(
            lambda was: {
                "arms": {**was.arms, arm.name: dict(arm.changes)},
                "drawn": [*was.drawn, arm.name],
                "answers": {**was.answers, arm.name: dict(arm.answers)},
                "trials": was.trials | {t.name: t.labels(bool(self.sweep.seeds)) for t in trials},
            }
        )
        return [self.state_of(trial) for trial in trials]

    def _drawn(self) -> dict[str, dict[str, Any]]:
        """Arms that a search has drawn, by name."""
        record = self._directory.record()
        return record.drawn_arms() if record else {}

    def _values(self, arm: str) -> tuple[float | None, float | None]:
        """Quality and cost of an arm as the sweep measures them, means over its seeds: both None while it is
        not over; the quality None, and the cost 0, if it did not finish.
        """
        states = [state for state in self.queue.states.values() if state.trial.arm == arm]
        if any(state.outcome is None for state in states):
            return None, None
        done = [
            {**computed(run := state.trial.run, run.train.steps, trunk=state.start), **state.outcome.metrics}
            for state in states
            if isinstance(state.outcome, Result) and state.outcome.status == "finished"
        ]
        if len(done) < len(states) or any(self.sweep.cost not in metrics for metrics in done):
            return None, 0.0
        return fmean(m[self.sweep.quality] for m in done), fmean(m[self.sweep.cost] for m in done)


def _ends_of(trial: Trial) -> list[Result]:
    """Pauses in their order, then the end."""
    run = RunDir.of(trial.run)
    return [*run.pauses(), *filter(None, [run.result()])]


def keep_weights_only(trials: Iterable[Trial], frontier: Frontier) -> int:
    """Drops the optimiser states of complete trials off the frontier; returns the bytes that it freed."""
    front = {point.arm for point in frontier.front}
    off = [RunDir.of(t.run) for t in trials if t.role == "trial" and t.arm not in front]
    return sum(drop_optimizer(run.checkpoints) for run in off if run.result())


def unbegun(trial: Trial, cost_name: str) -> TrialState:
    """Returns the state of a trial that has not begun."""
    steps, trunk = trial.run.train.steps, branch_step(trial.run)
    flops = computed(trial.run, steps - trunk)[TRAIN_FLOPS]
    known = computed(trial.run, steps, trunk=trunk)
    cost = known.get(cost_name, known[TRAIN_FLOPS])
    return new_trial_state(trial, cost=cost, need=run_resources(trial.run), flops=flops)
