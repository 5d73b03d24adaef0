"""Times functions in turns, and notices when other work disturbs them.

All functions are called in each round, in a new random order, so that what slows a machine down for a while
slows all of them alike. A fixed product of matrices is timed in each round too, and the processor time that
others use is read where the system says it: a disturbed round is repeated. Imports numpy alone.
"""

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

WARM_UP = 3  # calls before those that are timed, whenever a function has its turn
ROUND_S = 0.3  # a round lasts at least so long: processor time is counted in hundredths of a second
ROUNDS, FEWEST_ROUNDS = 20, 10
FEWEST_CALLS, MOST_CALLS = 5, 100  # of a function in a round
ENERGY_S = 0.01  # a function is called for so long to read its energy: counters rise once in a millisecond
FOREIGN = 0.25  # processors that others use, from which a round is disturbed
SLOWER = 1.25  # the reference, as a multiple of its median, from which a round is disturbed
BLOCKS = 5  # parts of the rounds, of which each has a 95th percentile
DRIFT = 1.1  # of a machine's level between two hours (bench/answer.py)


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of timed calls.

    Attributes:
        ms: of each function in the order in which they were given, the time of each call.
        reference_ms: time of the fixed product of matrices, beside them.
        foreign: processors that other work used meanwhile; NaN: the system does not say it.
        mj: of each function, the millijoules of a call; empty: the system does not say it.
    """

    ms: tuple[tuple[float, ...], ...]
    reference_ms: float
    foreign: float
    mj: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of a call: its median with quartiles, and its 95th percentile.

    Attributes:
        p95_high: what a promise may rest on: the highest 95th percentile of a fifth of the rounds, those in
            which the machine was slower among them, and a tenth more, by which its level drifts.
    """

    p50: float
    q25: float
    q75: float
    p95: float
    p95_high: float


def in_turns(
    functions: Sequence[Callable[[], object]],
    *,
    at_most_s: float = 60.0,
    seed: int = 0,
    meter: Callable[[], float] | None = None,
) -> Iterator[Round]:
    """Yields rounds until `ROUNDS` of them were quiet, or twice as many are over, or the time is, but not
    before `FEWEST_ROUNDS`. `meter` reads the joules that were used since it was read last.
    """
    began, order, rng = time.monotonic(), [*range(len(functions))], random.Random(seed)
    once = sum(_calls(function, 1)[0] for function in functions) / 1000
    calls = min(max(math.ceil(ROUND_S / once), FEWEST_CALLS), MOST_CALLS)
    references, quiet = list[float](), 0
    for number in range(2 * ROUNDS):
        if quiet == ROUNDS or (number >= FEWEST_ROUNDS and time.monotonic() - began > at_most_s):
            return
        rng.shuffle(order)
        before, ms, mj = _busy(), dict[int, tuple[float, ...]](), dict[int, float]()
        for index in order:
            ms[index] = _calls(functions[index], calls)
            if meter:
                mj[index] = _millijoules(functions[index], meter)
        reference = _reference_ms()
        after = _busy()
        foreign = (after[1] - before[1]) / (after[0] - before[0])
        found = Round(
            ms=tuple(ms[index] for index in range(len(functions))),
            reference_ms=reference,
            foreign=foreign,
            mj=tuple(mj[index] for index in sorted(mj)),
        )
        references.append(reference)
        quiet += not is_disturbed(found, median(references))
        yield found


def is_disturbed(each: Round, reference_ms: float) -> bool:
    """Whether other work ran beside a round, or the machine was slower than it usually is."""
    return each.foreign > FOREIGN or each.reference_ms > SLOWER * reference_ms


def quiet_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Returns the rounds that were not disturbed; all, if fewer than half of `ROUNDS` were quiet."""
    usual = median(each.reference_ms for each in rounds)
    quiet = [each for each in rounds if not is_disturbed(each, usual)]
    return quiet if len(quiet) >= FEWEST_ROUNDS else [*rounds]


def times(rounds: Sequence[Round]) -> list[Times]:
    """Returns the times of each function over the rounds that `quiet_rounds` returns."""
    undisturbed = [each for each in rounds if not each.foreign > FOREIGN]
    promised = undisturbed if len(undisturbed) >= FEWEST_ROUNDS else [*rounds]
    blocks = [block for block in np.array_split(np.arange(len(promised)), BLOCKS) if len(block)]
    found = []
    for index in range(len(rounds[0].ms)):
        ms = np.array([each.ms[index] for each in promised])
        high = max(float(np.percentile(ms[block], 95)) for block in blocks)
        quiet = np.array([each.ms[index] for each in quiet_rounds(rounds)])
        q25, p50, q75, p95 = np.percentile(quiet, [25, 50, 75, 95]).tolist()
        found.append(Times(p50=p50, q25=q25, q75=q75, p95=p95, p95_high=DRIFT * max(high, p95)))
    return found


def energies(rounds: Sequence[Round]) -> list[tuple[float, float, float]]:
    """Returns the millijoules of a call of each function over the same rounds: median, lower and upper
    quartile. Empty where they were not read.
    """
    by_function = zip(*(each.mj for each in quiet_rounds(rounds)), strict=True)
    return [tuple(np.percentile(mj, [50, 25, 75]).tolist()) for mj in by_function]


def _calls(function: Callable[[], object], count: int) -> tuple[float, ...]:
    for _ in range(WARM_UP):
        function()
    found = []
    for _ in range(count):
        began = time.perf_counter_ns()
        function()
        found.append((time.perf_counter_ns() - began) / 1e6)
    return tuple(found)


def _millijoules(function: Callable[[], object], meter: Callable[[], float]) -> float:
    meter()
    until, calls = time.perf_counter() + ENERGY_S, 0
    while not calls or time.perf_counter() < until:
        function()
        calls += 1
    return 1000 * meter() / calls


_MATRIX = np.random.default_rng(0).standard_normal((192, 192), dtype=np.float32) / 14


def _reference_ms() -> float:
    """The median of five products of a matrix with itself, ten times over."""

    def product() -> None:
        matrix = _MATRIX
        for _ in range(10):
            matrix = matrix @ _MATRIX

    return median(_calls(product, 5))


def _busy() -> tuple[float, float]:
    """Returns the time, and the seconds of processors that others have used; NaN where that is not known."""
    own = os.times()
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, *more = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return time.monotonic(), math.nan
    all_s = (user + nice + system + irq + softirq + sum(more[:1])) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), all_s - own.user - own.system
