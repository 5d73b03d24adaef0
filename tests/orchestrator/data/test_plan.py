"""The order of samples: every sample once per epoch, and the same for any number of workers."""

import itertools
import resource
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, strategies as st

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.plan import Plan
from orchestrator.errors import UsageError

Sample = tuple[int, int, int]  # epoch, shard, row


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    lanes = draw(st.integers(1, 6))
    batch_size = lanes * draw(st.integers(1, 4))
    rows = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=9)))
    tail = draw(st.sampled_from(["wrap", "drop"] if sum(rows) >= batch_size else ["wrap"]))
    window = draw(st.integers(1, 12))
    seed, run = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    return Plan(
        rows=rows,
        seed=seed,
        lanes=lanes,
        batch_size=batch_size,
        shuffle_window=window,
        shuffle_run=run,
        tail=tail,
    )


def read(plan: Plan, steps: range, lanes: range | None = None) -> list[list[Sample]]:
    """Returns the samples of each step, for all lanes or some."""
    lanes = range(plan.lanes) if lanes is None else lanes
    places = [plan.locate(*plan.slots(step, lanes)) for step in steps]
    return [[(int(e), int(s), int(r)) for e, s, r, _ in zip(*step, strict=True)] for step in places]


def naive(plan: Plan, epochs: int) -> list[list[Sample]]:
    """Returns the samples of each lane over some epochs, by the definition, with lists."""
    size = sum(plan.rows) - (sum(plan.rows) % plan.batch_size if plan.tail == "drop" else 0)
    lanes: list[list[Sample]] = [[] for _ in range(plan.lanes)]
    for epoch in range(epochs):
        order = np.random.default_rng([plan.seed, epoch]).permutation(len(plan.rows))
        line = [(epoch, int(shard), row) for shard in order for row in range(plan.rows[shard])]
        for lane in range(plan.lanes):
            count = sum(v % plan.lanes == lane for v in range(epoch * size, (epoch + 1) * size))
            segment, line = line[:count], line[count:]
            for window, start in enumerate(range(0, count, plan.shuffle_window)):
                some = segment[start : start + plan.shuffle_window]
                runs = [some[i : i + plan.shuffle_run] for i in range(0, len(some), plan.shuffle_run)]
                mixed = np.random.default_rng([plan.seed, epoch, lane + 1, window + 1]).permutation(len(runs))
                lanes[lane] += [sample for i in mixed for sample in runs[i]]
    return lanes


@given(plan=plans())
def test_the_definition(plan: Plan) -> None:
    lanes, per_step = naive(plan, 3), plan.batch_size // plan.lanes
    steps = min(map(len, lanes)) // per_step
    expected = [[s for lane in lanes for s in lane[i * per_step : (i + 1) * per_step]] for i in range(steps)]
    assert read(plan, range(steps)) == expected


@given(plan=plans(), epochs=st.integers(1, 4))
def test_every_sample_once_per_epoch(plan: Plan, epochs: int) -> None:
    """Batches that run into the epoch after the last are cut there."""
    steps = -(-epochs * plan.epoch_size // plan.batch_size) + 1
    found = [sample for step in read(plan, range(steps)) for sample in step if sample[0] < epochs]
    assert len(found) == len(set(found)) == epochs * plan.epoch_size
    if plan.tail == "wrap":
        assert set(found) == {
            (e, s, r) for e in range(epochs) for s, n in enumerate(plan.rows) for r in range(n)
        }


def test_what_is_dropped_differs_between_epochs() -> None:
    plan = Plan(rows=(5,) * 5, seed=0, lanes=2, batch_size=8, shuffle_window=4, tail="drop")
    epochs = [{s[1:] for step in read(plan, range(3 * e, 3 * e + 3)) for s in step} for e in range(8)]
    assert all(len(epoch) == 24 for epoch in epochs)
    assert len(set.union(*epochs)) == 25


@given(plan=plans(), data=st.data())
def test_workers_share_a_batch_in_its_order(plan: Plan, data: st.DataObject) -> None:
    """This holds for every number of workers that divides the lanes."""
    workers = data.draw(st.sampled_from([n for n in range(1, plan.lanes + 1) if plan.lanes % n == 0]))
    each = plan.lanes // workers
    whole = read(plan, range(20))
    parts = [read(plan, range(20), range(rank * each, (rank + 1) * each)) for rank in range(workers)]
    assert [[s for part in step for s in part] for step in zip(*parts, strict=True)] == whole


@given(plan=plans(), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_resuming_gives_the_suffix(plan: Plan, cuts: list[int]) -> None:
    """A process that has read nothing before continues at any step."""
    whole = read(plan, range(30))
    for first, last in itertools.pairwise([0, *sorted(cuts), 30]):
        fresh = Plan(**{name: getattr(plan, name) for name in plan.__dataclass_fields__})
        assert read(fresh, range(first, last)) == whole[first:last]


@given(plan=plans(), repeats=st.integers(1, 4), data=st.data())
def test_views_of_a_sample_follow_each_other(plan: Plan, repeats: int, data: st.DataObject) -> None:
    """In the order of lanes, which is the order without repeats with each sample in the place of one; and any
    number of workers reads this.
    """
    repeated = replace(plan, repeats=repeats)
    count = 3 * repeats * plan.batch_size
    once = plan.locate(*np.divmod(np.arange(count), plan.lanes)[::-1])
    v = np.arange(repeats * count)
    views = repeated.locate(*np.divmod(v, plan.lanes)[::-1])
    assert views.view.tolist() == (v % repeats).tolist()
    for found, expected in zip(views[:3], once[:3], strict=True):
        assert found.tolist() == np.repeat(expected, repeats).tolist()
    workers = data.draw(st.sampled_from([n for n in range(1, plan.lanes + 1) if plan.lanes % n == 0]))
    each = plan.lanes // workers
    parts = [read(repeated, range(20), range(rank * each, (rank + 1) * each)) for rank in range(workers)]
    assert [[*chain(*step)] for step in zip(*parts, strict=True)] == read(repeated, range(20))


def test_repeats_reach_every_sample() -> None:
    """One shard is never permuted with another: three epochs have each sample three times."""
    plan = Plan(rows=(40,), seed=0, lanes=4, batch_size=8, shuffle_window=4, repeats=3)
    epochs = [[s for step in read(plan, range(5 * e, 5 * e + 5)) for s in step] for e in range(3)]
    assert [len({*epoch}) for epoch in epochs] == [14, 14, 14]
    assert Counter(chain(*epochs)) == Counter({(0, 0, row): 3 for row in range(40)})


def test_a_mixed_pair_is_never_one_sample() -> None:
    """Tries all settings: which ones a config takes with mixup."""
    for repeats, lanes, per_lane in itertools.product(range(1, 6), range(1, 7), range(1, 5)):
        batch = lanes * per_lane
        if batch % 2:
            continue
        plan = Plan(rows=(97,), seed=0, lanes=lanes, batch_size=batch, shuffle_window=9, repeats=repeats)
        steps = read(plan, range(30))
        mixes = any(a == b for step in steps for a, b in zip(step[::2], step[1::2], strict=True))
        changes = {"data.batch_size": batch, "data.lanes": lanes, "data.repeats": repeats}
        run = override(RunConfig(), {"model.moe": None, **changes})
        message = f"data.repeats={repeats} with mixup: data.lanes={lanes} would mix images with"
        with pytest.raises(UsageError, match=message) if mixes else nullcontext():
            override(run, {"data.augment": "mixup"})


def test_epochs_and_seeds_differ() -> None:
    orders = set()
    for seed in (0, 1):
        plan = Plan(rows=(10,) * 4, seed=seed, lanes=2, batch_size=4, shuffle_window=5)
        for epoch in range(3):
            steps = read(plan, range(10 * epoch, 10 * epoch + 10))
            orders.add(tuple(sample[1:] for step in steps for sample in step))
    assert len(orders) == 6
    plan = Plan(rows=(50, 50), seed=0, lanes=1, batch_size=1, shuffle_window=100)
    shards = np.array([step[0][1] for step in read(plan, range(100))])
    assert 30 < np.abs(np.diff(shards)).sum() < 70  # the shards are mixed; 49.5 expected


def test_runs_of_neighbours_stay_together() -> None:
    plan = Plan(rows=(64, 64), seed=0, lanes=2, batch_size=16, shuffle_window=32, shuffle_run=8)
    for step in read(plan, range(8)):
        for lane in (step[:8], step[8:]):
            assert len({shard for _, shard, _ in lane}) == 1
            assert np.diff([row for _, _, row in lane]).tolist() == [1] * 7
            assert lane[0][2] % 8 == 0


def test_rows_are_not_permuted_as_the_shards_are() -> None:
    """100 shards of one row: with one generator for both, the second permutation would repeat the first."""
    plan = Plan(rows=(1,) * 100, seed=0, lanes=1, batch_size=1, shuffle_window=100)
    shards = np.random.default_rng((0, 0)).permutation(100)
    assert [step[0][1] for step in read(plan, range(100))] != shards[shards].tolist()


def test_refusals() -> None:
    with pytest.raises(UsageError, match="shuffle_run=8 is more than shuffle_window=4"):
        override(RunConfig(), {"data.shuffle_window": 4, "data.shuffle_run": 8})
    with pytest.raises(ValueError, match="lanes=3 does not divide batch_size=8"):
        Plan(rows=(10,), seed=0, lanes=3, batch_size=8, shuffle_window=4)
    with pytest.raises(ValueError, match="7 samples do not fill a batch of 8"):
        Plan(rows=(3, 4), seed=0, lanes=2, batch_size=8, shuffle_window=4, tail="drop")
    wrapped = Plan(rows=(3, 4), seed=0, lanes=2, batch_size=16, shuffle_window=4)
    assert sorted(sample[0] for sample in read(wrapped, range(1))[0]) == [0] * 7 + [1] * 7 + [2] * 2


def test_four_billion_samples_cost_no_memory() -> None:
    """100,000 shards: a batch of the third epoch, in the memory of their list."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = Plan(rows=np.full(100_000, 40_000), seed=0, lanes=512, batch_size=4096, shuffle_window=1024)
    far = range(2_000_000, 2_000_001)  # in the third epoch
    assert {sample[0] for sample in read(plan, far)[0]} == {2}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
