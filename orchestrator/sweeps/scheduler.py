"""Early stopping, and a queue of trials, as a scheduler of Ray Tune: of a sweep, or of any `ray.tune.Tuner`.

docs/early_stopping.md shows its use, and what Tune lacks for it.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import ray
from ray.tune import PlacementGroupFactory
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from orchestrator.errors import reason_of
from orchestrator.runs.notice import Stopped
from orchestrator.runs.run_directory import Result
from orchestrator.sweeps.queue import Job, TrialQueue, TrialState
from orchestrator.sweeps.stopping import EarlyStopping

TrialConfig = Mapping[str, Any]
OUTCOME = (
    "outcome"  # key of a report with which a function says itself how its job ended: `Outcome` or `Stopped`
)


class FrontierScheduler(TrialScheduler):
    """Early stopping for the frontier of quality against cost, in any `ray.tune.Tuner` with a function.

    The function reports `metric` and `time_attr` with a checkpoint at every rung. It goes on from
    `tune.get_checkpoint()`, since the process of a paused trial ends.

    Tune starts pending trials without asking its scheduler. A trial is therefore held as paused until the
    queue returns its job. A trial of a searcher that called `new_job` starts at once.

    Args:
        cost: returns the cost of a whole trial; smaller is better.
        steps: returns the last step of a trial.
        metric: name of the quality; larger is better.
        time_attr: name of the reported step, which must count on after a pause. `training_iteration` begins
            at 1 again if the trainable reports no checkpoints. A report without this name is never a rung.
        arm: trials with the same value are seeds of one arm; by default trials that differ in ``seed`` alone.
        need: returns resources that a trial takes beside those that Tune reserves for it.
        cluster_resources: returns the resources of the cluster; by default those that are up now.
        known: returns step -> quality, as an earlier sweep reached it with the config.
        budget: bound of the cost of all jobs that are started.
        chance: quality that the hypervolume counts from.
    """

    def __init__(
        self,
        *,
        cost: Callable[[TrialConfig], float],
        steps: Callable[[TrialConfig], int],
        metric: str,
        time_attr: str = "training_iteration",
        arm: Callable[[TrialConfig], Hashable] = lambda config: str(
            {k: config[k] for k in config if k != "seed"}
        ),
        need: Callable[[TrialConfig], Mapping[str, float]] = lambda config: {},
        cluster_resources: Callable[[], Mapping[str, float]] = ray.cluster_resources,
        known: Callable[[TrialConfig], Mapping[int, float]] = lambda config: {},
        budget: float = math.inf,
        chance: float = 0.0,
    ) -> None:
        super().__init__()
        self.policy = EarlyStopping(chance=chance)
        self.queue = TrialQueue(
            (),
            self.policy,
            cluster_resources=cluster_resources,
            quality=metric,
            admits=self._affords,
        )
        self.time_attr = time_attr
        self.cost, self.steps, self.arm, self.need, self.known = cost, steps, arm, need, known
        self.budget = budget
        self.spent = 0.0  # cost of all jobs that were started
        self.controller: Any = None  # Tune's, once it has asked for a trial
        self._trials: dict[str, Trial] = {}  # by the name of the state
        self._states: dict[str, TrialState] = {}  # by Tune's trial id
        self._due: list[Job] = []  # admitted but not started
        self.saved: dict[str, int] = {}  # the last step of trials that were asked to stop

    @classmethod
    def of_queue(cls, queue: TrialQueue) -> "FrontierScheduler":
        """Returns the scheduler of a sweep, whose queue has its trials before Tune: see `new_job`."""
        scheduler = cls(cost=lambda config: math.nan, steps=lambda config: 0, metric=queue.quality)
        scheduler.queue = queue
        return scheduler

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return True  # there are two metrics

    def fetch(self) -> Job | None:
        """Admits the next job of the queue. It starts once Tune can start it."""
        # Tune drops a trial whose process it cannot reuse, and calls nothing.
        for trial in self._trials.values():
            if trial.status == Trial.ERROR and self._states[trial.trial_id].running:
                self._gave_up(trial, "its process could not be reused")
        if (job := self.queue.next()) is not None:
            self._due.append(job)
            self.spent += job.state.cost * job.state.part(job.until)
        return job

    def new_job(self, trial_id: str) -> Job | None:
        """Returns the job to start now as a trial that Tune does not know yet."""
        if (job := self._next_job(lambda job: job.state.name not in self._trials)) is not None:
            self._states[trial_id] = job.state
        return job

    def job_of(self, trial: Trial) -> Job:
        """Returns the last job of a trial, which may still run."""
        state = self._states[trial.trial_id]
        return Job(state=state, until=state.until)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        state = self._states.get(trial.trial_id) or self._new_state(trial)
        if state.name in self._trials:
            # The trial's process died, perhaps with its machine. Tune would start another at once, though the
            # trials that run may need all that is left.
            tune_controller._set_trial_status(trial, Trial.PAUSED)
            if state.running and not any(job.state is state for job in self._due):
                self.spent -= state.cost * state.part(state.until)
                self.queue.release(state.name)
            return
        self._states[trial.trial_id] = state
        self._trials[state.name] = trial
        if not state.running:
            self.queue.add(state)
            # Without a local path Tune raises at the very end, if the trial never has a process.
            trial.init_local_path()
            trial.set_status(Trial.PAUSED if state.outcome is None else Trial.TERMINATED)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        state, reported = self._states[trial.trial_id], result.get(OUTCOME)
        if isinstance(reported, Stopped):
            self.queue.release(state.name)
            self.saved |= reported.saved
            return self.PAUSE
        outcome = reported or self._at_rung(state, result)
        if result.get("done") or not isinstance(outcome, Result) or outcome.status != "paused":
            return self.CONTINUE  # at its end the function returns by itself
        self.queue.done(state.name, outcome)
        # A function that reports its outcome has stopped already.
        if not reported and (job := self.fetch()) is not None and job.state is state:
            self._due.remove(job)
            return self.CONTINUE
        return self.STOP if state.failed else self.PAUSE

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        state, reported = self._states[trial.trial_id], result.get(OUTCOME)
        # Tune also completes what it has paused after a notice, when it ends.
        if not state.failed and not isinstance(reported, Stopped):
            self.queue.done(state.name, reported or self._result("finished", state.steps, result))

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        # Before a restart Tune calls this too, and has set the status by then.
        if trial.status != Trial.ERROR:
            self._gave_up(trial, f"its process died {trial.run_metadata.num_failures} times")

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        """Is called when a held trial is stopped."""

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        self.controller = tune_controller
        if (job := self._next_job(self._is_paused)) is not None:
            trial = self._trials[job.state.name]
            if "until" in trial.config:
                trial.set_config(trial.config | {"until": job.until})
            return trial
        over = self.queue.out_of_budget or tune_controller.search_alg.is_finished()
        if over and not self.queue.num_running:
            tune_controller.search_alg.set_finished()
            # Tune would wait for ever for the paused trials.
            for trial in self._trials.values():
                tune_controller.stop_trial(trial)
        return None

    def debug_string(self) -> str:
        return f"{type(self).__name__}: {self.queue.num_running} of {len(self.queue.states)} trials run"

    def _new_state(self, trial: Trial) -> TrialState:
        config, reserved = trial.config, trial.placement_group_factory
        assert isinstance(reserved, PlacementGroupFactory)
        need: dict[str, float] = dict(reserved.required_resources)
        for name, amount in self.need(config).items():
            need[name] = need.get(name, 0.0) + amount
        state = TrialState(
            trial.trial_id, arm=self.arm(config), cost=self.cost(config), steps=self.steps(config), need=need
        )
        state.reached = dict(self.known(config))
        if state.finished:
            state.outcome = self._result(
                "finished", state.steps, {self.queue.quality: state.reached[state.steps]}
            )
        return state

    def _at_rung(self, state: TrialState, result: dict[str, Any]) -> Result | None:
        step = result.get(self.time_attr, 0)
        goes_on = step < state.until and math.isfinite(result.get(self.queue.quality, 0.0))
        return (
            None if goes_on or step >= state.steps else self._result("paused", min(step, state.until), result)
        )

    def _gave_up(self, trial: Trial, how: str) -> None:
        self.queue.done(self._states[trial.trial_id].name, f"{how}: {reason_of(trial.get_error())}")

    def _affords(self, job: Job, state: TrialState) -> bool:
        return self.spent + state.cost * state.part(job.until) <= self.budget

    def _is_paused(self, job: Job) -> bool:
        # The process of a trial that was just paused may not have ended yet.
        trial = self._trials.get(job.state.name)
        return trial is not None and trial.status == Trial.PAUSED

    def _next_job(self, startable: Callable[[Job], bool]) -> Job | None:
        while (job := next(filter(startable, self._due), None)) is None:
            if self.fetch() is None:
                return None
        self._due.remove(job)
        return job

    def _result(self, status: Literal["finished", "paused"], step: int, result: dict[str, Any]) -> Result:
        quality = self.queue.quality
        return Result(status=status, step=step, metrics={quality: result.get(quality, math.nan)})
