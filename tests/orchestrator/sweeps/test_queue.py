"""The next trial: order, devices, budget, dependencies."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.runs.run_directory import Result
from orchestrator.sweeps.queue import (
    PATIENCE,
    Job,
    RunToCompletion,
    TrialQueue,
    TrialState,
    new_trial_state,
)
from orchestrator.sweeps.stopping import EarlyStopping
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.resources import run_resources

DONE = Result(status="finished", step=200, metrics={"val/acc1": 0.5})


def state(
    name: str,
    *,
    workers: int = 1,
    cost: float = 1.0,
    after: str | None = None,
    flops: float | None = None,
    **changes: Any,
) -> TrialState:
    run = override(RunConfig(), {"scale.workers": workers, "model.moe": None, **changes})
    trial = Trial(name=name, arm=name, changes={}, run=run, after=after)
    return new_trial_state(trial, cost=cost, need=run_resources(run), flops=flops)


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


def test_a_branch_has_only_the_steps_after_its_trunk():
    """It leaves the trunk at step 60 of 100, and pauses at 90."""
    trunk = {"train.steps": 100, "train.trunk": "/runs/trunk/checkpoints/step-00000060"}
    branch, whole = state("branch", cost=5.0, flops=2.0, **trunk), state("whole", cost=5.0)
    assert (branch.begins_at, branch.part(70), branch.part(100)) == (60, 0.25, 1)
    branch.reached[90] = 0.5
    assert (branch.begins_at, branch.part(70), branch.part(100)) == (90, 0, 0.25)
    assert (branch.cost, branch.flops, whole.flops) == (5, 2, 5)
    assert (branch.finished, branch.failed) == (False, False)
    branch.outcome = replace(DONE, status="paused")
    assert (branch.finished, branch.failed) == (False, True), "what does not go on from a pause has failed"


class Halves:
    """A policy that trains the trials it is to take in two jobs of half the steps."""

    def __init__(self, *taken: str) -> None:
        self.taken = taken

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        for each in states:
            if each.waiting and each.name in self.taken:
                yield Job(state=each, until=200 if 100 in each.reached else 100)


def test_every_end_of_a_job_is_told_with_its_last_step():
    """Also with what it was taken for: a pause without a quality is a failure."""
    ended = list[tuple[str, int, object]]()
    work = queue(state("a"), state("b"), cpus=1, ended=lambda job, how: ended.append((*ends(job), how)))
    work.policy = Halves("a", "b")
    pause = Result(status="paused", step=100, metrics={"val/acc1": 0.25})
    assert names(work) == ["a"]
    work.done("a", pause)
    assert (work.states["a"].reached, work.states["a"].outcome) == ({100: 0.25}, None)
    assert names(work) == ["a"]
    work.done("a", replace(DONE, step=150))  # good enough before its last step
    assert work.states["a"].reached == {100: 0.25, 200: 0.5}
    assert work.states["a"].finished
    assert names(work) == ["b"]
    work.done("b", replace(pause, metrics={}))
    assert ended == [
        ("a", 100, pause),
        ("a", 200, replace(DONE, step=150)),
        ("b", 100, "val/acc1 is nan at step 100"),
    ]


def ends(job: Job) -> tuple[str, int]:
    return job.state.name, job.until


def test_no_more_jobs_run_than_are_allowed():
    work = queue(*(state(name) for name in "abcd"), cpus=9, max_concurrent=2)
    assert names(work) == ["a", "b"]
    work.done("a", DONE)
    work.release("a")  # its process dies after its end
    assert names(work) == ["c"]


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

    ended = queue(state("trunk"), state("branch", after="trunk"), cpus=4)
    ended.record("branch", DONE)  # of an earlier process
    ended.record("trunk", "out of memory")
    assert ended.states["branch"].outcome == DONE


def test_the_budget_refuses_trials_and_no_arm_is_drawn_instead():
    dear, cheap, drawn = state("dear", cost=3), state("cheap"), state("drawn")
    work = queue(dear, cheap, cpus=4, admits=lambda job, state: state.cost < 2, more=lambda: [drawn])
    assert names(work) == ["cheap"]
    assert work.out_of_budget
    work = queue(state("dear"), cpus=0, admits=lambda job, state: False)
    assert (names(work), work.out_of_budget) == ([], True), "nor does it wait for devices"


def test_arms_are_drawn_when_they_can_start():
    """The third arm is drawn when another has ended and its result is known."""
    arms = iter("abc")
    work = queue(cpus=2, more=lambda: [state(arm) for arm in islice(arms, 1)])
    assert names(work) == list(work.states) == ["a", "b"]
    work.done("a", DONE)
    assert names(work) == ["c"]


@pytest.mark.parametrize("runs", [True, False])
def test_while_a_trial_runs_one_arm_is_drawn_at_a_time(runs: bool):
    """The policy takes none of the arms that are drawn. The result of a running trial may change that, and
    guides the next draw; without one nothing does."""
    arms = iter("abcd")
    work = queue(*[state("first")] * runs, cpus=2, more=lambda: [state(arm) for arm in islice(arms, 1)])
    work.policy = Halves("first")
    assert names(work) == ["first"] * runs
    assert list(work.states) == (["first", "a"] if runs else [*"abcd"])
    if runs:
        assert names(work) == []
        assert list(work.states) == ["first", "a"], "nothing has changed"
        work.done("first", Result(status="paused", step=100, metrics={"val/acc1": 0.5}))
        assert names(work) == ["first"]
        assert list(work.states) == ["first", "a", "b"], "a result may guide the next draw"


def test_no_arm_is_drawn_while_a_large_trial_waits_for_room():
    small = [state(f"s{i}") for i in range(PATIENCE + 1)]
    work = queue(small[0], cpus=3)
    running = names(work)
    for one in (state("large", workers=4), *small[1:]):
        work.add(one)
    while work.states["large"].skipped_count < PATIENCE:
        running += names(work)
        work.done(running.pop(0), DONE)
    work.more = lambda: [state("drawn")]
    assert not {"large", "drawn"} & {*names(work)}
    assert "drawn" not in work.states


def test_the_queue_looks_again_once_a_trial_is_added_released_or_recorded():
    work = queue(state("trunk"), state("branch", after="trunk"), state("other"), cpus=2, max_concurrent=2)
    changes: list[tuple[Any, list[str]]] = [
        (lambda: work.done("other", DONE), []),
        (lambda: work.add(state("late")), ["late"]),
        (lambda: work.release("late"), ["late"]),
        (lambda: work.done("late", DONE), []),
        (lambda: work.record("trunk", DONE), ["branch"]),
    ]
    assert names(work) == ["trunk", "other"]
    for change, started in changes:
        assert names(work) == []
        change()
        assert names(work) == started


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

    policy, refused = Counted(), ["b"]
    work = TrialQueue(
        [state("a"), state("b")],
        policy,
        cluster_resources=lambda: {"CPU": 2},
        quality="val/acc1",
        admits=lambda job, state: state.name not in refused,
    )
    assert [names(work) for _ in range(5)] == [["a"], [], [], [], []]
    assert policy.calls == 2, "a was taken, and b refused"
    refused.clear()
    assert names(work) == [], "the budget alone changes at the end of a trial"
    work.done("a", DONE)
    work.add(state("c"))
    assert names(work) == ["b", "c"]


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
