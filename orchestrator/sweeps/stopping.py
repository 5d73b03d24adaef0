"""Early stopping for quality against cost: from cheap to dear, without arms that are not worth their cost.

The cost of an arm is known before it starts. An arm is passed by while its expected improvement of the
hypervolume (Emmerich et al. 2006; with known costs a sum of one-dimensional integrals), for the cost that it
still needs, is below an exchange rate. What is expected follows from arms of nearby cost, the arm's first
seed, and its rung, as far as rungs of other arms have predicted their ends. `bench/stopping.py` judges it.
"""

import math
import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from moe.config import NonNegativeFloat
from orchestrator.errors import UsageError
from orchestrator.sweeps.queue import Job, Policy, TrialState
from orchestrator.sweeps.sweep import Sweep

Floats = NDArray[np.float64]

RUNG = 1 / 8  # part of the steps at which a first seed pauses
BAND = 0.15  # decades of cost within which the order is free
# The cheapest arms train without pauses, so that there are points early: so many, and all that together have
# at most that part of the cost.
FIRST_ARMS, FIRST_COST = 4, 0.05
# Assumptions before there are data. Qualities are above chance, as parts of the highest quality so far.
LEVEL, LEVEL_SD = 0.7, 0.5  # of the cheapest arms
DECADE_SD = 0.3  # of the difference between arms that are a decade of cost apart
ARM_SD, SEED_SD = 0.05, 0.02  # between arms of the same cost, and between seeds of an arm
SLOPE, SLOPE_SD = 0.6, 0.3  # of the end over the rung, among arms of the same cost
PRIOR_ARMS, PRIOR_PAIRS = 2.0, 0.5  # what the assumed deviations weigh, and the noise of that slope
BIN, NEAR = 0.1, 0.2  # decades of cost that count as the same, and within which rungs are compared
END = math.log10(1.1)  # decades that the hypervolume goes beyond the highest cost
UNPAIRED = 0.03  # weight of a rung whose arm has no end


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Policy):
    """Trains arms from cheap to dear, passes by those that are not worth their cost, and ends by itself.

    The first seed of an arm pauses at its rung. The other seeds follow if the arm is still worth their cost.

    Attributes:
        chance: quality that the hypervolume counts from; None: that of a sweep's task.
        loss: fraction of the hypervolume that may be lost to save half of the cost.
    """

    kind: Literal["early_stopping"] = "early_stopping"
    chance: float | None = None
    loss: NonNegativeFloat = 0.015

    def for_sweep(self, sweep: Sweep, *, known: Collection[str], budgeted: bool) -> Self:
        if sweep.cost not in known:
            raise UsageError(
                f"early stopping judges by what a trial will cost, and {sweep.cost} is measured: train to the"
                f" end, or use one of {', '.join(known)}"
            )
        chance = sweep.base.task.chance(sweep.base.model) if self.chance is None else self.chance
        return replace(self, chance=chance)

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        """Yields jobs of worthy arms in order of cost. Within a band, all arms are tried to their rung before
        another goes on from there; after that the largest improvement for the cost is first. The trunk of
        a branch is trained before it.
        """
        table, named = self._table(states), {state.name: state for state in states}
        order = np.lexsort((-table.worth, table.paused, table.band))
        for i in order[(table.is_open & (table.worth >= 2 * self.loss))[order]]:
            first = max(table.seeds[i], key=lambda s: (s.begins_at, s.running))
            all_together = table.early[i] or first.finished
            for state in table.seeds[i] if all_together else [first]:
                trunk = named.get(state.after or "")
                if trunk is not None and trunk.waiting:
                    yield Job(state=trunk, until=trunk.steps)
                elif state.waiting:
                    pauses = not all_together and state.begins_at < _rung(state)
                    yield Job(state=state, until=_rung(state) if pauses else state.steps)

    def predictions(self, states: Sequence[TrialState]) -> dict[Hashable, float]:
        """Leaves out arms that failed."""
        table = self._table(states)
        final = table.chance + table.scale * table.mean
        return {table.seeds[i][0].arm: float(final[i]) for i in np.flatnonzero(~table.failed)}

    def passed_by(self, states: Sequence[TrialState]) -> dict[Hashable, tuple[float, float]]:
        """Returns the arms that are not worth their cost. Together they add less: they compete."""
        table = self._table(states)
        passed = np.flatnonzero(table.is_open & (table.worth < 2 * self.loss))
        return {table.seeds[i][0].arm: (float(table.gain[i]), float(table.left[i])) for i in passed}

    def _table(self, states: Sequence[TrialState]) -> "_Table":
        return _Table(states, self.chance or 0.0)


class _Table:
    """Predictions and costs of the arms, a row each, from cheap to dear whatever the order of `states`.
    `gain` and `left` are parts of the hypervolume and of all cost, `mean` is a part of `scale` above chance.
    """

    def __init__(self, states: Sequence[TrialState], chance: float) -> None:
        self.chance = chance
        trunks, arms = {state.after for state in states}, dict[Hashable, list[TrialState]]()
        for state in states:
            if state.name not in trunks:  # which is no point of the frontier
                arms.setdefault(state.arm, []).append(state)
        cost = {arm: fsum(s.cost for s in seeds) / len(seeds) for arm, seeds in arms.items()}
        # The checksum mixes arms of one cost, whose names may say what they are.
        order = sorted(arms, key=lambda arm: (cost[arm], zlib.crc32(str(arm).encode()), str(arm)))
        self.seeds = [sorted(arms[arm], key=lambda s: s.name) for arm in order]
        # A trunk that is not complete is paid by its branches together.
        open_cost = {s.name: s.flops * s.part(s.steps) for s in states if s.outcome is None}
        branches = Counter(s.after for s in states if s.name in open_cost)
        share: dict[str | None, float] = {t: c / branches[t] for t, c in open_cost.items() if t in branches}
        left = [fsum(open_cost.get(s.name, 0.0) + share.get(s.after, 0.0) for s in a) for a in self.seeds]
        rows = np.array([_row(seeds, chance) for seeds in self.seeds], dtype=float).reshape(-1, 9)
        size, num, end, squares, rung, running, tried, failed, flops = rows.T
        x = np.log10([cost[arm] for arm in order])
        self.band = np.floor((x - x[:1]) / BAND + 1e-6)
        self.failed = failed > 0
        complete = (num == size) & ~self.failed
        self.is_open = ~complete & ~self.failed
        taken = complete | (running > 0) & ~self.failed
        cheap = flops <= 0.5 * flops.max(initial=0.0)
        total = fsum(s.flops for s in states)
        self.early = taken.sum() - taken < np.where(cheap, FIRST_ARMS, 1)
        self.early |= np.cumsum(flops) <= FIRST_COST * total
        self.paused = (tried > 0) & (num == 0) & ~self.early

        unit = self.scale = max((q for q in (*end, *rung) if 0 < q < math.inf), default=1.0)
        self.mean, sd = _predict(_Bins(x), size, num, end / unit, squares / unit**2, rung / unit)
        # Arms that run count as better than predicted, so that fewer of their kind start beside them.
        counted = np.where(taken, self.mean + sd * ~complete, 0.0)
        top = np.maximum.accumulate(np.where(taken, self.mean, 0.0))
        volume = float(top @ np.diff(x, append=x[-1:] + END)) or 1e-12
        self.gain, self.left = expected_gains(x, self.mean, sd, counted) / volume, np.array(left) / total
        self.worth = self.gain / np.maximum(self.left, 1e-12)


def _row(seeds: Sequence[TrialState], chance: float) -> tuple[float, ...]:
    ends = [s.reached[s.steps] - chance for s in seeds if s.finished]
    mean = fsum(ends) / len(ends) if ends else math.nan
    rung = next((s.reached[_rung(s)] for s in seeds if _rung(s) in s.reached), math.nan)
    squares, running = fsum((q - mean) ** 2 for q in ends), any(s.running for s in seeds)
    failed = any(s.failed or not all(map(math.isfinite, s.reached.values())) for s in seeds)
    tried, flops = running or any(s.reached for s in seeds), fsum(s.flops for s in seeds)
    return len(seeds), len(ends), mean, squares, rung - chance, running, tried, failed, flops


def _rung(state: TrialState) -> int:
    return max(1, math.ceil(RUNG * state.steps))


class _Bins:
    """Sums and means over arms of about the same cost."""

    def __init__(self, x: Floats) -> None:
        grid, self.bin_of = np.unique(np.round((x - x[:1]) / BIN), return_inverse=True)
        self.at = BIN * grid
        self._near = np.exp(-0.5 * (np.subtract.outer(self.at, self.at) / NEAR) ** 2)

    def sums(self, values: Floats) -> Floats:
        """(arms,) -> (bins,)"""
        return np.bincount(self.bin_of, values, minlength=len(self.at)).astype(np.float64)

    def above_mean(self, values: Floats, weight: Floats) -> Floats:
        """(arms,), (arms,) -> (arms,): the difference to the weighted mean of arms of nearby cost."""
        mean = self._near @ self.sums(values * weight) / np.maximum(self._near @ self.sums(weight), 1e-12)
        return values - mean[self.bin_of]

    def variance(self, squares: Floats, known: Floats, assumed: float, weight: float) -> float:
        """Returns a variance around one mean for each bin, from `known` squares and the assumption before."""
        freedom = known.sum() - np.count_nonzero(self.sums(known))
        return (weight * assumed + max(fsum(squares * known), 0.0)) / (weight + freedom)


def _predict(
    bins: _Bins, size: Floats, num: Floats, end: Floats, squares: Floats, rung: Floats
) -> tuple[Floats, Floats]:
    """Returns mean and standard deviation of the mean of all `size` seeds of each arm, of which `num` are
    complete with mean `end`.
    """
    known = np.isfinite(end).astype(float)
    y = np.where(known, end, 0.0)
    freedom = fsum(num * known - known)
    seed_var = (PRIOR_ARMS * SEED_SD**2 + fsum(squares[known > 0])) / (PRIOR_ARMS + freedom)
    seen_var = seed_var / np.maximum(num, 1)
    # The quality over log cost is a Brownian motion, seen through the arms that have an end.
    prior = LEVEL_SD**2 + DECADE_SD**2 * np.minimum.outer(bins.at, bins.at)
    arm_var, trend, covariance = ARM_SD**2, y, prior
    for _ in range(2):
        weight = known / (arm_var + seen_var)
        precision = bins.sums(weight)
        covariance = np.linalg.solve(np.eye(len(prior)) + prior * precision, prior)
        trend = (LEVEL + covariance @ (bins.sums(weight * y) - precision * LEVEL))[bins.bin_of]
        arm_var = bins.variance((y - trend) ** 2 - seen_var, known, ARM_SD**2, PRIOR_ARMS)
    # The slope of the end over the rung is learned from arms that have both.
    here = np.isfinite(rung).astype(float)
    at_rung, both = np.where(here, rung, 0.0), here * known
    a, b = (bins.above_mean(values, both) * both for values in (at_rung, y))
    one_var = noise = arm_var + seed_var
    slope, precision = SLOPE, SLOPE_SD**-2
    for _ in range(2):
        precision = SLOPE_SD**-2 + a @ a / noise
        slope = max((SLOPE * SLOPE_SD**-2 + a @ b / noise) / precision, 0.0)
        noise = bins.variance((b - slope * a) ** 2, both, one_var, PRIOR_PAIRS)
    # Arms go on because of their rungs, so a rung is compared with those of the arms that went on.
    above = bins.above_mean(at_rung, here * (UNPAIRED + both)) * here
    mean = np.where(known, y - trend, slope * above)
    var = np.where(known, 0.0, np.where(here, noise + above**2 / precision, one_var))
    # What is seen is in part the luck of the seeds, and counts for the arm as far as it is not.
    own, whole = arm_var + seen_var, arm_var + seed_var / size
    share = whole / own
    certain = share * np.maximum(1 - var / own, 0)
    var = whole * (1 - share) + share**2 * var + (1 - certain) ** 2 * np.diag(covariance)[bins.bin_of]
    return trend + share * mean, np.sqrt(np.maximum(var, 1e-18))


def expected_gains(x: Floats, mean: Floats, sd: Floats, counted: Floats) -> Floats:
    """(arms,) -> (arms,): what each arm is expected to add to the hypervolume of those that are `counted`
    with a quality above 0. `x` is log10 of the cost, and rises.
    """
    heights = np.maximum(counted, 0.0)
    top = np.maximum.accumulate(heights)
    gains = _gains_over(top, x, mean, sd, np.arange(len(x)))
    # Without an arm that is not on the front, the front is the same.
    for i in np.flatnonzero(np.diff(top, prepend=0.0) > 0):
        others = np.maximum.accumulate(np.where(np.arange(len(x)) == i, 0.0, heights))
        gains[i] = _gains_over(others, x, mean, sd, np.array([i]))[0]
    return gains


def _gains_over(top: Floats, x: Floats, mean: Floats, sd: Floats, arms: NDArray[np.intp]) -> Floats:
    """Returns the expected gain of each of `arms` over a staircase that has the height `top` from `x` on."""
    rises = np.flatnonzero(np.diff(top, prepend=0.0) > 0)
    start, end = np.append(-np.inf, x[rises]), np.append(x[rises], x[-1:] + END)
    width = np.clip(end - np.maximum(start, x[arms, None]), 0, None)
    above, sd = mean[arms, None] - np.append(0.0, top[rises]), sd[arms, None]
    density = np.exp(-0.5 * (above / sd) ** 2) / math.sqrt(2 * math.pi)
    return (width * (above * ndtr(above / sd) + sd * density)).sum(axis=1)
