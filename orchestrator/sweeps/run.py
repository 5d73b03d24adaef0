"""The trials of a sweep: what its directory has of them, which is next, what they may cost."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean
from typing import Any

from orchestrator.checkpoint.manager import drop_optimizer
from orchestrator.config import RunConfig
from orchestrator.frontier.frontier import Frontier
from orchestrator.sweeps.agenda import Agenda, Job, Outcome, Policy, Standing
from orchestrator.sweeps.branches import branch_step
from orchestrator.sweeps.budget import BudgetTracker
from orchestrator.sweeps.engine import Hooks, run_jobs
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
        agenda: where every trial stands.
    """

    def __init__(
        self,
        sweep: Sweep,
        budget: BudgetTracker,
        policy: Policy,
        max_concurrent: int | None = None,
        search: OptunaSearch | None = None,
    ) -> None:
        self.sweep = sweep
        self.budget = budget
        self.search = search
        self._directory = run_directory(sweep.base)
        trials = list(sweep.trials().values())
        trials += [t for arm, changes in self._drawn().items() for t in sweep.of_arm(arm, changes)]
        self.agenda = Agenda(
            map(self._standing, trials),
            policy,
            most=most_resources(),
            quality=sweep.quality,
            at_once=max_concurrent,
            admits=budget.admits,
            more=self._draw,
        )

    def recover(self) -> None:
        """Takes up the results and pauses that earlier processes left in the directory."""
        trials = [one.trial for one in self.agenda.standings.values()]
        with ThreadPoolExecutor(16) as pool:
            for trial, found in zip(trials, pool.map(_left, trials), strict=True):
                for outcome in found:
                    self.agenda.record(trial.name, outcome)
        if self.search:
            seen = [(arm, changes, *self._values(arm)) for arm, changes in self._drawn().items()]
            self.search.restore(seen)

    def work(self, watch: Watch) -> None:
        """Works until nothing is left to do, or to pay for."""

        def began(job: Job) -> None:
            self.budget.begin(job, self.agenda.standings[job.trial.name])
            watch.began(job)

        def report(trial: Trial, step: int, metrics: Metrics) -> None:
            watch.report(trial.name, step, metrics)

        def done(job: Job, outcome: Outcome) -> None:
            one = self.agenda.standings[job.trial.name]
            self.budget.record(job, one, outcome)
            if isinstance(outcome, str):
                write_error(run_directory(job.trial.run), outcome)
            self.agenda.done(job.trial.name, outcome)
            quality, cost = self._values(job.trial.arm)
            if self.search and cost is not None:
                self.search.tell(job.trial.arm, quality, cost)
            watch.ended(job.trial.name, outcome)

        hooks = Hooks(began=began, report=report, done=done, status=watch.status)
        run_jobs(self.sweep.base, self.agenda, hooks)

    def trials_left(self) -> int:
        """Trials that the budget did not hold."""
        waiting = sum(one.outcome is None for one in self.agenda.standings.values())
        return waiting if self.agenda.out_of_budget else 0

    def trial_of(self, arm: str) -> Trial:
        """The first seed of an arm."""
        trials = (one.trial for one in self.agenda.standings.values())
        return next(trial for trial in trials if trial.arm == arm and trial.role == "trial")

    def outcomes(self) -> dict[str, Outcome]:
        """trial -> how it ended, of those that did."""
        return {name: one.outcome for name, one in self.agenda.standings.items() if one.outcome is not None}

    def _standing(self, trial: Trial) -> Standing:
        own = trial.run.train.steps - branch_step(trial.run)
        flops = costs(trial.run, own)["cost/train_flops_6mac"]
        known = costs(trial.run, trial.run.train.steps) | {"cost/marginal_train_flops_6mac": flops}
        cost = known.get(self.sweep.cost, known["cost/train_flops_6mac"])
        return Standing(trial, cost=cost, need=run_resources(trial.run), flops=flops)

    def _draw(self) -> list[Standing]:
        if not self.search:
            return []
        known = {one.trial.arm for one in self.agenda.standings.values()}
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
        return [self._standing(trial) for trial in trials]

    def _drawn(self) -> dict[str, dict[str, Any]]:
        """Arms that a search has drawn, by name."""
        record = read_sweep(self._directory)
        return {arm: record.arms[arm] for arm in record.drawn} if record else {}

    def _values(self, arm: str) -> tuple[float | None, float | None]:
        """Quality and cost of an arm, means over its seeds: both None while it is not over, the quality None
        if it did not finish.
        """
        ones = [one for one in self.agenda.standings.values() if one.trial.arm == arm]
        ends = [one.outcome for one in ones]
        if any(end is None for end in ends):
            return None, None
        done = [end for end in ends if isinstance(end, Result) and end.status == "finished"]
        quality = fmean(end.metrics[self.sweep.quality] for end in done) if len(done) == len(ones) else None
        return quality, fmean(one.cost for one in ones)


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
