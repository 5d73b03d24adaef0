"""Differences between arms at equal cost, paired by seed.

An arm of another size costs something else, so quality is compared with that of a *curve*: the points of one
kind, between which the quality of each seed is interpolated over the logarithm of the cost. Beyond its ends
the curve follows the line of the last two points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from orchestrator.frontier.points import Point

BEYOND = 1.2  # the factor of cost up to which a curve goes on at its ends
SIGNIFICANCE = 0.05
MARGIN = 0.003  # two qualities are equal if a difference of as much, either way, is ruled out

Relation = Literal["better", "worse", "equal", "undecided"]


def qualities_of(point: Point) -> tuple[float, ...]:
    """Returns the quality of each seed."""
    return point.qualities or (point.quality,)


def meets(curve: Sequence[Point], point: Point) -> bool:
    """Returns whether the curve has a quality at the cost of the point, for the same number of seeds. Costs
    that are not known yet do not count.
    """
    costs = [each.cost for each in curve]
    apart = point.cost > BEYOND * max(costs) or BEYOND * point.cost < min(costs)
    return len(curve) > 1 and not apart and len({len(qualities_of(each)) for each in (*curve, point)}) == 1


def paired_differences(point: Point, curve: Sequence[Point]) -> list[float]:
    """Returns, for each seed, the quality of the point minus that of the curve at its cost."""
    known = sorted(curve, key=lambda each: each.cost)
    log_costs = np.log10([each.cost for each in known])
    at = math.log10(point.cost)
    right = min(max(1, int(np.searchsorted(log_costs, at))), len(known) - 1)
    part = float((at - log_costs[right - 1]) / (log_costs[right] - log_costs[right - 1]))
    each = zip(*map(qualities_of, (point, known[right - 1], known[right])), strict=True)
    return [own - (low + part * (high - low)) for own, low, high in each]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean, and half the width of its 95 % interval, which is nan for a single value."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.half) else f"{self.mean:.4f} +- {self.half:.4f}"


def interval(values: Sequence[float]) -> Interval:
    """Student's t-interval of the mean: t * s / sqrt(n), with n - 1 degrees of freedom."""
    n, half = len(values), math.nan
    if n > 1:
        half = float(stdtrit(n - 1, 0.975)) * stdev(values) / math.sqrt(n)
    return Interval(mean=fmean(values), half=half)


def p_value(values: Sequence[float]) -> float:
    """Returns the p value of a mean of 0, two-sided, by Student's t; 0 for values without a spread."""
    mean = fmean(values)
    spread = stdev(values) if len(values) > 1 else 0.0
    if not spread:
        return float(mean == 0)
    return 2 * float(stdtr(len(values) - 1, -abs(mean) / (spread / math.sqrt(len(values)))))


def equivalence_p_value(values: Sequence[float]) -> float:
    """Returns the p value of a mean that is `MARGIN` or more away from 0: the larger one of two one-sided t
    tests (Schuirmann 1987); 1 for a single value, whose error is not known.
    """
    if len(values) < 2:
        return 1.0
    beyond, error = abs(fmean(values)) - MARGIN, stdev(values) / math.sqrt(len(values))
    return float(stdtr(len(values) - 1, beyond / error)) if error else float(beyond >= 0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p values corrected for their number (Holm 1979): one below 5 % is decided, and the chance that
    any is decided wrongly is 5 %.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    found, least = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[index]))
        found[index] = least
    return found


def decide(each: Sequence[Sequence[float]]) -> list[Relation]:
    """Returns what each of several groups of differences says: that their mean is ``equal`` to 0 within
    `MARGIN`, or else that it is ``better`` or ``worse``. There is one chance of 5 % that any is called equal
    wrongly, and one that any is called better or worse wrongly.
    """
    unlike = holm([p_value(values) for values in each])
    alike = holm([equivalence_p_value(values) for values in each])
    found: list[Relation] = []
    for values, p_unlike, p_alike in zip(each, unlike, alike, strict=True):
        significant: Relation = "better" if fmean(values) > 0 else "worse"
        differs: Relation = significant if p_unlike < SIGNIFICANCE else "undecided"
        found.append("equal" if p_alike < SIGNIFICANCE else differs)
    return found
