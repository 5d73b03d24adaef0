"""Which trial is next: order, devices, budget, dependencies."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.queue import PATIENCE, Job, RunToCompletion, TrialQueue, TrialState, state_of
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.resources import run_resources
from orchestrator.training.run_directory import Result

DONE = Result(status="finished", step=200, metrics={"val/acc1": 0.5})


def state(name: str, *, workers: int = 1, cost: float = 1.0, after: str | None = None) -> TrialState:
    run = override(RunConfig(), {"scale.workers": workers, "model.moe": None})
    trial = Trial(name=name, arm=name, changes={}, run=run, after=after)
    return state_of(trial, cost=cost, need=run_resources(run))


def queue(*states: TrialState, cpus: float, **options: object) -> TrialQueue:
    resources = {"CPU": cpus}
    return TrialQueue(
        states,
        RunToCompletion(),
        cluster_resources=resources,
        quality="val/acc1",
        **options,  # pyright: ignore
    )


def test_what_runs_never_needs_more_than_there_is_and_all_is_done():
    """Mixed trials of 1, 2 and 4 workers (1, 2 and 3 CPUs) on 4 CPUs, in random order of their ends."""
    chance = random.Random(0)
    ones = [state(f"w{w}-{i}", workers=w) for i, w in enumerate([1, 4, 2, 1, 2, 4, 1, 1, 2] * 3)]
    work = queue(*ones, cpus=4)
    running: dict[str, Mapping[str, float]] = {}
    order: list[str] = []
    while True:
        while (job := work.next()) is not None:
            running[job.trial.name] = run_resources(job.trial.run)
            order.append(job.trial.name)
        if not running:
            break
        used = sum(need["CPU"] for need in running.values())
        assert used <= 4
        waiting = [one for one in ones if one.waiting]
        smallest = min((one.need["CPU"] for one in waiting), default=9)
        assert used + smallest > 4 or any(one.skipped_count >= PATIENCE for one in waiting)  # nothing idles
        name = chance.choice(sorted(running))
        del running[name]
        work.done(name, DONE)
    assert sorted(order) == sorted(one.name for one in ones)
    assert all(name.startswith("w4") for name in order[:1])


def test_a_large_trial_is_not_skipped_for_ever():
    """It needs all 3 CPUs while small trials keep coming; after PATIENCE of them all wait for it."""
    small = [state(f"s{i}") for i in range(40)]
    work = queue(small[0], cpus=3)
    assert work.next() is not None
    large = state("large", workers=4)
    work.states |= {one.name: one for one in (large, *small[1:])}
    running, started = ["s0"], 1
    while "large" not in running:
        while (job := work.next()) is not None:
            running.append(job.trial.name)
            started += 1
        if "large" not in running:
            work.done(running.pop(0), DONE)
    assert started <= PATIENCE + 3


def test_a_branch_waits_for_its_trunk_and_falls_with_it():
    work = queue(state("trunk"), state("branch", after="trunk"), cpus=4)
    first = work.next()
    assert first is not None
    assert first.trial.name == "trunk"
    assert work.next() is None
    work.done("trunk", DONE)
    second = work.next()
    assert second is not None
    assert second.trial.name == "branch"

    for outcome in ("out of memory", replace(DONE, status="diverged")):
        fallen = queue(state("trunk"), state("branch", after="trunk"), cpus=4)
        fallen.next()
        fallen.done("trunk", outcome)
        assert fallen.next() is None
        assert fallen.states["branch"].outcome == "its trunk trunk did not finish"


def test_the_budget_leaves_out_what_it_does_not_hold():
    """And while the budget refuses a trial, no further arm is drawn."""

    def admits(job: Job, state: TrialState) -> bool:
        return state.cost < 2

    dear, cheap, drawn = state("dear", cost=3), state("cheap"), state("drawn")
    work = queue(dear, cheap, cpus=4, admits=admits, more=lambda: [drawn])
    job = work.next()
    assert job is not None
    assert job.trial.name == "cheap"
    assert work.next() is None
    assert work.out_of_budget


def test_arms_are_drawn_when_they_can_start():
    names = iter("abc")

    def more() -> list[TrialState]:
        name = next(names, None)
        return [state(name)] if name else []

    work = queue(cpus=2, more=more)
    assert [job.trial.name for job in iter(work.next, None)] == ["a", "b"]
    assert list(work.states) == ["a", "b"]  # "c" is drawn when one has ended, and its result is known
    work.done("a", DONE)
    job = work.next()
    assert job is not None
    assert job.trial.name == "c"


def test_seeds_make_trials_of_one_arm(digits):
    base = override(RunConfig(), {"data.path": digits})
    trials = Sweep(base=base, arms={"dense": {}}, seeds=(0, 1, 2)).trials()
    assert list(trials) == ["dense-seed0", "dense-seed1", "dense-seed2"]
    assert {trial.arm for trial in trials.values()} == {"dense"}
    assert [trial.run.train.seed for trial in trials.values()] == [0, 1, 2]


@pytest.mark.parametrize("outcome", [DONE, "failed"])
def test_what_is_recorded_is_not_done_again(outcome):
    work = queue(state("a"), state("b"), cpus=4)
    work.record("a", outcome)
    assert [job.trial.name for job in iter(work.next, None)] == ["b"]


def test_an_event_that_changes_nothing_does_not_rank_again():
    """Tune asks after every event: an answer of "wait" holds until a trial ends or is added."""
    calls = 0

    class Counted(RunToCompletion):
        def jobs(self, states):
            nonlocal calls
            calls += 1
            return super().jobs(states)

    work = TrialQueue([state("a"), state("b")], Counted(), cluster_resources={"CPU": 1}, quality="val/acc1")
    assert work.next() is not None
    for _ in range(5):
        assert work.next() is None
    assert calls == 1
    work.done("a", DONE)
    assert work.next() is not None
    work.add(state("c"))
    assert work.next() is None
