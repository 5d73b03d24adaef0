"""How far the seeds of a sweep agree: a band between two attainment surfaces."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.frontier.attainment import attainment_2d
from orchestrator.frontier.points import Point, is_complete

SHARES = (0.25, 0.75)


def seed_band(points: Sequence[Point]) -> NDArray[np.float64]:
    """(corners, 2), cost and quality: the outline of what at least 25 % but not 75 % of the seeds attain.

    Of the complete points, those with the most seeds take part, so that each seed has the same arms. Empty if
    that is fewer than two seeds.
    """
    complete = [point for point in points if is_complete(point)]
    num_seeds = max((len(point.qualities) for point in complete), default=0)
    shared = [point for point in complete if len(point.qualities) == num_seeds]
    if num_seeds < 2:
        return np.zeros((0, 2))
    runs = [np.array([(p.cost, -p.qualities[seed]) for p in shared]) for seed in range(num_seeds)]
    dearest = max(point.cost for point in shared)
    floor = min(min(point.qualities) for point in shared)
    upper, lower = (_stairs(attainment_2d(runs, share) * (1, -1), dearest, floor) for share in SHARES)
    return np.concatenate([upper, lower[::-1]])


def _stairs(corners: NDArray[np.float64], dearest: float, floor: float) -> NDArray[np.float64]:
    """From `floor` up the steps at `corners` (n, 2), by cost, and on to the dearest cost."""
    costs = np.append(np.repeat(corners[:, 0], 2), dearest)
    return np.stack([costs, np.append(floor, np.repeat(corners[:, 1], 2))], axis=1)
