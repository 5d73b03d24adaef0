"""Early stopping: the expected gain of an arm, which arm goes on, which is passed by, and that it ends."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, strategies as st

from orchestrator.frontier.pareto import hypervolume_2d
from orchestrator.runs.run_directory import Result
from orchestrator.sweeps.queue import TrialQueue, TrialState
from orchestrator.sweeps.stopping import EarlyStopping, expected_gains

STEPS, RUNG = 160, 20
arms_of = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=8)


def hypervolume(x: np.ndarray, quality: np.ndarray) -> float:
    return hypervolume_2d(np.column_stack([x, -quality]), np.array([x[-1] + math.log10(1.1), 0.0]))


@given(arms_of)
def test_what_a_certain_arm_adds_is_the_difference_of_two_hypervolumes(arms):
    x, quality, taken = (np.array(column) for column in zip(*sorted(arms), strict=True))
    x, quality = x.astype(float), quality / 10
    gains = expected_gains(x, quality, np.full(len(x), 1e-9), np.where(taken, quality, 0.0))
    for i, gain in enumerate(gains):
        others = np.where(taken & (np.arange(len(x)) != i), quality, 0.0)
        added = np.where(np.arange(len(x)) == i, quality, others)
        assert gain == pytest.approx(hypervolume(x, added) - hypervolume(x, others), abs=1e-8)


def test_what_an_uncertain_arm_adds_is_the_mean_over_its_distribution():
    x, mean, sd = np.array([0.0, 0.5, 1.0]), np.array([0.5, 0.6, 0.8]), np.array([0.1, 0.2, 0.1])
    taken = np.array([0.5, 0.0, 0.8])
    drawn = mean[1] + sd[1] * np.random.default_rng(0).normal(size=20_000)
    each = np.maximum(drawn - 0.5, 0) * 0.5 + np.maximum(drawn - 0.8, 0) * math.log10(1.1)
    got = expected_gains(x, mean, sd, taken)[1]
    assert abs(got - each.mean()) < 4 * each.std() / np.sqrt(len(drawn))


def state(
    name: str, cost: float, reached: dict[int, float] | None = None, arm: str | None = None
) -> TrialState:
    made = TrialState(name, arm=arm or name, cost=cost, steps=STEPS, need={"CPU": 1})
    made.reached = reached or {}
    if made.finished:
        made.outcome = "complete"
    return made


def seeds(arm: str, cost: float, *reached: dict[int, float]) -> list[TrialState]:
    return [state(f"{arm}{i}", cost, dict(steps), arm) for i, steps in enumerate(reached)]


def jobs(*states: TrialState) -> list[tuple[str, int]]:
    return [(job.state.name, job.until) for job in EarlyStopping(chance=0.1).jobs(states)]


def known(*qualities: float, cost: float = 1.0) -> list[TrialState]:
    """Complete arms of one cost, which are complete with 0.8 of their quality at the rung."""
    return [state(f"known{i}", cost, {RUNG: 0.8 * q, STEPS: q}) for i, q in enumerate(qualities)]


def test_from_cheap_to_dear_and_a_dear_arm_pauses_at_its_rung():
    """Four cheap arms train without pauses, all seeds at once; the others pause at an eighth of the steps."""
    assert jobs() == []
    cheap = [s for i in range(4) for s in seeds(f"cheap{i}", 10 ** (i / 10), {}, {})]
    dear = [*seeds("dear", 5.0, {}, {}), *seeds("last", 20.0, {}, {})]
    assert jobs(*dear, *cheap)[:8] == [(s.name, STEPS) for s in cheap]
    for s in cheap:
        s.reached, s.outcome = {RUNG: 0.4, STEPS: 0.5}, "complete"
    assert jobs(*dear, *cheap) == [("dear0", RUNG)]
    dear[0].reached = {RUNG: 0.5}
    assert jobs(*dear, *cheap) == [("dear0", STEPS)]


def test_an_arm_without_hope_is_passed_by_and_it_is_said_why():
    """The rungs of twelve arms of one cost have predicted their ends, so one with a low rung stops."""
    done = known(*np.linspace(0.3, 0.5, 12))
    bad, good = state("bad", 1.0, {RUNG: 0.15}), state("good", 1.0, {RUNG: 0.45})
    assert jobs(*done, bad, good) == [("good", STEPS)]
    passed = EarlyStopping(chance=0.1).passed_by([*done, bad, good])
    gain, cost = passed.pop("bad")
    assert (passed, cost) == ({}, pytest.approx(7 / 8 / 14))
    assert 0 < gain < 0.03 * cost


def test_small_arms_do_not_say_what_large_arms_gain():
    """The quality rises by little over a decade, and the rungs of large arms are low."""
    small = [state(f"small{i}", 10 ** (i / 10), {RUNG: 0.4, STEPS: 0.5 + i / 1000}) for i in range(10)]
    large = [state(f"large{i}", 50.0 * 2**i) for i in range(3)]
    assert {name for name, _ in jobs(*small, *large)} >= {"large0", "large1"}


def test_seeds_of_an_arm_are_judged_together():
    """The first seed goes alone. Once it is complete the others follow, or never."""
    done = [s for i in range(5) for s in seeds(f"known{i}", 1.0 + i / 10, *2 * [{RUNG: 0.4, STEPS: 0.5}])]
    good, bad = ([{RUNG: 0.4, STEPS: q}, {}, {}] for q in (0.8, 0.3))
    open_arms = seeds("first", 1.5, {RUNG: 0.5}, {}), seeds("good", 3.0, *good), seeds("bad", 3.0, *bad)
    found = jobs(*done, *(s for arm in open_arms for s in arm))
    assert found == [("first0", STEPS), ("good1", STEPS), ("good2", STEPS)]


def test_the_luck_of_a_first_seed_counts_less_than_the_mean_of_many():
    done = [s for i in range(9) for s in seeds(f"known{i}", 1 + i / 10, *3 * [{STEPS: 0.5}])]
    policy = EarlyStopping(chance=0.1)
    one = policy.predictions([*done, *seeds("new", 2.0, {STEPS: 0.6}, {}, {})])["new"]
    three = policy.predictions([*done, *seeds("new", 2.0, *3 * [{STEPS: 0.6}])])["new"]
    assert 0.5 < one < three == pytest.approx(0.6)


def test_running_arms_count_as_good():
    """An arm is expected to add less while another arm of its cost runs."""
    done, policy = known(*np.linspace(0.4, 0.5, 10)), EarlyStopping(chance=0.1, loss=100.0)
    running, waiting = state("a", 4.0), state("b", 4.0)
    alone, _ = policy.passed_by([*done, running, waiting])["b"]
    running.running = True
    beside, _ = policy.passed_by([*done, running, waiting])["b"]
    assert beside < 0.5 * alone


def test_failed_arms_cost_no_more_and_teach_nothing():
    """A trial that failed, and a quality that is not finite, which an earlier process may have recorded."""
    broken, odd = seeds("broken", 1.0, {}, {}), seeds("odd", 1.1, {RUNG: math.nan}, {})
    broken[0].outcome = "out of memory"
    sound = state("sound", 2.0)
    assert jobs(*broken, *odd, sound) == [("sound", STEPS)]
    policy = EarlyStopping(chance=0.1)
    found = policy.predictions([*broken, *odd, sound])
    assert found == policy.predictions([sound]) == {"sound": pytest.approx(0.8)}
    assert policy.predictions([]) == policy.passed_by([]) == {}


def test_qualities_of_any_unit_give_the_same_jobs():
    """Only differences to chance count, as parts of the highest."""
    done = [
        state(f"known{i}", 10 ** (i / 10), {RUNG: 0.3, STEPS: 0.5 + 0.1 * math.sin(i)}) for i in range(20)
    ]
    states = [*done, *(state(f"new{i}", 10 ** (i / 10), {RUNG: 0.2 + i / 50}) for i in range(20))]
    expected = [job.state.name for job in EarlyStopping(chance=0.1).jobs(states)]
    for s in states:
        s.reached = {step: 1000 * (q - 0.1) - 70 for step, q in s.reached.items()}
    assert [job.state.name for job in EarlyStopping(chance=-70).jobs(states)] == expected


def branch(name: str, trunk: str, cost: float, start: int) -> TrialState:
    flops = cost * (STEPS - start) / STEPS
    return TrialState(name, arm=name, cost=cost, steps=STEPS, need={}, start=start, after=trunk, flops=flops)


def test_a_trunk_is_no_arm_and_is_paid_by_its_branches():
    """Three branches of a quarter each, of a trunk: together they are worth it, one alone is not."""
    done = known(*np.linspace(0.45, 0.55, 8), cost=4.0)
    trunk = TrialState("trunk", arm="trunk", cost=4.0, steps=STEPS, need={})
    branches = [branch(f"at{i}", "trunk", 4.1 + i / 100, 120) for i in range(3)]
    policy = EarlyStopping(chance=0.1, loss=1.0)
    cost = {
        num: policy.passed_by([*done, trunk, *branches[:num]])[branches[0].arm][1]
        * (8 * 4 + 4 + num * 4.1 / 4)
        for num in (1, 3)
    }
    assert cost[1] == pytest.approx(4 + 4.1 / 4, rel=0.01)
    assert cost[3] == pytest.approx(4 / 3 + 4.1 / 4, rel=0.01)
    assert jobs(trunk, *branches) == 3 * [("trunk", STEPS)]
    trunk.running = True
    assert [name for name, _ in jobs(trunk, *branches)] == ["at0", "at1", "at2"]  # which the queue holds
    trunk.running, trunk.reached, trunk.outcome = False, {STEPS: 0.5}, "complete"
    assert jobs(trunk, branches[0]) == [("at0", STEPS)]


def work(
    states: Sequence[TrialState], quality: Callable[[TrialState], float], **options: object
) -> tuple[float, Mapping[str, TrialState]]:
    """Trains as an early stopped sweep does, four trials at a time; returns the cost, and how they ended."""
    fixed = {"cluster_resources": lambda: {"CPU": 4.0}, "quality": "q", **options}
    queue = TrialQueue(states, EarlyStopping(chance=0.1), **fixed)  # pyright: ignore[reportArgumentType]
    running, now, spent, tie = [], 0.0, 0.0, count()
    while True:
        while job := queue.next():
            cost = job.state.cost * job.state.part(job.until)
            spent += cost
            running.append((now + cost, next(tie), job))
        if not running:
            return spent, queue.states
        running.sort()
        now, _, job = running.pop(0)
        status = "finished" if job.until == STEPS else "paused"
        metrics = {"q": quality(job.state) * (job.until / STEPS) ** 0.2}
        queue.done(job.state.name, Result(status=status, step=job.until, metrics=metrics))


@pytest.mark.parametrize("qualities", [np.linspace(0.2, 0.9, 40), [*39 * [0.3], 0.9]])
def test_where_rungs_rank_perfectly_a_third_of_the_cost_finds_the_best(qualities):
    """40 arms of one cost, without noise. Which arm has which quality is drawn anew each time."""
    for seed in range(6):
        of_arm = dict(enumerate(random.Random(seed).sample(list(qualities), 40)))
        states = [state(f"{i}", 1.0) for i in range(40)]
        spent, ends = work(states, lambda s, of_arm=of_arm: of_arm[int(s.name)])
        best = max(of_arm, key=lambda arm: of_arm[arm])
        assert ends[f"{best}"].finished
        assert spent / 40 <= 0.35, seed


def test_the_order_of_writing_is_nothing():
    """Six orders of arms and seeds, costs in groups of equal ones: the same trials end at the same steps."""
    names, found, total = [(arm, seed) for arm in range(20) for seed in range(2)], [], 0.0
    noise = {name: random.Random(str(name)).gauss(0, 0.02) for name in names}
    for order in range(6):
        written = random.Random(order).sample(names, len(names))
        states = [state(f"{a}-{s}", 10 ** (a // 5 / 2), arm=f"{a}") for a, s in written]
        trials, total = {f"{a}-{s}": (a, s) for a, s in names}, sum(s.cost for s in states)
        ends = work(states, lambda s: 0.4 + trials[s.name][0] / 100 + noise[trials[s.name]])  # noqa: B023
        found.append((ends[0], {name: sorted(s.reached) for name, s in ends[1].items()}))
    assert found[0][0] < 0.9 * total
    assert all(other == found[0] for other in found)


def test_a_search_ends_and_counts_the_arms_that_it_passes_by():
    """It draws 60 arms, of rising cost and without noise. Arms that were not started cost nothing."""
    drawn = (state(f"drawn{i}", 10 ** (i / 60)) for i in range(60))
    spent, ends = work((), lambda s: 0.6 - 0.2 * math.log10(s.cost), more=lambda: list(islice(drawn, 1)))
    begun = [s for s in ends.values() if s.reached]
    assert len(ends) == 60
    assert 4 <= len(begun) < 60
    assert spent <= sum(s.cost for s in begun)
