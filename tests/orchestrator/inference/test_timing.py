"""Functions are timed in turns; what disturbs a round is noticed, and such a round is repeated."""

import time
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat
from statistics import median

import pytest

from orchestrator.inference import timing
from orchestrator.inference.timing import Round, energies, in_turns, is_disturbed, quiet_rounds, times


def made(*ms: float, reference_ms: float = 1.0, foreign: float = 0.0) -> Round:
    return Round(ms=(ms,), reference_ms=reference_ms, foreign=foreign)


def used(seconds: Iterator[float]) -> Callable[[], tuple[float, float]]:
    """Returns a clock that goes on by a second, beside what others have used of processors."""
    clock = count(0.0, 1.0)
    return lambda: (next(clock), next(seconds))


def sleeps(seconds: float) -> None:
    """Takes so long by the clock, not by the processor."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_every_function_has_its_turn_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 4)
    monkeypatch.setattr(timing, "ROUND_S", 0.02)
    monkeypatch.setattr(timing, "_busy", used(repeat(0.0)))
    monkeypatch.setattr(timing, "_reference_ms", lambda: 1.0)
    turns = list[str]()
    functions = [
        (lambda name=name, s=s: (turns.append(name), sleeps(s))) for name, s in (("a", 1e-4), ("b", 1e-3))
    ]
    rounds = list(in_turns(functions))
    assert len(rounds) == 4
    calls = {len(ms) for each in rounds for ms in each.ms}
    assert len(calls) == 1
    of_a, of_b = times(rounds)
    assert 0.1 <= of_a.p50 < 1.0 <= of_b.p50
    starts = [turns[place] for place in range(8, len(turns), 2 * (timing.WARM_UP + calls.pop()))]
    assert {*starts} == {"a", "b"}, "the order changes from round to round"


def test_a_disturbed_round_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processors that others use, or by the reference; not for ever."""
    monkeypatch.setattr(timing, "ROUNDS", 4)
    monkeypatch.setattr(timing, "ROUND_S", 0.001)
    monkeypatch.setattr(timing, "_busy", used(chain([0.0, 1.0, 1.0], repeat(1.5))))
    references = iter([1.0, 1.0, 1.0, 1.5, 1.0, 1.0, 1.0])
    monkeypatch.setattr(timing, "_reference_ms", lambda: next(references))
    rounds = list(in_turns([lambda: None]))
    assert [round(each.foreign, 1) for each in rounds] == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [is_disturbed(each, 1.0) for each in rounds] == [True, True, False, True, False, False, False]
    monkeypatch.setattr(timing, "_busy", used(count(0.0, 1.0)))
    monkeypatch.setattr(timing, "_reference_ms", lambda: 1.0)
    assert len(list(in_turns([lambda: None]))) == 8


def test_quiet_rounds_alone_count_if_there_are_enough() -> None:
    quiet, disturbed = [made(1.0)] * 10, [made(9.0, foreign=0.5), made(9.0, reference_ms=1.3)]
    assert quiet_rounds([*quiet, *disturbed]) == quiet
    assert len(quiet_rounds([*quiet[:9], *disturbed])) == 11


def test_percentiles_by_hand() -> None:
    """Ten rounds of one call, 1 to 10 ms: the median is 5.5; each fifth has two, the last 9 and 10. A round
    in which the machine was slow counts for the promise alone; one beside other work for neither.
    """
    (found,) = times([made(float(ms)) for ms in range(1, 11)])
    assert (found.p50, found.q25, found.q75) == (5.5, 3.25, 7.75)
    assert found.p95 == pytest.approx(9.55)
    assert found.p95_high == pytest.approx(1.1 * 9.95)
    more = [made(20.0, reference_ms=1.5), made(99.0, foreign=0.5)]
    (same,) = times([*(made(float(ms)) for ms in range(1, 11)), *more])
    assert (same.p50, same.p95, same.p95_high) == (found.p50, found.p95, pytest.approx(1.1 * 19.5))
    (same,) = times([made(2.0, 2.0)] * 10)
    assert {same.p50, same.q25, same.q75, same.p95, same.p95_high / 1.1} == {2.0}


def test_energy_is_read_over_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 50 W whose counter shows full milliseconds alone: a call of .1 ms takes 5 mJ."""
    monkeypatch.setattr(timing, "ROUNDS", 10)
    monkeypatch.setattr(timing, "ROUND_S", 0.001)
    monkeypatch.setattr(timing, "_busy", used(repeat(0.0)))
    monkeypatch.setattr(timing, "_reference_ms", lambda: 1.0)
    clock, read = [0.0], [0]

    def takes(seconds: float) -> None:
        clock[0] += seconds

    def meter() -> float:
        was, read[0] = read[0], int(clock[0] * 1000)
        return 0.05 * (read[0] - was)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    rounds = list(in_turns([lambda: takes(1e-4), lambda: takes(0.03)], meter=meter))
    (small, low, high), (large, *_) = energies(rounds)
    assert small == pytest.approx(5.0, rel=0.05)
    assert 4.4 < low <= small <= high < 5.6
    assert large == pytest.approx(1500.0, rel=0.05)
    assert energies([made(1.0)] * 10) == []


def test_what_others_use_is_read_where_the_system_says_it() -> None:
    """This process's own work is not that of others."""
    before = timing._busy()
    sleeps(0.5)
    after = timing._busy()
    own = (after[1] - before[1]) / (after[0] - before[0])
    assert own == own, "this system says it"
    assert median([timing._reference_ms() for _ in range(3)]) > 0
