"""What repeated runs attain, and hypervolume beyond two objectives. Smaller is better everywhere.

Source: attainment surfaces of Fonseca and Fleming (1996): the surface at a share bounds what at least that
share of the runs reach. With two objectives it is a staircase, computed here; hypervolume in more goes
through moocore.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def attainment_2d(runs: Sequence[NDArray[np.float64]], share: float) -> NDArray[np.float64]:
    """The lower-left corners (n, 2), by the first objective, of what at least `share` (0..1] of `runs` reach.

    Each run is (points, 2), finite. Up to a given first objective, the second is the k-th best of the runs,
    with k = share * runs rounded up.
    """
    first = np.unique(np.concatenate([run[:, 0] for run in runs]))
    best = np.sort([_best_second(run, first) for run in runs], axis=0)[math.ceil(share * len(runs)) - 1]
    corners = best < np.append(np.inf, best[:-1])
    return np.stack([first[corners], best[corners]], axis=1)


def _best_second(run: NDArray[np.float64], first: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least second objective among the points up to each of `first`; infinite where there is none."""
    by_first = run[np.argsort(run[:, 0])]
    least = np.append(np.inf, np.minimum.accumulate(by_first[:, 1]))
    return least[np.searchsorted(by_first[:, 0], first, side="right")]


def hypervolume(costs: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Exact volume that (points, objectives) dominate and `reference` bounds, two objectives or more.

    Raises: ModuleNotFoundError if moocore, an extra, is not installed. For two objectives alone,
    `pareto.hypervolume_2d` needs nothing.
    """
    try:
        import moocore  # pyright: ignore[reportMissingImports]  # an extra: absent from a plain installation
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"hypervolume in {costs.shape[1]} objectives needs moocore: pip install 'moe-frontier[frontier]'"
        ) from None
    inside = costs[np.isfinite(costs).all(axis=1) & (costs < reference).all(axis=1)]
    return float(moocore.hypervolume(inside, ref=reference)) if len(inside) else 0.0
