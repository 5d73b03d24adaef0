"""Early stopping: what a point adds, who goes on, who never does."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.frontier.pareto import hypervolume_2d
from orchestrator.sweeps.agenda import Standing
from orchestrator.sweeps.scheduler import Halving, gained
from orchestrator.sweeps.sweep import Trial

BOUND = np.array([10.0, 10.0])
coordinates = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(front=st.lists(coordinates, max_size=8), points=st.lists(coordinates, min_size=1, max_size=6))
def test_what_a_point_adds_is_the_difference_of_two_hypervolumes(front, points):
    before = np.array(front, dtype=np.float64).reshape(-1, 2)
    new = np.array(points, dtype=np.float64)
    expected = [
        hypervolume_2d(np.vstack([before, one]), BOUND) - hypervolume_2d(before, BOUND) for one in new
    ]
    np.testing.assert_allclose(gained(before, new, BOUND), expected, atol=1e-9)


def standing(name: str, cost: float, reached: dict[int, float] | None = None) -> Standing:
    run = override(RunConfig(), {"train.steps": 160, "model.moe": None})
    one = Standing(Trial(name=name, arm=name, changes={}, run=run), cost=cost, need={"CPU": 1})
    one.reached = reached or {}
    if 160 in one.reached:
        one.outcome = "complete"
    return one


def asked(*standings: Standing) -> list[tuple[str, int]]:
    return [(job.trial.name, job.until) for job in Halving(chance=0.1).jobs(standings)]


def test_the_first_rungs_are_a_sixteenth_and_a_quarter_cheapest_first():
    """Nothing is known: all may be as good, so the cheapest adds most, for least."""
    assert asked(standing("dear", 10.0), standing("cheap", 1.0)) == [("cheap", 10), ("dear", 10)]
    cheap, dear = standing("cheap", 1.0, {10: 0.3}), standing("dear", 2.0, {10: 0.3, 40: 0.5})
    assert asked(cheap, dear) == [("cheap", 40), ("dear", 160)]


def test_whom_the_frontier_cannot_gain_by_is_not_promoted():
    """Others rose by .2 from the first rung to the second, by .4 from there to the end: "bad" at .1 will come
    to .7, far below the .9 that a cheaper one has; "good" at .35 to .95.
    """
    complete = [standing(f"done{i}", 1 + i / 100, {10: 0.3, 40: 0.5, 160: 0.9}) for i in range(5)]
    good, bad = standing("good", 500.0, {10: 0.35}), standing("bad", 500.0, {10: 0.1})
    assert asked(*complete, good, bad) == [("good", 40)]


def test_every_trial_is_tried_at_least_to_its_first_rung():
    complete = [standing(f"done{i}", 1.0, {10: 0.5, 40: 0.7, 160: 1.0}) for i in range(5)]
    assert asked(*complete, standing("hopeless", 800.0)) == [("hopeless", 10)]


def test_a_crowded_place_gains_less():
    """Two arms are foretold to be as good. The cheaper one goes first, until an arm like it runs: then what
    it would add is nearly nothing, and the other one goes first.
    """
    done = [standing(f"done{i}", 1.0, {10: 0.3, 40: 0.5, 160: 0.6}) for i in range(5)]
    small, large = standing("small", 30.0, {10: 0.5, 40: 0.7}), standing("large", 60.0, {10: 0.6, 40: 0.8})
    assert [name for name, _ in asked(*done, small, large)] == ["small", "large"]
    running = standing("running", 30.0, {10: 0.5, 40: 0.7})
    running.running = True
    assert [name for name, _ in asked(*done, running, small, large)] == ["large", "small"]


def test_what_is_paid_already_does_not_count():
    """Two arms of like cost and quality: the one with a quarter of its steps trained goes first."""
    rises = {10: 0.3, 40: 0.5, 160: 0.6}
    done = [standing(f"done{i}", cost, rises) for i, cost in enumerate([1, 1, 1, 1, 3000])]
    begun, fresh = standing("begun", 33.0, {10: 0.5, 40: 0.7}), standing("fresh", 30.0, {10: 0.5})
    assert [name for name, _ in asked(*done, fresh, begun)] == ["begun", "fresh"]


def test_a_pause_must_be_able_to_save_something():
    """The small arm costs less than a twentieth of what was spent: it goes to its end at once."""
    big = standing("big", 100.0, {10: 0.3, 40: 0.5, 160: 0.6})
    assert ("small", 160) in asked(big, standing("small", 1.0))
