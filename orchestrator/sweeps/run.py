"""The trials of a sweep: what its directory has of them, which is next, what they may cost."""

from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean
from typing import Any

from orchestrator.checkpoint.manager import drop_optimizer
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier
from orchestrator.sweeps.asha import MultiObjectiveASHA
from orchestrator.sweeps.branches import branch_step
from orchestrator.sweeps.budget import BudgetTracker
from orchestrator.sweeps.engine import Hooks, run_jobs
from orchestrator.sweeps.queue import Job, Outcome, Policy, TrialQueue, TrialState, state_of
from orchestrator.sweeps.search import OptunaSearch
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.metrics_file import Metrics
from orchestrator.training.resources import most_resources, run_resources
from orchestrator.training.run_directory import (
    Result,
    checkpoint_directory,
    pauses_of,
    read_sweep,
    result_of,
    run_directory,
    write_error,
    write_sweep,
)
from orchestrator.training.worker import costs


class Watch:
    """Callbacks of a sweep, all of which do nothing here."""

    def start(self, run: "SweepRun") -> None:
        """The sweep begins, or goes on."""

    def began(self, job: Job) -> None:
        """A job of a trial begins."""

    def report(self, name: str, step: int, metrics: Metrics) -> None:
        """A trial reports a step."""

    def ended(self, name: str, outcome: Outcome) -> None:
        """A job of a trial, or a retrained run, has ended."""

    def retraining(self, arm: str, run: RunConfig) -> None:
        """An arm at the knee is trained for longer."""

    def status(self) -> None:
        """Half a minute has passed."""

    def say(self, line: str) -> None:
        """A line for the user."""


class SweepRun:
    """Works through the trials of a sweep, from what its directory has to the end.

    Attributes:
        queue: where every trial stands.
        retrained: how the retrained arms ended.
    """

    def __init__(
        self,
        sweep: Sweep,
        budget: BudgetTracker,
        policy: Policy,
        max_concurrent: int | None = None,
        search: OptunaSearch | None = None,
    ) -> None:
        known = [*costs(sweep.base, 1), "cost/marginal_train_flops_6mac"]
        if sweep.cost not in known and isinstance(policy, MultiObjectiveASHA):
            raise UsageError(
                f"--stop-early judges by what a trial will cost, and {sweep.cost} is measured: leave out"
                f" --stop-early, or use one of {', '.join(known)}"
            )
        self.sweep = sweep
        self.budget = budget
        self.policy = policy
        self.search = search
        self.retrained: dict[str, Outcome] = {}
        self._predicted = set[Hashable]()
        self._directory = run_directory(sweep.base)
        trials = list(sweep.trials().values())
        trials += [t for arm, changes in self._drawn().items() for t in sweep.of_arm(arm, changes)]
        self.queue = TrialQueue(
            map(self._state, trials),
            policy,
            cluster_resources=most_resources(),
            quality=sweep.quality,
            max_concurrent=max_concurrent,
            admits=budget.admits,
            more=self._draw,
        )

    def recover(self) -> None:
        """Takes up the results and pauses that earlier processes left in the directory."""
        trials = [one.trial for one in self.queue.states.values()]
        with ThreadPoolExecutor(16) as pool:
            for trial, found in zip(trials, pool.map(_left, trials), strict=True):
                for outcome in found:
                    self.queue.record(trial.name, outcome)
        if self.search:
            seen = [(arm, changes, *self._values(arm)) for arm, changes in self._drawn().items()]
            self.search.restore(seen)

    def work(self, watch: Watch) -> None:
        """Works until nothing is left to do, or to pay for."""

        def began(job: Job) -> None:
            self.budget.begin(job, self.queue.states[job.trial.name])
            watch.began(job)

        def report(trial: Trial, step: int, metrics: Metrics) -> None:
            watch.report(trial.name, step, metrics)

        def done(job: Job, outcome: Outcome) -> None:
            one = self.queue.states[job.trial.name]
            self.budget.record(job, one, outcome)
            if isinstance(outcome, str):
                write_error(run_directory(job.trial.run), outcome)
            self.queue.done(job.trial.name, outcome)
            quality, cost = self._values(job.trial.arm)
            if self.search and cost is not None:
                self.search.tell(job.trial.arm, quality, cost)
            watch.ended(job.trial.name, outcome)

        hooks = Hooks(began=began, report=report, done=done, status=watch.status)
        run_jobs(self.sweep.base, self.queue, hooks)
        self._tell_predictions()

    def trials_left(self) -> int:
        """Trials that the budget did not hold."""
        waiting = sum(one.outcome is None for one in self.queue.states.values())
        return waiting if self.queue.out_of_budget else 0

    def failures(self) -> dict[str, str]:
        """run -> why it failed, of trials and retrained arms."""
        ends = {**self.outcomes(), **self.retrained}
        return {name: end for name, end in ends.items() if isinstance(end, str)}

    def trial_of(self, arm: str) -> Trial:
        """The first seed of an arm."""
        trials = (one.trial for one in self.queue.states.values())
        return next(trial for trial in trials if trial.arm == arm and trial.role == "trial")

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
        search, policy = self.search, self.policy
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
        if not self.search:
            return []
        self._tell_predictions()
        known = {one.trial.arm for one in self.queue.states.values()}
        while (arm := self.search.next()) and arm.name in known:
            pass  # an earlier process began it
        if arm is None:
            return []
        trials = self.sweep.of_arm(arm.name, arm.changes)
        record = read_sweep(self._directory)
        assert record is not None
        drawn = {trial.name: labels_of(trial, bool(self.sweep.seeds)) for trial in trials}
        write_sweep(
            self._directory,
            replace(
                record,
                arms={**record.arms, arm.name: dict(arm.changes)},
                drawn=[*record.drawn, arm.name],
                trials=record.trials | drawn,
            ),
        )
        return [self._state(trial) for trial in trials]

    def _drawn(self) -> dict[str, dict[str, Any]]:
        """Arms that a search has drawn, by name."""
        record = read_sweep(self._directory)
        return {arm: record.arms[arm] for arm in record.drawn} if record else {}

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


def labels_of(trial: Trial, seeded: bool) -> dict[str, str]:
    """What `sweep.json` says of a trial: its directory, and tags of its MLflow run."""
    labels = {"directory": f"trials/{trial.name}", "role": trial.role, "arm": trial.arm}
    if seeded:
        labels["seed"] = str(trial.run.train.seed)
    if trial.after:
        labels |= {"branch.of": trial.after, "branch.from": trial.run.train.trunk or ""}
    return labels


def _left(trial: Trial) -> list[Result]:
    """Pauses in their order, then the end."""
    result = result_of(trial.run)
    return [*pauses_of(trial.run), *([result] if result else [])]


def keep_weights_only(trials: Iterable[Trial], frontier: Frontier) -> int:
    """Drops the optimiser states of complete trials off the frontier; returns the bytes that it freed."""
    front = {point.arm for point in frontier.front}
    off = [t.run for t in trials if t.role == "trial" and t.arm not in front and result_of(t.run)]
    return sum(drop_optimizer(checkpoint_directory(run)) for run in off)
