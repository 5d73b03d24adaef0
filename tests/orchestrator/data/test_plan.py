"""The order of samples: once per epoch, window by window, and independent of how it is asked for."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.plan import Plan

SHARDS = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple)
ANY = st.builds(Plan, rows=SHARDS, seed=st.integers(0, 3), shuffle_shards=st.integers(1, 10))


def order(plan: Plan, first: int, last: int) -> list[tuple[int, int, int]]:
    """(epoch, shard, row) of positions `first` .. `last` - 1."""
    return [tuple(map(int, where)) for where in zip(*plan.locate(np.arange(first, last)), strict=True)]


def naive(plan: Plan, epoch: int) -> list[tuple[int, int, int]]:
    """The definition: permute the shards, cut them into windows, permute the rows of each."""
    shards = np.random.default_rng([plan.seed, epoch]).permutation(len(plan.rows))
    found = []
    for number, first in enumerate(range(0, len(shards), plan.shuffle_shards), start=1):
        window = [(s, r) for s in shards[first : first + plan.shuffle_shards] for r in range(plan.rows[s])]
        shuffled = np.random.default_rng([plan.seed, epoch, number]).permutation(len(window))
        found += [(epoch, int(window[i][0]), window[i][1]) for i in shuffled]
    return found


@settings(deadline=None)
@given(plan=ANY)
def test_the_definition_over_epochs(plan: Plan) -> None:
    size = sum(plan.rows)
    assert order(plan, 0, 3 * size) == naive(plan, 0) + naive(plan, 1) + naive(plan, 2)


@settings(deadline=None)
@given(plan=ANY, epoch=st.integers(0, 3))
def test_every_sample_once_per_epoch(plan: Plan, epoch: int) -> None:
    size = sum(plan.rows)
    found = order(plan, epoch * size, (epoch + 1) * size)
    assert sorted(found) == [(epoch, s, r) for s in range(len(plan.rows)) for r in range(plan.rows[s])]


@settings(deadline=None)
@given(plan=ANY)
def test_a_window_touches_its_shards_alone(plan: Plan) -> None:
    """A reader that goes on needs `shuffle_shards` shards, and never again one that it has left."""
    found = order(plan, 0, sum(plan.rows))
    left: set[int] = set()
    while found:
        window: set[int] = set()
        taken = 0
        while len(window) < min(plan.shuffle_shards, len(plan.rows) - len(left)) or taken < sum(
            plan.rows[shard] for shard in window
        ):
            window.add(found[taken][1])
            taken += 1
        assert len(window) <= plan.shuffle_shards
        assert not window & left
        left |= window
        found = found[taken:]


@settings(deadline=None)
@given(plan=ANY, cuts=st.lists(st.integers(0, 120), max_size=6))
def test_chunks_change_nothing(plan: Plan, cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), 120]
    pieces = [order(plan, a, b) for a, b in itertools.pairwise(borders)]
    assert [where for piece in pieces for where in piece] == order(plan, 0, 120)
    fresh = Plan(rows=plan.rows, seed=plan.seed, shuffle_shards=plan.shuffle_shards)
    assert [order(fresh, p, p + 1)[0] for p in (119, 0, 60)] == [order(plan, 0, 120)[p] for p in (119, 0, 60)]


def test_epochs_and_seeds_differ() -> None:
    plans = [Plan(rows=(10, 10, 10, 10), seed=seed, shuffle_shards=2) for seed in (0, 1)]
    orders = [[where[1:] for where in order(plan, e * 40, (e + 1) * 40)] for plan in plans for e in (0, 1, 2)]
    assert len({tuple(one) for one in orders}) == 6
    shards = [tuple(dict.fromkeys(shard for shard, _ in one)) for one in orders]
    assert len({frozenset(one[:2]) for one in shards}) > 1  # windows are of other shards


def test_rows_of_a_window_are_mixed() -> None:
    plan = Plan(rows=(50, 50), seed=0, shuffle_shards=2)
    shards = np.array([shard for _, shard, _ in order(plan, 0, 100)])
    assert 30 < np.abs(np.diff(shards)).sum() < 70  # 49.5 expected
    assert not np.array_equal(shards, np.sort(shards))


def test_rows_are_not_permuted_as_the_shards_are() -> None:
    """100 shards of one row: with one generator for both, the second permutation would repeat the first."""
    plan = Plan(rows=(1,) * 100, seed=0, shuffle_shards=100)
    shards = np.random.default_rng((0, 0)).permutation(100)
    assert [shard for _, shard, _ in order(plan, 0, 100)] != shards[shards].tolist()
