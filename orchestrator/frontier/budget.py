"""Hypervolume against budget: how much of the frontier a sweep had found by the time it had spent so much."""

import math

import numpy as np
from numpy.typing import NDArray

from orchestrator.frontier.pareto import hypervolume_2d, pareto_front
from orchestrator.frontier.points import Frontier, costs_of


def hypervolume_by_budget(frontier: Frontier) -> NDArray[np.float64]:
    """(ended points, 2): device seconds spent so far, and the hypervolume of what was complete by then.

    In the order in which the points ended; those without a time are left out. Trials that were stopped,
    failed or diverged have spent too.
    """
    ended = sorted((p for p in frontier.points if math.isfinite(p.ended)), key=lambda p: p.ended)
    cost, quality = frontier.reference
    reference = np.array([math.log10(cost), 1 - quality])
    front, areas = np.zeros((0, 2)), []
    for row in costs_of(ended):
        front = np.append(front, row[None], axis=0)
        front = front[pareto_front(front)]
        areas.append(hypervolume_2d(front, reference))
    return np.stack([np.cumsum([p.spent for p in ended]), np.array(areas)], axis=1)
