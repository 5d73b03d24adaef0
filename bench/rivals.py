"""Schedulers that `bench/stopping.py` compares ours with, as policies of the agenda."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from orchestrator.frontier.pareto import pareto_front
from orchestrator.sweeps.agenda import Job, Standing, ToTheEnd

Arrival = ToTheEnd  # every arm to its end as it arrives: a random subset, for arrivals are shuffled


class CheapestFirst:
    def jobs(self, standings: Sequence[Standing]) -> Iterator[Job]:
        for one in sorted((one for one in standings if one.waiting), key=lambda one: one.cost):
            yield Job(trial=one.trial, until=one.steps)


class Promotion:
    """ASHA (Li et al. 2020, algorithm 2): of those at a rung the best 1/eta go on, highest rung first; else
    the next arm begins. `keys`: points (N, 2) of log10 cost and 1 - quality -> what is sorted by.
    """

    def __init__(self, keys: Callable[[np.ndarray], np.ndarray], *, eta: int = 4, rungs: int = 2) -> None:
        self.keys = keys
        self.eta = eta
        self.rungs = rungs

    def jobs(self, standings: Sequence[Standing]) -> Iterator[Job]:
        steps = standings[0].steps
        rungs = [max(1, math.ceil(steps / self.eta**k)) for k in range(self.rungs, 0, -1)] + [steps]
        for rung, after in reversed(list(pairwise(rungs))):
            here = [one for one in standings if rung in one.reached]
            if not here:
                continue
            points = np.array([(math.log10(one.cost), 1 - one.reached[rung]) for one in here])
            best = np.argsort(self.keys(points), kind="stable")[: len(here) // self.eta]
            for one in (here[i] for i in best):
                if one.waiting and max(one.reached) == rung:
                    yield Job(trial=one.trial, until=after)
        for one in standings:
            if one.waiting and not one.reached:
                yield Job(trial=one.trial, until=rungs[0])


def scalarised(weight: float) -> Callable[[np.ndarray], np.ndarray]:
    """1 - quality, plus `weight` for every decade of cost."""
    return lambda points: points[:, 1] + weight * points[:, 0]


def ranks(points: np.ndarray) -> np.ndarray:
    """(points, 2) -> (points,): 0 on the front, 1 on the front without rank 0, and so on.

    Source: non-dominated sorting, Deb et al., "NSGA-II" (2002), section III.A.
    """
    left, found, rank = points.copy(), np.zeros(len(points), dtype=int), 0
    while (front := pareto_front(left)).any():
        found[front], left[front] = rank, np.nan
        rank += 1
    return found


def non_dominated(points: np.ndarray) -> np.ndarray:
    """By rank, and within one by an epsilon-net: next the point that is furthest from those before it, as
    MO-ASHA (Schmucker et al. 2021).
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


class SyneTune:
    """MOASHA of syne-tune: every arm runs on from rung to rung unless it is stopped there."""

    def __init__(self, *, eta: int = 4, every: int = 10) -> None:
        from syne_tune.optimizer.schedulers.multiobjective.moasha import MOASHA  # pyright: ignore

        self.every = every
        self.scheduler = MOASHA(
            config_space={},
            metrics=["cost", "error"],
            time_attr="step",
            max_t=10**6,  # `jobs` ends at the last step itself
            grace_period=every,
            reduction_factor=eta,
            random_seed=0,
        )
        self._told: dict[str, int] = {}
        self._stopped: set[str] = set()

    def jobs(self, standings: Sequence[Standing]) -> Iterator[Job]:
        for one in standings:
            name, at = one.trial.name, max(one.reached, default=0)
            if at > self._told.get(name, 0) and one.outcome is None:
                self._tell(one, at)
        going = [one for one in standings if one.waiting and one.trial.name not in self._stopped]
        for one in sorted(going, key=lambda one: not one.reached):
            at = max(one.reached, default=0)
            yield Job(trial=one.trial, until=min(at + self.every, one.steps))

    def _tell(self, one: Standing, at: int) -> None:
        from syne_tune.backend.trial_status import Trial  # pyright: ignore

        name = one.trial.name
        trial = Trial(trial_id=abs(hash(name)), config={}, creation_time=None)  # pyright: ignore
        if name not in self._told:
            self.scheduler.on_trial_add(trial)
        self._told[name] = at
        result = {"step": at, "cost": math.log10(one.cost), "error": 1 - one.reached[at]}
        if self.scheduler.on_trial_result(trial, result) == "STOP":
            self._stopped.add(name)
