"""Early stopping: the expected improvement of a point, the arm that goes on, the arms that are stopped."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.frontier.pareto import hypervolume_2d
from orchestrator.sweeps.asha import MultiObjectiveASHA, expected_improvement
from orchestrator.sweeps.queue import TrialState

BOUND = np.array([10.0, 10.0])
coordinates = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(front=st.lists(coordinates, max_size=8), points=st.lists(coordinates, min_size=1, max_size=6))
def test_what_a_certain_point_adds_is_the_difference_of_two_hypervolumes(front, points):
    before = np.array(front, dtype=np.float64).reshape(-1, 2)
    new = np.array(points, dtype=np.float64)
    expected = [
        hypervolume_2d(np.vstack([before, point]), BOUND) - hypervolume_2d(before, BOUND) for point in new
    ]
    added = expected_improvement(before, new, np.zeros(len(new)), BOUND)
    np.testing.assert_allclose(added, expected, atol=1e-9)


def test_what_an_uncertain_point_adds_is_the_mean_over_its_distribution():
    front, points, sd = (
        np.array([[2.0, 8.0], [5.0, 4.0]]),
        np.array([[3.0, 7.0], [6.0, 6.0]]),
        np.array([2.0, 1.0]),
    )
    drawn = np.random.default_rng(0).normal(size=20_000)
    for point, deviation, got in zip(points, sd, expected_improvement(front, points, sd, BOUND), strict=True):
        draws = np.column_stack([np.full(len(drawn), point[0]), point[1] + deviation * drawn])
        each = expected_improvement(front, draws, np.zeros(len(drawn)), BOUND)
        assert abs(got - each.mean()) < 4 * each.std() / np.sqrt(len(drawn))


def state(
    name: str, cost: float, reached: dict[int, float] | None = None, arm: str | None = None
) -> TrialState:
    made = TrialState(name, arm=arm or name, cost=cost, steps=160, need={"CPU": 1})
    made.reached = reached or {}
    if made.finished:
        made.outcome = "complete"
    return made


def asked(*states: TrialState) -> list[tuple[str, int]]:
    return [(job.state.name, job.until) for job in MultiObjectiveASHA(chance=0.1).jobs(states)]


RISES = {10: 0.3, 40: 0.5, 160: 0.6}


def test_the_first_rungs_are_a_sixteenth_and_a_quarter_cheapest_first():
    """Nothing is known: all may be as good, so the cheapest adds most, for least."""
    assert asked(state("dear", 10.0), state("cheap", 1.0)) == [("cheap", 10), ("dear", 10)]
    cheap, dear = state("cheap", 1.0, {10: 0.3}), state("dear", 2.0, {10: 0.3, 40: 0.5})
    assert asked(cheap, dear) == [("cheap", 40), ("dear", 160)]


def test_an_arm_without_hope_stops_and_every_arm_is_tried():
    """Others rose by .2 from the first rung to the second, and by .4 to the end: "bad" at .1 will come to .7,
    far below the .98 of a cheaper one; "good" at .4 to 1. An untried arm is tried whatever its place.
    """
    rises = [{10: q, 40: q + 0.2, 160: q + 0.6} for q in np.linspace(0.2, 0.38, 10)]
    complete = [state(f"done{i}", 10 ** (3 - i / 3), steps) for i, steps in enumerate(rises)]
    good, bad, untried = state("good", 500.0, {10: 0.4}), state("bad", 500.0, {10: 0.1}), state("new", 800.0)
    assert asked(*complete, good, bad, untried) == [("good", 40), ("new", 10)]


def test_small_arms_do_not_say_what_large_arms_gain():
    """The quality falls from the smallest arms to the medium ones. A line through both would predict that
    arms of 30 times the cost end far below the frontier. These arms go on until one of them is complete.
    """
    small = [state(f"small{i}", 1 + i / 10, {10: 0.12, 40: 0.22, 160: 0.5}) for i in range(5)]
    medium = [state(f"medium{i}", 4 + i / 10, {10: 0.2, 40: 0.22, 160: 0.43}) for i in range(5)]
    large = [state(f"large{i}", 30 + i, {10: 0.18}) for i in range(5)]
    assert asked(*small, *medium, *large)[0] == ("large0", 40)
    large[0].reached |= {40: 0.22, 160: 0.4}
    large[0].outcome = "complete"
    assert asked(*small, *medium, *large) == []


def test_stopped_arms_add_little_together():
    """One arm that is expected to add little is stopped. Of twenty such arms some go on."""
    done = [state(f"done{i}", 10 * 1.1**i, RISES) for i in range(8)]
    assert asked(*done, state("one", 15.0, {10: 0.2})) == []
    many = [state(f"open{i}", 15.0 + i / 10, {10: 0.2}) for i in range(20)]
    assert 0 < len(asked(*done, *many)) < 20


def test_a_crowded_place_gains_less():
    """The cheaper of two arms goes first, until an arm like it runs: then it would add nearly nothing."""
    rises = [{40: q, 160: q + 0.1} for q in np.linspace(0.1, 0.85, 30)]
    done = [state(f"done{i}", 10 * 1.14**i, steps) for i, steps in enumerate(rises)]
    small, large = state("small", 30.0, {10: 0.5, 40: 0.7}), state("large", 60.0, {10: 0.6, 40: 0.8})
    assert [name for name, _ in asked(*done, small, large)] == ["small", "large"]
    running = state("running", 30.0, {10: 0.5, 40: 0.7})
    running.running = True
    assert asked(*done, running, small, large)[0][0] == "large"


def test_what_is_paid_already_does_not_count():
    """Two arms of like cost and quality: the one with a quarter of its steps trained goes first."""
    done = [state(f"done{i}", cost, RISES) for i, cost in enumerate([1, 1, 1, 1, 3000])]
    begun, fresh = state("begun", 33.0, {10: 0.5, 40: 0.7}), state("fresh", 30.0, {10: 0.5})
    assert [name for name, _ in asked(*done, fresh, begun)] == ["begun", "fresh"]


def test_a_pause_must_be_able_to_save_something():
    """The small arm costs less than a twentieth of what was spent: it goes to its end at once."""
    assert ("small", 160) in asked(state("big", 100.0, RISES), state("small", 1.0))


def seeds(arm: str, cost: float, *reached: dict[int, float]) -> list[TrialState]:
    return [state(f"{arm}{i}", cost, dict(steps), arm) for i, steps in enumerate(reached)]


def test_seeds_of_an_arm_are_judged_together():
    """The first seed goes alone. Once it is complete the others follow without pauses, or never."""
    known = [s for i in range(5) for s in seeds(f"known{i}", 1.0 + i / 10, RISES, RISES)]
    first = seeds("first", 1.5, {10: 0.3}, {})
    good, bad = seeds("good", 3.0, RISES | {160: 0.8}, {}, {}), seeds("bad", 3.0, RISES | {160: 0.3}, {}, {})
    assert asked(*known, *first, *good, *bad) == [("first0", 40), ("good1", 160), ("good2", 160)]
    first[0].running = True
    assert asked(*known, *first) == []


def test_an_arm_with_a_failed_seed_is_no_point_and_costs_no_more():
    broken = seeds("broken", 1.0, {}, {})
    broken[0].outcome = "out of memory"
    assert asked(*broken, state("sound", 2.0)) == [("sound", 10)]


def test_predictions_are_of_tried_arms():
    """A search asks before there are trials. An arm that failed has no quality to come."""
    policy = MultiObjectiveASHA(chance=0.1)
    assert policy.predictions([]) == {}
    failed = state("failed", 1.0, {10: 0.2})
    failed.outcome = "val/acc1 is nan at step 40"
    assert policy.predictions([state("tried", 1.0, {10: 0.2}), failed, state("new", 2.0)]) == {"tried": 0.5}
