"""Early stopping for quality against cost: asynchronous successive halving by what the frontier would gain.

Source: the rungs, and promotion without waiting, are those of ASHA (Li et al. 2020, algorithm 2). MO-ASHA
(Schmucker et al. 2021) promotes a fixed part of a rung, by non-dominated sorting and an epsilon-net. Here the
cost of an arm is known before it starts, so more can be said: whom the frontier could not gain by is not
promoted at all, and the others come in the order of what it would gain per FLOP. An arm next to another
gains little, which is the diversity. `bench/stopping.py` compares them.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.frontier.pareto import pareto_front
from orchestrator.sweeps.agenda import Job, Standing

Floats = NDArray[np.float64]

UNKNOWN_GAIN = 0.15  # of quality between two rungs, before any trial has made it
UNKNOWN_SD = 0.04  # of quality, among arms of like cost, and of what a rung foretells
SD_PER_DECADE = 0.03  # more, for arms whose cost is that far from all that are known
DECADES = 0.3  # of cost, within which arms foretell each other
HOPELESS_SD = 4.0  # by which a trial would have to do better than foretold, and still add nothing
WORTH_A_PAUSE = 0.05  # of all that was spent: what a pause must be able to save


class Halving:
    """Every trial pauses at its rungs, 1/16 and 1/4 of its steps by default, and goes on when it is the one
    that the frontier gains most by, per cost. Those that it could not gain by, even if they did much better
    than foretold, are not gone on with, and are stopped when the sweep ends.

    Args:
        chance: quality that the hypervolume counts from.
        eta: rungs are a factor of it apart.
        rungs: how many there are before the end.
        optimism: standard deviations by which a trial is thought to do better than foretold.
    """

    def __init__(self, *, chance: float, eta: int = 4, rungs: int = 2, optimism: float = 0.5) -> None:
        self.chance = chance
        self.parts = [eta**-k for k in range(rungs, 0, -1)] + [1.0]
        self.optimism = optimism

    def jobs(self, standings: Sequence[Standing]) -> Iterator[Job]:
        """By hypervolume gained per cost still to pay; of those that are foretold to add none, the cheapest
        first. Every trial is tried to its first rung.
        """
        if not standings:
            return
        cost = np.array([one.cost for one in standings])
        space = np.log10(cost)
        mean, sd = self._foretell(standings, space)
        taken = np.array([one.running or self._level(one) == len(self.parts) - 1 for one in standings])
        bound = np.array([space.max() + math.log10(1.1), 1 - self.chance])
        front = np.column_stack([space, 1 - mean])[taken]

        def gains_at(deviations: float) -> Floats:
            best = np.minimum(1, mean + deviations * sd)
            return gained(front, np.column_stack([space, 1 - best]), bound)

        gains, hopeless = gains_at(self.optimism), gains_at(HOPELESS_SD) <= 0
        left = np.array([1 - self._done(one) for one in standings])
        spent = float((cost * (1 - left)).sum())
        order = np.lexsort((cost, -gains / (cost * np.maximum(left, 1e-9))))
        for i in order:
            one = standings[i]
            if one.waiting and not (hopeless[i] and one.reached):
                small = one.cost * left[i] <= WORTH_A_PAUSE * spent
                yield Job(trial=one.trial, until=one.steps if small else self._next(one))

    def _foretell(self, standings: Sequence[Standing], space: Floats) -> tuple[Floats, Floats]:
        """Final quality of every trial, mean and standard deviation.

        Of one that has reached a rung: its quality there, and what others have gained since. Of one that has
        not: what is foretold of the others, weighted by how near their cost is.
        """
        gain, spread = self._gains_to_the_end(standings)
        levels = [self._level(one) for one in standings]
        mean = np.array(
            [_at(one) + gain[k] if k >= 0 else math.nan for one, k in zip(standings, levels, strict=True)]
        )
        sd = np.array([spread[k] if k >= 0 else 0.0 for k in levels])
        known = np.isfinite(mean)
        if not known.any():
            return np.full(len(mean), 0.5), np.full(len(mean), 0.2)
        apart = np.abs(space[:, None] - space[known])
        weight = np.exp(-((apart / DECADES) ** 2)) + 1e-9 * (apart == apart.min(axis=1, keepdims=True))
        near = (weight @ mean[known]) / weight.sum(axis=1)
        loose = UNKNOWN_SD + SD_PER_DECADE * np.minimum(apart.min(axis=1), 1)
        return np.where(known, mean, near), np.where(known, sd, loose)

    def _gains_to_the_end(self, standings: Sequence[Standing]) -> tuple[list[float], list[float]]:
        """For each rung: quality gained from there to the end, mean and standard deviation, rung by rung."""
        gain, spread = [0.0], [0.0]
        for k in range(len(self.parts) - 2, -1, -1):
            steps = [(self._step(one, k), self._step(one, k + 1), one.reached) for one in standings]
            made = [at[after] - at[before] for before, after, at in steps if before in at and after in at]
            own = max(float(np.std(made)), 0.005) if len(made) > 3 else UNKNOWN_SD
            gain.insert(0, gain[0] + (float(np.mean(made)) if made else UNKNOWN_GAIN))
            spread.insert(0, math.hypot(spread[0], own))
        return gain, spread

    def _step(self, one: Standing, level: int) -> int:
        return max(1, math.ceil(self.parts[level] * one.steps))

    def _level(self, one: Standing) -> int:
        """The last rung that it has reached; -1: none."""
        if not one.reached or math.isnan(_at(one)):
            return -1
        return max((k for k in range(len(self.parts)) if self._step(one, k) <= max(one.reached)), default=-1)

    def _next(self, one: Standing) -> int:
        begun = max(one.reached, default=0)
        return next(step for k in range(len(self.parts)) if (step := self._step(one, k)) > begun)

    def _done(self, one: Standing) -> float:
        return max(one.reached, default=0) / one.steps


def gained(front: Floats, points: Floats, bound: Floats) -> Floats:
    """(F, 2), (N, 2), (2,) -> (N,): what each point alone would add to the hypervolume of `front`, smaller
    being better and `bound` its limit.
    """
    front = np.unique(front[pareto_front(front)], axis=0)
    front = front[(front < bound).all(axis=1)]
    start = np.concatenate([[-np.inf], front[:, 0]])  # of the steps of the staircase, (F + 1,)
    end = np.concatenate([front[:, 0], bound[:1]])
    height = np.concatenate([bound[1:], front[:, 1]])
    width = np.clip(end - np.maximum(start, points[:, :1]), 0, None)
    return (width * np.clip(height - points[:, 1:], 0, None)).sum(axis=1)


def _at(one: Standing) -> float:
    """Its last quality."""
    return one.reached[max(one.reached)]
