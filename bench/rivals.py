"""Policies of the queue that `bench/stopping.py` compares early stopping with."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from orchestrator.frontier.pareto import hypervolume_2d, pareto_front
from orchestrator.sweeps.queue import Job, Policy, TrialState


def ranks(points: np.ndarray) -> np.ndarray:
    """(points, 2) -> (points,): 0 on the front, 1 on the front of the other points, and so on.

    Source: non-dominated sorting, Deb et al., "NSGA-II" (2002), section III.A.
    """
    left, found, rank = points.copy(), np.zeros(len(points), dtype=int), 0
    while (front := pareto_front(left)).any():
        found[front], left[front] = rank, np.nan
        rank += 1
    return found


class CheapestFirst(Policy):
    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        for state in sorted((state for state in states if state.waiting), key=lambda state: state.cost):
            yield Job(state=state, until=state.steps)


class Oracle(Policy):
    """Knows every point from the start, and trains only the frontier's arms, in the order of what each adds
    per cost.

    Args:
        points: arm -> log10 cost and 1 - quality.
        bound: the limit of the hypervolume.
    """

    def __init__(self, points: Mapping[str, tuple[float, float]], bound: np.ndarray) -> None:
        self.rank: dict[Hashable, int] = {}
        left, taken = dict(points), np.empty((0, 2))
        while left:
            volume = hypervolume_2d(taken, bound)
            gains = {
                a: hypervolume_2d(np.vstack([taken, point]), bound) - volume for a, point in left.items()
            }
            best = max(left, key=lambda arm: gains[arm] / 10 ** left[arm][0])
            if gains[best] < 1e-9:
                break
            self.rank[best] = len(self.rank)
            taken = np.vstack([taken, left.pop(best)])

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        wanted = [state for state in states if state.waiting and state.arm in self.rank]
        for state in sorted(wanted, key=lambda state: self.rank[state.arm]):
            yield Job(state=state, until=state.steps)


class Promotion(Policy):
    """ASHA (Li et al. 2020, algorithm 2): the best 1/eta of the trials at a rung go on, the highest rung
    first. If there is none, the next arm begins.

    Args:
        keys: points (N, 2) of log10 cost and 1 - quality -> sort key.
    """

    def __init__(self, keys: Callable[[np.ndarray], np.ndarray], *, eta: int = 4, rungs: int = 2) -> None:
        self.keys = keys
        self.eta = eta
        self.rungs = rungs

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        steps = states[0].steps
        rungs = [max(1, math.ceil(steps / self.eta**k)) for k in range(self.rungs, 0, -1)] + [steps]
        for rung, after in reversed(list(pairwise(rungs))):
            here = [state for state in states if rung in state.reached]
            if not here:
                continue
            points = np.array([(math.log10(state.cost), 1 - state.reached[rung]) for state in here])
            best = np.argsort(self.keys(points), kind="stable")[: len(here) // self.eta]
            for state in (here[i] for i in best):
                if state.waiting and max(state.reached) == rung:
                    yield Job(state=state, until=after)
        for state in states:
            if state.waiting and not state.reached:
                yield Job(state=state, until=rungs[0])


def scalarised(weight: float) -> Callable[[np.ndarray], np.ndarray]:
    """1 - quality, plus `weight` for every decade of cost."""
    return lambda points: points[:, 1] + weight * points[:, 0]


def non_dominated(points: np.ndarray) -> np.ndarray:
    """Sorts by rank, and within a rank by an epsilon-net as MO-ASHA does (Schmucker et al. 2021): next comes
    the point that is furthest from all points before it.
    """
    rank, span = ranks(points), np.ptp(points, axis=0)
    scaled = points / np.where(span > 0, span, 1)
    place = np.zeros(len(points))
    for level in np.unique(rank):
        left = list(np.flatnonzero(rank == level))
        chosen = [left.pop(int(np.argmin(scaled[left, 0])))]
        while left:
            apart = np.linalg.norm(scaled[left][:, None] - scaled[chosen], axis=2).min(axis=1)
            chosen.append(left.pop(int(np.argmax(apart))))
        place[chosen] = np.arange(len(chosen))
    return rank * (len(points) + 1) + place
