"""A sweep from what its storage has to its end: the queue, the money, the log and the engine together."""

import json
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from orchestrator import storage
from orchestrator.checkpoint.retention import drop_optimizer
from orchestrator.errors import UsageError
from orchestrator.frontier.points import Frontier, on_front
from orchestrator.sweeps.asha import MultiObjectiveASHA
from orchestrator.sweeps.branches import branch_step
from orchestrator.sweeps.engine import Hooks, run_jobs
from orchestrator.sweeps.log import TrialLog
from orchestrator.sweeps.purse import Purse
from orchestrator.sweeps.queue import Job, Outcome, Policy, RunToCompletion, TrialQueue, TrialState, state_of
from orchestrator.sweeps.search import OptunaSearch
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.cluster import most_resources, run_resources
from orchestrator.training.loop import Metrics
from orchestrator.training.worker import (
    Result,
    checkpoint_directory,
    costs,
    pause_of,
    result_of,
    run_directory,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a sweep is worked through.

    Attributes:
        policy: whose turn it is: every trial to its end, or early stopping.
        max_concurrent: jobs at the same time; None: as many as the cluster holds.
        search: draws arms from the sweep's space, beside those it names.
    """

    policy: Policy = RunToCompletion()
    max_concurrent: int | None = None
    search: OptunaSearch | None = None


class Watch(Protocol):
    """Callbacks of a sweep: a job begins, a trial reports a step, its job ends, half a minute has passed."""

    def began(self, job: Job) -> None: ...
    def report(self, name: str, step: int, metrics: Metrics) -> None: ...
    def ended(self, name: str, outcome: Outcome) -> None: ...
    def status(self) -> None: ...


class SweepRun:
    """Attributes:
    queue: where every trial stands.
    """

    def __init__(self, sweep: Sweep, log: TrialLog, purse: Purse, options: Options) -> None:
        known = [*costs(sweep.base, 1), "cost/marginal_train_flops_6mac"]
        if sweep.cost not in known and isinstance(options.policy, MultiObjectiveASHA):
            raise UsageError(
                f"--stop-early judges by what a trial will cost, and {sweep.cost} is measured: leave out"
                f" --stop-early, or use one of {', '.join(known)}"
            )
        self.sweep = sweep
        self.log = log
        self.purse = purse
        self.options = options
        self._predicted = set[Hashable]()
        trials = list(sweep.trials().values()) + [t for arm in _drawn(sweep) for t in sweep.of_arm(*arm)]
        self.queue = TrialQueue(
            map(self._state, trials),
            options.policy,
            cluster_resources=most_resources(),
            quality=sweep.quality,
            max_concurrent=options.max_concurrent,
            admits=purse.admits,
            more=self._draw,
        )

    def recover(self) -> None:
        """What earlier processes left: results and pauses in storage, ends that MLflow was not told of."""
        told, trials = self.log.told(), [one.trial for one in self.queue.states.values()]
        with ThreadPoolExecutor(16) as pool:
            for trial, found in zip(trials, pool.map(_left, trials), strict=True):
                for outcome in found:
                    self.queue.record(trial.name, outcome)
                    if outcome.status != "paused" and trial.name not in told:
                        self.log.end(trial, outcome)
        if self.options.search:
            seen = [(arm, changes, *self._values(arm)) for arm, changes in _drawn(self.sweep)]
            self.options.search.restore(seen)

    def work(self, watch: Watch) -> None:
        """Works until nothing is left to do, or to pay for. Then trials that stay paused are stopped."""

        def began(job: Job) -> None:
            self.purse.begin(job, self.queue.states[job.trial.name])
            self.log.begin(job.trial)
            watch.began(job)

        def report(trial: Trial, step: int, metrics: Metrics) -> None:
            self.log.report(trial, step, metrics)
            watch.report(trial.name, step, metrics)

        def done(job: Job, outcome: Outcome) -> None:
            one = self.queue.states[job.trial.name]
            self.purse.paid(job, one)
            self.log.end(job.trial, outcome)
            self.queue.done(job.trial.name, outcome)
            quality, cost = self._values(job.trial.arm)
            if self.options.search and cost is not None:
                self.options.search.tell(job.trial.arm, quality, cost)
            watch.ended(job.trial.name, outcome)

        try:
            hooks = Hooks(began=began, report=report, done=done, status=watch.status)
            run_jobs(self.sweep.base, self.queue, hooks)
        except BaseException:
            self.log.abandon()
            raise
        self._tell_predictions()
        for one in self.queue.states.values():
            if one.waiting and one.reached:
                self.log.stop(one.trial, one.begins_at)

    def outcomes(self) -> dict[str, Outcome]:
        """trial -> how it ended, of those that did."""
        return {name: one.outcome for name, one in self.queue.states.items() if one.outcome is not None}

    def _state(self, trial: Trial) -> TrialState:
        own = trial.run.train.steps - branch_step(trial.run)
        flops = costs(trial.run, own)["cost/train_flops_6mac"]
        known = costs(trial.run, trial.run.train.steps) | {"cost/marginal_train_flops_6mac": flops}
        cost = known.get(self.sweep.cost, known["cost/train_flops_6mac"])
        return state_of(trial, cost=cost, need=run_resources(trial.run), flops=flops)

    def _tell_predictions(self) -> None:
        """Tells the search what is predicted of paused arms: none of them is worth going on with by now."""
        search, policy = self.options.search, self.options.policy
        if search is None or not isinstance(policy, MultiObjectiveASHA):
            return
        states = list(self.queue.states.values())
        waiting = {state.arm: state for state in states if state.waiting}
        running = {state.arm for state in states if state.running}
        for arm, quality in policy.predictions(states).items():
            if arm in waiting and arm not in running | self._predicted:
                self._predicted.add(arm)
                search.tell(waiting[arm].trial.arm, quality, waiting[arm].cost)

    def _draw(self) -> list[TrialState]:
        if not self.options.search:
            return []
        self._tell_predictions()
        known = {one.trial.arm for one in self.queue.states.values()}
        while (arm := self.options.search.next()) and arm.name in known:
            pass  # an earlier process began it
        if arm is None:
            return []
        record = json.dumps({"arm": arm.name, "changes": dict(arm.changes)}, indent=1)
        storage.write_bytes(storage.join(_arms(self.sweep), f"{arm.name}.json"), record.encode())
        return [self._state(trial) for trial in self.sweep.of_arm(arm.name, arm.changes)]

    def _values(self, arm: str) -> tuple[float | None, float | None]:
        """Quality and cost of an arm as the sweep measures them, means over its seeds: both None while it is
        not over; the quality None, and the cost 0, if it did not finish.
        """
        ones = [one for one in self.queue.states.values() if one.trial.arm == arm]
        ends = [one.outcome for one in ones]
        if any(end is None for end in ends):
            return None, None
        done = [end.metrics for end in ends if isinstance(end, Result) and end.status == "finished"]
        if len(done) < len(ones) or any(self.sweep.cost not in metrics for metrics in done):
            return None, 0.0
        return fmean(m[self.sweep.quality] for m in done), fmean(m[self.sweep.cost] for m in done)


def _left(trial: Trial) -> list[Result]:
    """Pauses in their order, then the end."""
    directory = run_directory(trial.run)
    names = [name for name in storage.names(directory) if name.startswith("paused-")]
    steps = sorted(int(name.removeprefix("paused-").removesuffix(".json")) for name in names)
    found = [pause_of(trial.run, step) for step in steps] + [result_of(trial.run)]
    return [one for one in found if one is not None]


def _arms(sweep: Sweep) -> str:
    return storage.join(run_directory(sweep.base), "arms")


def _drawn(sweep: Sweep) -> list[tuple[str, dict[str, Any]]]:
    """Arms that a search has drawn, by name."""
    files = sorted(storage.names(_arms(sweep)))
    records = [json.loads(storage.read_bytes(storage.join(_arms(sweep), name))) for name in files]
    return [(record["arm"], record["changes"]) for record in records]


def keep_weights_only(trials: Iterable[Trial], frontier: Frontier) -> int:
    """Of complete trials off the frontier: nobody goes on from their optimiser. Bytes that it freed."""
    points = zip(frontier.points, on_front(frontier), strict=True)
    front = {point.arm for point, on in points if on}
    off = [t.run for t in trials if t.role == "trial" and t.arm not in front and result_of(t.run)]
    return sum(drop_optimizer(checkpoint_directory(run)) for run in off)
