"""What a study found: a table, a picture of curves, and the figures that its claim is about."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

Say = Callable[[str], None]  # a line of progress


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Attributes:
    low, high: the ends of a band around `y`; none if empty.
    reference: what others are compared to: dashed and grey.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    reference: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    curves: Sequence[Curve]
    title: str = ""
    x_title: str
    y_title: str
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = ()
    x_names: Sequence[str] = ()  # of the ticks, in place of their numbers
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """Attributes:
    table: columns of equal length by their heading.
    details: further tables by name, too long to print.
    figures: of the claim, by name.
    notes: sentences to read with the table.
    """

    title: str
    table: Mapping[str, Sequence[Any]]
    panels: Sequence[Panel]
    figures: Mapping[str, float]
    notes: Sequence[str] = ()
    details: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


def band(label: str, x: Sequence[float], samples: Sequence[Sequence[float]]) -> Curve:
    """Mean and range of `samples`, one sequence per seed."""
    columns = list(zip(*samples, strict=True))
    return Curve(
        label=label,
        x=x,
        y=[fmean(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
    )


def deviation(values: Sequence[float]) -> float:
    """Of the sample; 0 of one value."""
    return stdev(values) if len(values) > 1 else 0.0
