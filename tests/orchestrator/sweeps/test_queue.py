"""The next trial: order, devices, budget, dependencies."""

import math
import random
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.queue import PATIENCE, RunToCompletion, TrialQueue, TrialState, new_trial_state
from orchestrator.sweeps.stopping import EarlyStopping
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.resources import run_resources
from orchestrator.training.run_directory import Result

DONE = Result(status="finished", step=200, metrics={"val/acc1": 0.5})


def state(name: str, *, workers: int = 1, cost: float = 1.0, after: str | None = None) -> TrialState:
    run = override(RunConfig(), {"scale.workers": workers, "model.moe": None})
    trial = Trial(name=name, arm=name, changes={}, run=run, after=after)
    return new_trial_state(trial, cost=cost, need=run_resources(run))


def queue(*states: TrialState, cpus: float, **options: Any) -> TrialQueue:
    fixed: dict[str, Any] = {"cluster_resources": lambda: {"CPU": cpus}, "quality": "val/acc1"}
    return TrialQueue(states, RunToCompletion(), **fixed, **options)


def names(work: TrialQueue) -> list[str]:
    """Starts all jobs that can start now."""
    return [job.state.name for job in iter(work.next, None)]


def test_with_a_budget_the_cheapest_arms_are_first_with_all_their_seeds():
    """Without one, the trials of most workers are."""
    states = [
        state(f"{arm}{seed}", cost=cost) for seed in "01" for arm, cost in (("b", 2), ("a", 2), ("c", 1))
    ]
    for each in states:
        each.arm = each.name[0]
    policy = RunToCompletion(cheapest_first=True)
    assert [job.state.name for job in policy.jobs(states)] == ["c0", "c1", "a0", "a1", "b0", "b1"]
    large = state("large", workers=2, cost=9)
    assert next(iter(RunToCompletion().jobs([*states, large]))).state is large


def test_running_trials_fit_the_devices_and_all_are_done():
    """Mixed trials of 1, 2 and 4 workers (1, 2 and 3 CPUs) on 4 CPUs, in random order of their ends."""
    chance = random.Random(0)
    states = {
        f"w{w}-{i}": state(f"w{w}-{i}", workers=w) for i, w in enumerate([1, 4, 2, 1, 2, 4, 1, 1, 2] * 3)
    }
    work = queue(*states.values(), cpus=4)
    order = names(work)
    running = list(order)
    assert order[0].startswith("w4")
    while running:
        used = sum(states[name].need["CPU"] for name in running)
        waiting = [one for one in states.values() if one.waiting]
        smallest = min((one.need["CPU"] for one in waiting), default=9)
        assert used <= 4
        assert used + smallest > 4 or any(one.skipped_count >= PATIENCE for one in waiting)
        work.done(running.pop(chance.randrange(len(running))), DONE)
        started = names(work)
        order += started
        running += started
    assert sorted(order) == sorted(states)


def test_a_large_trial_is_not_skipped_for_ever():
    """It needs all 3 CPUs while small trials keep coming. After PATIENCE of them all wait for it."""
    small = [state(f"s{i}") for i in range(40)]
    work = queue(small[0], cpus=3)
    running = names(work)
    for one in (state("large", workers=4), *small[1:]):
        work.add(one)
    started = 1
    while "large" not in running:
        now = names(work)
        started += len(now)
        running += now
        if "large" not in running:
            work.done(running.pop(0), DONE)
    assert started <= PATIENCE + 3


def test_a_branch_waits_for_its_trunk_and_fails_with_it():
    work = queue(state("trunk"), state("branch", after="trunk"), cpus=4)
    assert names(work) == ["trunk"]
    work.done("trunk", DONE)
    assert names(work) == ["branch"]

    for outcome in ("out of memory", replace(DONE, status="diverged")):
        failed = queue(state("trunk"), state("branch", after="trunk"), cpus=4)
        failed.next()
        failed.done("trunk", outcome)
        assert failed.next() is None
        assert failed.states["branch"].outcome == "its trunk trunk did not finish"


def test_the_budget_refuses_trials_and_no_arm_is_drawn_instead():
    dear, cheap, drawn = state("dear", cost=3), state("cheap"), state("drawn")
    work = queue(dear, cheap, cpus=4, admits=lambda job, state: state.cost < 2, more=lambda: [drawn])
    assert names(work) == ["cheap"]
    assert work.out_of_budget


def test_arms_are_drawn_when_they_can_start():
    """The third arm is drawn when another has ended and its result is known."""
    arms = iter("abc")
    work = queue(cpus=2, more=lambda: [state(arm) for arm in islice(arms, 1)])
    assert names(work) == list(work.states) == ["a", "b"]
    work.done("a", DONE)
    assert names(work) == ["c"]


def test_seeds_make_trials_of_one_arm(digits):
    base = override(RunConfig(), {"data.path": digits})
    trials = Sweep(base=base, arms={"dense": {}}, seeds=(0, 1, 2)).trials()
    assert list(trials) == ["dense-seed0", "dense-seed1", "dense-seed2"]
    assert {trial.arm for trial in trials.values()} == {"dense"}
    assert [trial.run.train.seed for trial in trials.values()] == [0, 1, 2]


@pytest.mark.parametrize("outcome", [DONE, "failed"])
def test_a_recorded_trial_is_not_done_again(outcome):
    work = queue(state("a"), state("b"), cpus=4)
    work.record("a", outcome)
    assert names(work) == ["b"]


@pytest.mark.parametrize("status", ["paused", "finished"])
@pytest.mark.parametrize("metrics", [{}, {"val/acc1": math.nan}, {"val/acc1": math.inf}])
def test_a_trial_without_a_quality_has_failed(status, metrics):
    """Its arm costs nothing more, under early stopping too."""
    work = queue(state("a"), state("b"), cpus=1)
    work.policy = EarlyStopping(chance=0.1)
    (first,) = names(work)
    work.done(first, Result(status=status, step=4, metrics=metrics))
    assert work.states[first].outcome == f"val/acc1 is {metrics.get('val/acc1', math.nan)} at step 4"
    assert (work.states[first].failed, work.states[first].reached) == (True, {})
    assert [first, *names(work)] in (["a", "b"], ["b", "a"])


def test_an_event_that_changes_nothing_does_not_rank_again():
    """Tune asks after every event. The answer to wait holds until a trial ends or is added."""

    class Counted(RunToCompletion):
        calls = 0

        def jobs(self, states):
            self.calls += 1
            return super().jobs(states)

    policy = Counted()
    work = TrialQueue(
        [state("a"), state("b")], policy, cluster_resources=lambda: {"CPU": 1}, quality="val/acc1"
    )
    assert [names(work) for _ in range(5)] == [["a"], [], [], [], []]
    assert policy.calls == 1
    work.done("a", DONE)
    work.add(state("c"))
    assert names(work) == ["b"]


def test_a_trial_whose_machine_is_lost_waits_for_room():
    """Three trials of 2 CPUs on three machines of 2. One machine goes with its trial, and comes back."""
    cluster = {"CPU": 6.0}
    work = queue(*(state(name, workers=2) for name in "abcd"), cpus=0)
    work.cluster_resources = lambda: cluster
    assert names(work) == ["a", "b", "c"]
    cluster = {"CPU": 4.0}
    work.release("b")
    assert names(work) == []
    cluster = {"CPU": 6.0}
    assert names(work) == ["b"]
    work.done("a", DONE)
    assert names(work) == ["d"]


def test_while_no_machine_is_up_the_first_trial_waits_at_ray():
    """The sweep is not over, and an autoscaler learns what is needed."""
    work = queue(state("a"), state("b"), cpus=0)
    assert names(work) == ["a"]
    work.done("a", DONE)
    assert names(work) == ["b"]
    work.done("b", DONE)
    assert names(work) == []
