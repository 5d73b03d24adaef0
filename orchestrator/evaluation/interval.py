"""The mean of a few seeds, and how far it may be off."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import stdtrit


class Interval(NamedTuple):
    """`half`: of the interval's width; nan for a single value."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.half) else f"{self.mean:.4f} +- {self.half:.4f}"


def interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Student's t-interval of the mean: t * s / sqrt(n), with n - 1 degrees of freedom."""
    n = len(values)
    if n < 2:
        return Interval(fmean(values), math.nan)
    return Interval(fmean(values), float(stdtrit(n - 1, (1 + level) / 2)) * stdev(values) / math.sqrt(n))
