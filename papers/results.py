"""What a study returns, and how its curves are drawn."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from orchestrator.frontier.drawing import COLOURS, INK, MUTED, new_figure, style_axes

ProgressFn = Callable[[str], None]  # called with a line of progress
Table = Mapping[str, Sequence[Any]]  # columns of equal length by heading


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A table and a picture that show whether a claim of a paper holds."""

    title: str
    table: Table
    figure: Figure
    metrics: Mapping[str, float]  # the figures that the claim is about
    notes: Sequence[str] = ()  # sentences to read with the table
    details: Mapping[str, Table] = field(default_factory=dict)  # further tables, too long to print


def panels(title: str, count: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with `count` axes, side by side or two by two."""
    columns = 2 if count == 4 else count
    width, height = (5.2, 4.0) if count > 1 else (8.0, 4.6)
    figure = new_figure(columns * width, count // columns * height + 0.5)
    figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure, list(figure.subplots(math.ceil(count / columns), columns, squeeze=False).flat)


def draw_curve(axes: Axes, x: Sequence[float], low: Any, middle: Any, high: Any, *, label: str) -> None:
    """A curve within the band from `low` to `high`, in the axes' next colour."""
    colour = COLOURS[len(axes.collections)]
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(x, middle, "o-", color=colour, markersize=4.5, label=label)


def draw_seeds(axes: Axes, x: Sequence[float], values_by_seed: Any, *, label: str) -> None:
    """Mean and range of several seeds: (seeds, len(x))."""
    values = np.asarray(values_by_seed)
    draw_curve(axes, x, values.min(0), values.mean(0), values.max(0), label=label)


def draw_reference(axes: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """A dashed curve that the others are compared to."""
    axes.plot(x, y, "--", color=MUTED, linewidth=1.2, label=label)


def finish(axes: Axes, x: str, y: str, ticks: Sequence[float] = (), title: str = "") -> None:
    """Adds titles, a legend and ticks at these places."""
    if ticks:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.minorticks_off()
    axes.legend(frameon=False, fontsize=9.5)
    style_axes(axes, title, x, y)
