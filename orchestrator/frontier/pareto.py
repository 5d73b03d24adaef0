"""Dominance, ranks, hypervolume and knee. Pure numpy: costs in, answers out, smaller is better everywhere."""

import numpy as np
from numpy.typing import NDArray

_TIE = 1e-12  # distances to the chord are of order 1 and carry rounding of a few 1e-16


def pareto_front(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(points, objectives) -> (points,): True where no other is as good everywhere and better somewhere.

    Equal optimal points both stay. A row with a non-finite entry is never on the front and dominates nothing.
    """
    if costs.ndim != 2:
        raise ValueError(f"costs must be (points, objectives), got shape {costs.shape}")
    finite = np.isfinite(costs).all(axis=1)
    rows, row_of_point = np.unique(costs[finite], axis=0, return_inverse=True)
    row_on_front = _sweep(rows) if costs.shape[1] == 2 else _compare_all(rows)
    front = np.zeros(len(costs), dtype=np.bool_)
    front[finite] = row_on_front[row_of_point]
    return front


def ranks(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """(points, objectives) -> (points,): 0 on the front, 1 on the front once rank 0 is taken away, and so on.

    Equal points share a rank. Rows with a non-finite entry share one after all others. Memory: points
    squared. Source: non-dominated sorting, Deb et al., "NSGA-II" (2002), section III.A.
    """
    finite = np.isfinite(costs).all(axis=1)
    rows, row_of_point = np.unique(costs[finite], axis=0, return_inverse=True)
    dominates = np.ones((len(rows), len(rows)), dtype=np.bool_)
    np.fill_diagonal(dominates, False)  # the rows are distinct: no worse anywhere is better somewhere
    for objective in rows.T:
        dominates &= objective[:, None] <= objective
    num_above, rank_of_row, rank = dominates.sum(axis=0), np.full(len(rows), -1), 0
    while (front := np.flatnonzero((num_above == 0) & (rank_of_row < 0))).size:
        rank_of_row[front] = rank
        num_above -= dominates[front].sum(axis=0)
        rank += 1
    found = np.full(len(costs), rank)
    found[finite] = rank_of_row[row_of_point]
    return found


def epsilon_front(costs: NDArray[np.float64], epsilon: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(points, objectives) -> (points,): a thinned front. Each finite point has a member that is at most
    `epsilon` (objectives,) worse than it in any objective; no member is so near to a member before it.

    "Before" is by the first objective, then the next. Equal points: the first alone stays.
    """
    members: list[int] = []
    on_front = np.flatnonzero(pareto_front(costs))
    for index in on_front[np.lexsort(costs[on_front].T[::-1])]:
        if not (costs[members] - epsilon <= costs[index]).all(axis=1).any():
            members.append(int(index))
    thinned = np.zeros(len(costs), dtype=np.bool_)
    thinned[members] = True
    return thinned


def hypervolume_2d(costs: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Exact area that (points, 2) dominate and `reference` (2,) bounds; a point not below it adds nothing."""
    inside = costs[(costs < reference).all(axis=1)]
    front = np.unique(inside[pareto_front(inside)], axis=0)  # by the first objective, so the second falls
    heights = np.append(reference[1], front[:-1, 1]) - front[:, 1]
    return float((reference[0] - front[:, 0]) @ heights)


def knee(costs: NDArray[np.float64]) -> int:
    """Index of the front point furthest below the chord of the front's extremes, both ranges scaled to 0..1.

    Where none lies below the chord (one or two front points, a straight or an inward front), and among
    equally distant points, it is the one with the lowest second objective.

    Raises: ValueError if no row is finite.
    """
    on_front = np.flatnonzero(pareto_front(costs))
    if not len(on_front):
        raise ValueError(f"no finite point among {len(costs)}: there is no front and no knee")
    front = costs[on_front]
    span = np.ptp(front, axis=0)
    scaled = (front - front.min(axis=0)) / np.where(span > 0, span, 1)
    distance = 1 - scaled.sum(axis=1)  # times 1/sqrt(2): the chord is x + y = 1
    candidates = np.flatnonzero(distance >= distance.max() - _TIE)
    return int(on_front[candidates[front[candidates, 1].argmin()]])


def _sweep(rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Front of distinct rows (N, 2) sorted by column 0, then 1: each must beat the best second so far."""
    best_before = np.append(np.inf, np.minimum.accumulate(rows[:, 1])[:-1])[: len(rows)]
    return rows[:, 1] < best_before


def _compare_all(rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Front of distinct rows (N, M): a row that only itself reaches in every objective is not dominated."""
    return np.array([(rows <= row).all(axis=1).sum() == 1 for row in rows], dtype=np.bool_)
