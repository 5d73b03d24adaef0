"""Early stopping for quality against cost: successive halving by expected hypervolume improvement.

Source: the rungs, and promotion without waiting, are those of ASHA (Li et al. 2020, algorithm 2). MO-ASHA
(Schmucker et al. 2021) promotes a fixed part of a rung, by non-dominated sorting and an epsilon-net. Here
the cost of an arm is known before it starts, so the expected improvement of the hypervolume (Emmerich et al.
2006) is a sum of one-dimensional integrals, exact for a normal prediction of the quality. `bench/stopping.py`
compares them.
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

# What is assumed before there are data, of qualities in 0..1; `PRIOR_WEIGHT` trials' worth of evidence.
UNKNOWN_GAIN = 0.15  # between two rungs
GAIN_SD = (0.2, 0.5, 0.1)  # of that gain, of its slope over quality, of its slope over decades of cost
NOISE_SD = 0.04  # of a predicted quality at the end
SEED_SD = 0.015  # between seeds of an arm
PRIOR_WEIGHT = 4.0

UNKNOWN_SD = 0.02  # among arms of like cost
SD_PER_DECADE = 0.03  # more, for arms whose cost is that far from all that were tried
DECADES = 0.3  # of cost, within which arms predict each other
NEGLIGIBLE = 3e-4  # part of the hypervolume: an arm that is expected to add less is not gone on with
WORTH_A_PAUSE = 0.05  # part of everything spent: what a pause must be able to save


class MultiObjectiveASHA:
    """Every trial pauses at its rungs, 1/16 and 1/4 of its steps by default, and goes on when its arm is the
    one that is expected to improve the hypervolume most, per cost still to pay.

    The seeds of an arm are judged together: the first one is trained alone. Once it is complete the others
    come next, without pauses, or the arm is dropped. An arm that is expected to improve the hypervolume by
    less than `NEGLIGIBLE` is not gone on with, and its trials are stopped when the sweep ends.

    Args:
        chance: quality that the hypervolume counts from.
        eta: rungs are a factor of it apart.
        rungs: how many there are before the end.
    """

    def __init__(self, *, chance: float, eta: int = 4, rungs: int = 2) -> None:
        self.chance = chance
        self.parts = [eta**-k for k in range(rungs, 0, -1)] + [1.0]

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        """Yields jobs by improvement per cost; every arm is tried to its first rung at least."""
        if not states:
            return
        arms = _by_arm(states)
        cost = np.array([fsum(s.cost for s in seeds) / len(seeds) for seeds in arms])
        log_cost = np.log10(cost)
        mean, sd = self._predict_arms(arms, log_cost)
        finished = np.array([any(s.finished for s in seeds) for seeds in arms])
        failed = np.array([any(s.failed for s in seeds) for seeds in arms])
        running = np.array([any(s.running for s in seeds) for seeds in arms])
        points = np.column_stack([log_cost, 1 - mean])
        bound = np.array([log_cost.max() + math.log10(1.1), 1 - self.chance])
        gains, volume = _improvements(points, sd, (finished | running) & ~failed, bound)
        left = np.array([fsum(_cost_left(s) for s in seeds) for seeds in arms])
        spent = fsum(s.cost for s in states) - fsum(left)
        order = np.lexsort((cost, -gains / np.maximum(left, 1e-9 * cost), ~finished))
        for i in order:
            seeds = arms[i]
            if failed[i] or (gains[i] <= NEGLIGIBLE * volume and any(s.reached for s in seeds)):
                continue
            if finished[i]:
                yield from (Job(state=s, until=s.steps) for s in seeds if s.waiting)
                continue
            first = max(seeds, key=lambda s: (s.begins_at, s.running))
            if first.waiting:
                small = _cost_left(first) <= WORTH_A_PAUSE * spent
                yield Job(state=first, until=first.steps if small else self._next_rung(first))

    def predictions(self, states: Sequence[TrialState]) -> dict[Hashable, float]:
        """Returns arm -> its final quality as it is predicted, of arms that have reached a rung."""
        arms = _by_arm(states)
        cost = np.array([fsum(s.cost for s in seeds) / len(seeds) for seeds in arms])
        mean, _ = self._predict_arms(arms, np.log10(cost))
        tried = [any(s.reached for s in seeds) for seeds in arms]
        return {seeds[0].arm: float(m) for seeds, m, yes in zip(arms, mean, tried, strict=True) if yes}

    def _predict_arms(self, arms: Sequence[Sequence[TrialState]], log_cost: Floats) -> tuple[Floats, Floats]:
        """Returns the final quality of each arm, a mean over its seeds: expectation, standard deviation."""
        states = [s for seeds in arms for s in seeds]
        arm_of = np.repeat(np.arange(len(arms)), [len(seeds) for seeds in arms])
        final, var = self._predict(states, log_cost[arm_of])
        over = np.array([s.finished for s in states])
        # The trials of each arm that count: the complete ones, else all that were tried.
        some_over = np.bincount(arm_of, over, len(arms)) > 0
        counts = np.isfinite(final) & (over | ~some_over[arm_of])
        num = np.bincount(arm_of, counts, len(arms))
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.bincount(arm_of, np.where(counts, final, 0), len(arms)) / num
            var = np.bincount(arm_of, np.where(counts, var, 0), len(arms)) / num
        around = np.where(counts & over, final - mean[arm_of], 0)
        freedom = np.maximum(num - 1, 0)[some_over].sum()
        seed_var = _shrunk((around**2).sum(), freedom, SEED_SD)
        size = np.bincount(arm_of)
        missing = size - num
        with np.errstate(invalid="ignore", divide="ignore"):
            var = np.where(some_over, seed_var * missing / (size * num), var)
        return _fill_in(mean, np.sqrt(var), log_cost)

    def _predict(self, states: Sequence[TrialState], log_cost: Floats) -> tuple[Floats, Floats]:
        """Returns the final quality of each trial, mean and variance; not a number for trials without a rung.

        From the last rung to the first: what the trials that went on from it gained, as a linear function of
        their quality there and of their cost. Trials that are at a later rung count with their prediction.
        """
        rungs = len(self.parts) - 1
        at = np.array([[s.reached.get(self._step(s, k), math.nan) for k in range(rungs)] for s in states])
        at = at.reshape(len(states), rungs)
        final = np.array([s.reached[s.steps] if s.finished else math.nan for s in states])
        var = np.zeros(len(states))
        for k in reversed(range(rungs)):
            known, here = np.isfinite(final), np.isfinite(at[:, k])
            went_on, waits = here & known, here & ~known
            if waits.any():
                features = np.column_stack([np.ones(len(states)), at[:, k], log_cost])
                prior = UNKNOWN_GAIN * (rungs - k)
                gain, gain_var = _regress(features, final - at[:, k], went_on, waits, prior)
                later = var[went_on].mean() if went_on.any() else 0.0
                final[waits] = np.minimum(at[waits, k] + gain, 1.0)
                var[waits] = gain_var + later
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
    """Returns a variance, from a sum of squares and what was assumed before."""
    return (PRIOR_WEIGHT * prior_sd**2 + squares) / (PRIOR_WEIGHT + freedom)


def _regress(
    features: Floats, target: Floats, known: NDArray[np.bool_], asked: NDArray[np.bool_], prior: float
) -> tuple[Floats, Floats]:
    """Bayesian linear regression on the rows `known`: mean and variance of the target of the rows `asked`."""
    center = features[known].mean(axis=0) if known.any() else features[asked].mean(axis=0)
    shifted = features - center
    shifted[:, 0] = 1.0
    rows, expected = shifted[known], np.array([prior, 0.0, 0.0])
    precision = np.diag(np.array(GAIN_SD) ** -2.0)
    noise, covariance, weights = NOISE_SD**2, np.linalg.inv(precision), expected
    # The noise comes from the residuals of a first fit. What was assumed of the slopes does not depend on it.
    for _ in range(2):
        covariance = np.linalg.inv(rows.T @ rows / noise + precision)
        weights = covariance @ (rows.T @ target[known] / noise + precision @ expected)
        residual = target[known] - rows @ weights
        noise = _shrunk((residual**2).sum(), len(residual), NOISE_SD)
    ahead = shifted[asked]
    return ahead @ weights, noise + np.einsum("ij,jk,ik->i", ahead, covariance, ahead)


def _fill_in(mean: Floats, sd: Floats, log_cost: Floats) -> tuple[Floats, Floats]:
    """Predicts arms that were not tried by those that were, weighted by how near their cost is."""
    known = np.isfinite(mean)
    if not known.any():
        return np.full(len(mean), 0.5), np.full(len(mean), 0.2)
    # Neighbours are taken together in bins of a fiftieth of a decade, so that thousands of arms stay cheap.
    place, bin_of = np.unique(np.round(log_cost[known], 2), return_inverse=True)
    count, total = np.bincount(bin_of), np.bincount(bin_of, mean[known])
    apart = np.abs(log_cost[~known, None] - place)
    nearest = apart.min(axis=1, keepdims=True)
    weight = np.exp(-((apart / DECADES) ** 2)) + 1e-9 * (apart == nearest)
    mean, sd = mean.copy(), sd.copy()
    mean[~known] = (weight @ total) / (weight @ count)
    sd[~known] = UNKNOWN_SD + SD_PER_DECADE * np.minimum(nearest[:, 0], 1)
    return mean, sd


def _improvements(
    points: Floats, sd: Floats, taken: NDArray[np.bool_], bound: Floats
) -> tuple[Floats, float]:
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
