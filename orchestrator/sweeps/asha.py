"""Early stopping for quality against cost: successive halving by expected hypervolume improvement.

Source: the rungs, and promotion without waiting, are those of ASHA (Li et al. 2020, algorithm 2). MO-ASHA
(Schmucker et al. 2021) promotes a fixed part of a rung, by non-dominated sorting and an epsilon-net. Here
the cost of an arm is known before it starts, so the expected improvement of the hypervolume (Emmerich et al.
2006) is a sum of one-dimensional integrals, exact for a normal prediction of the quality. `bench/stopping.py`
compares these policies.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from math import fsum

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from orchestrator.frontier.pareto import hypervolume_2d, pareto_front
from orchestrator.sweeps.queue import Job, TrialState

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Assumptions before there are data, for qualities in 0..1. They weigh as much as `PRIOR_WEIGHT` trials.
UNKNOWN_GAIN = 0.15  # between two rungs
GAIN_SD = 0.2  # of that gain, for arms of any cost
SLOPE_SD = 0.5  # of its slope over the quality at the rung
COST_SD = 0.1  # of the difference between arms whose costs are far apart
DECADES = 0.3  # of cost, within which arms predict each other
NOISE_SD = 0.04  # of a predicted quality at the end
SEED_SD = 0.015  # between seeds of an arm
PRIOR_WEIGHT = 4.0

TOLERANCE = 2e-3  # part of the hypervolume that all stopped arms together are expected to add at most
WORTH_A_PAUSE = 0.05  # part of everything spent: what a pause must be able to save


class MultiObjectiveASHA:
    """Every trial pauses at its rungs, 1/16 and 1/4 of its steps by default. The arm is resumed that has the
    highest expected improvement of the hypervolume per remaining cost.

    The seeds of an arm are judged together: the first seed is trained alone, and the others follow without
    pauses if the arm is still worth their cost. The least promising arms are dropped as long as they are
    expected to add less than `TOLERANCE` together. Their trials are stopped when the sweep ends.

    Args:
        chance: quality that the hypervolume counts from.
        eta: factor between two rungs.
        rungs: number of rungs before the end.
    """

    def __init__(self, *, chance: float, eta: int = 4, rungs: int = 2) -> None:
        self.chance = chance
        self.parts = [eta**-k for k in range(rungs, 0, -1)] + [1.0]

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        """Yields jobs by improvement per cost. Every arm is tried to its first rung at least."""
        if not states:
            return
        arms = _by_arm(states)
        log_cost, mean, sd = self._predict_arms(arms)
        finished = np.array([any(s.finished for s in seeds) for seeds in arms])
        failed = np.array([any(s.failed for s in seeds) for seeds in arms])
        running = np.array([any(s.running for s in seeds) for seeds in arms])
        tried = np.array([any(s.reached for s in seeds) for seeds in arms])
        left = np.array([fsum(_cost_left(s) for s in seeds) for seeds in arms])
        spent = fsum(s.cost for s in states) - fsum(left)
        bound = np.array([log_cost.max() + math.log10(1.1), 1 - self.chance])
        points = np.column_stack([log_cost, 1 - mean])
        gains, volume = _improvements(points, sd, (finished | running) & ~failed, bound)
        worth = gains / np.maximum(left, 1e-9 * 10**log_cost)

        open_arms = np.flatnonzero((left > 0) & tried & ~failed)
        open_arms = open_arms[np.argsort(worth[open_arms])]
        stopped = failed.copy()
        stopped[open_arms[np.cumsum(gains[open_arms]) <= TOLERANCE * volume]] = True
        for i in np.lexsort((log_cost, -worth)):
            if stopped[i]:
                continue
            if finished[i]:
                yield from (Job(state=s, until=s.steps) for s in arms[i] if s.waiting)
                continue
            first = max(arms[i], key=lambda s: (s.begins_at, s.running))
            if first.waiting:
                small = _cost_left(first) <= WORTH_A_PAUSE * spent
                yield Job(state=first, until=first.steps if small else self._next_rung(first))

    def predictions(self, states: Sequence[TrialState]) -> dict[Hashable, float]:
        """Returns arm -> its predicted final quality, for arms that have reached a rung and did not fail."""
        if not states:
            return {}
        arms = _by_arm(states)
        _, mean, _ = self._predict_arms(arms)
        tried = [any(s.reached for s in seeds) and not any(s.failed for s in seeds) for seeds in arms]
        return {seeds[0].arm: float(m) for seeds, m, yes in zip(arms, mean, tried, strict=True) if yes}

    def _predict_arms(self, arms: Sequence[Sequence[TrialState]]) -> tuple[Floats, Floats, Floats]:
        """Returns log10 of the cost of each arm, and mean and standard deviation of its final quality, which
        is a mean over its seeds.
        """
        log_cost = np.log10([fsum(s.cost for s in seeds) / len(seeds) for seeds in arms])
        states = [s for seeds in arms for s in seeds]
        arm_of = np.repeat(np.arange(len(arms)), [len(seeds) for seeds in arms])
        final, var = self._predict(states, log_cost[arm_of])
        over = np.array([s.finished for s in states])
        # The complete seeds of an arm count; without them those that were tried; without these all.
        level = np.array([2 * s.finished + bool(s.reached) for s in states])
        best = np.zeros(len(arms), dtype=int)
        np.maximum.at(best, arm_of, level)
        counts = level == best[arm_of]
        num = np.bincount(arm_of, counts)
        mean = np.bincount(arm_of, counts * final) / num
        around = np.where(over, final - mean[arm_of], 0)
        freedom = over.sum() - len(set(arm_of[over]))
        seed_var = _shrunk((around**2).sum(), freedom, SEED_SD)
        size = np.bincount(arm_of)
        missing = seed_var * (size - num) / (size * num)
        var = np.where(best > 1, missing, np.bincount(arm_of, counts * var) / num)
        return log_cost, mean, np.sqrt(var)

    def _predict(self, states: Sequence[TrialState], log_cost: Floats) -> tuple[Floats, Floats]:
        """Returns mean and variance of the final quality of each trial.

        From the last rung to the start: the gain of the trials that went on from there predicts the gain of
        those that did not. Trials that are at a later rung count with their prediction and its variance.
        """
        rungs = len(self.parts) - 1
        at = np.full((len(states), rungs + 1), self.chance)
        for k in range(rungs):
            at[:, k + 1] = [s.reached.get(self._step(s, k), math.nan) for s in states]
        final = np.array([s.reached[s.steps] if s.finished else math.nan for s in states])
        var = np.zeros(len(states))
        for k in reversed(range(rungs + 1)):
            known, here = np.isfinite(final), np.isfinite(at[:, k])
            went_on, waits = here & known, here & ~known
            if waits.any():
                features, prior_sd = _features(at[:, k] - np.mean(at[here, k]), log_cost)
                expected = at[:, k] + UNKNOWN_GAIN * (rungs + 1 - k)
                surplus, var[waits] = _regress(
                    features[went_on], (final - expected)[went_on], var[went_on], features[waits], prior_sd
                )
                final[waits] = np.minimum(expected[waits] + surplus, 1.0)
        return final, var

    def _step(self, state: TrialState, rung: int) -> int:
        return max(1, math.ceil(self.parts[rung] * state.steps))

    def _next_rung(self, state: TrialState) -> int:
        return next(step for k in range(len(self.parts)) if (step := self._step(state, k)) > state.begins_at)


def _by_arm(states: Sequence[TrialState]) -> list[list[TrialState]]:
    arms: dict[object, list[TrialState]] = {}
    for state in states:
        arms.setdefault(state.arm, []).append(state)
    return list(arms.values())


def _cost_left(state: TrialState) -> float:
    return 0.0 if state.outcome is not None else state.cost * (1 - state.begins_at / state.steps)


def _shrunk(squares: float, freedom: float, prior_sd: float) -> float:
    """Returns a variance, from a sum of squares and the assumption before."""
    return (PRIOR_WEIGHT * prior_sd**2 + squares) / (PRIOR_WEIGHT + freedom)


def _features(quality: Floats, log_cost: Floats) -> tuple[Floats, Floats]:
    """(N,), (N,) -> (N, F), (F,): what a gain depends on, and the standard deviation of each weight.

    A gain is linear in the quality and a smooth function of the cost. Far from every known cost that function
    is as uncertain as before there were data: what small arms gained does not say what large arms gain.
    """
    knots = np.arange(log_cost.min(), log_cost.max() + DECADES, DECADES)
    bumps = np.exp(-(((log_cost[:, None] - knots) / DECADES) ** 2))
    prior_sd = np.array([GAIN_SD, SLOPE_SD, *np.full(len(knots), COST_SD)])
    return np.column_stack([np.ones(len(quality)), quality, bumps]), prior_sd


def _regress(
    rows: Floats, target: Floats, var: Floats, asked: Floats, prior_sd: Floats
) -> tuple[Floats, Floats]:
    """Bayesian linear regression, with weights around zero: mean and variance of the target of the rows
    `asked`. `var` is the variance of each known target, in addition to the common noise.
    """
    precision, noise = np.diag(prior_sd**-2.0), NOISE_SD**2
    covariance, weights = np.linalg.inv(precision), np.zeros(len(prior_sd))
    # The noise comes from the residuals of a first fit.
    for _ in range(2):
        weight = 1 / (noise + var)
        covariance = np.linalg.inv((rows.T * weight) @ rows + precision)
        weights = covariance @ (rows.T @ (weight * target))
        certain = noise * weight
        noise = _shrunk((certain * (target - rows @ weights) ** 2).sum(), certain.sum(), NOISE_SD)
    return asked @ weights, noise + ((asked @ covariance) * asked).sum(axis=1)


def _improvements(points: Floats, sd: Floats, taken: Mask, bound: Floats) -> tuple[Floats, float]:
    """Returns what each arm is expected to add to the hypervolume of all others that are `taken`, and that
    hypervolume.
    """
    front = points[taken]
    gains = expected_improvement(front, points, sd, bound)
    # Without an arm that is not on the front, the front is the same.
    for i in np.flatnonzero(taken)[pareto_front(front)] if len(front) else ():
        others = points[taken & (np.arange(len(points)) != i)]
        gains[i] = expected_improvement(others, points[[i]], sd[[i]], bound)[0]
    return gains, hypervolume_2d(front, bound)


def expected_improvement(front: Floats, points: Floats, sd: Floats, bound: Floats) -> Floats:
    """(F, 2), (N, 2), (N,), (2,) -> (N,): what each point alone is expected to add to the hypervolume of
    `front`, if its second objective is normal with that standard deviation. Smaller is better; `bound` is the
    limit.
    """
    front = np.unique(front[pareto_front(front)], axis=0)
    front = front[(front < bound).all(axis=1)]
    # The steps of the staircase, (F + 1,), and by how much the point is below each.
    start = np.concatenate([[-np.inf], front[:, 0]])
    end = np.concatenate([front[:, 0], bound[:1]])
    height = np.concatenate([bound[1:], front[:, 1]])
    width = np.clip(end - np.maximum(start, points[:, :1]), 0, None)
    below, sd = height - points[:, 1:], np.maximum(sd, 1e-12)[:, None]
    density = np.exp(-0.5 * (below / sd) ** 2) / math.sqrt(2 * math.pi)
    return (width * (below * ndtr(below / sd) + sd * density)).sum(axis=1)
