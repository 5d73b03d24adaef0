"""Dominance, hypervolume and knee in two objectives. Pure numpy; smaller is better in both."""

import numpy as np
from numpy.typing import NDArray

_TIE = 1e-12  # distances to the chord are of order 1 and carry rounding of a few 1e-16


def pareto_front(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(points, 2) -> (points,): True where no other point is as good in both and better in one.

    Equal optimal points both stay. A row with a non-finite entry is never on the front and dominates nothing.
    """
    if costs.ndim != 2 or costs.shape[1] != 2:
        raise ValueError(f"costs must be (points, 2), got shape {costs.shape}")
    finite = np.isfinite(costs).all(axis=1)
    # Sorted by column 0, then 1, each distinct row must beat the best second objective before it.
    rows, row_of_point = np.unique(costs[finite], axis=0, return_inverse=True)
    best_before = np.append(np.inf, np.minimum.accumulate(rows[:, 1])[:-1])[: len(rows)]
    front = np.zeros(len(costs), dtype=np.bool_)
    front[finite] = (rows[:, 1] < best_before)[row_of_point]
    return front


def hypervolume_2d(costs: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """The exact area that (points, 2) dominate within `reference` (2,). A point not below it adds nothing."""
    inside = costs[(costs < reference).all(axis=1)]
    # Sorted by the first objective, the second one falls along a front.
    front = np.unique(inside[pareto_front(inside)], axis=0)
    heights = np.append(reference[1], front[:-1, 1]) - front[:, 1]
    return float((reference[0] - front[:, 0]) @ heights)


def knee(costs: NDArray[np.float64]) -> int:
    """The index of the front point furthest below the chord of the front's extremes, ranges scaled to 0..1.

    Among equally distant points, and where no point lies below the chord (one or two front points, a straight
    or an inward front), it is the point with the lowest second objective.

    Raises: ValueError if no row is finite.
    """
    on_front = np.flatnonzero(pareto_front(costs))
    if not len(on_front):
        raise ValueError(f"no finite point among {len(costs)}: there is no front and no knee")
    front = costs[on_front]
    span = np.ptp(front, axis=0)
    scaled = (front - front.min(axis=0)) / np.where(span > 0, span, 1)
    # The chord is x + y = 1, so this is the distance times sqrt(2).
    distance = 1 - scaled.sum(axis=1)
    candidates = np.flatnonzero(distance >= distance.max() - _TIE)
    return int(on_front[candidates[front[candidates, 1].argmin()]])
