"""The trials of a sweep as points of cost and quality, and what is derived from them. Knows only numbers.

Everything is judged in one declared space, (log10 cost, 1 - quality), both minimised: another scale of an
axis, or another reference, changes hypervolumes and their order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from orchestrator.frontier.pareto import hypervolume_2d, knee, pareto_front

SPACE = "log10 cost, 1 - quality"

Status = Literal["finished", "diverged", "failed", "running"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One trial, or one operating point of a checkpoint. Unknown numbers are NaN."""

    arm: str
    family: str  # dense, soft, token_choice, expert_choice, or any later one
    cost: float  # minimised; in the unit that Frontier.cost_name says
    quality: float  # maximised; a fraction
    size: float  # expert slots per token: k * C, c, or slots / tokens; dense 1
    run_id: str
    run_url: str | None = None
    status: Status
    details: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """A sweep's points under one cost and one quality metric."""

    name: str
    cost_name: str
    quality_name: str
    points: tuple[Point, ...]
    rest: tuple[Point, ...] = ()  # confirmation runs, trained longer: shown, never counted
    reference: tuple[float, float]  # (cost, quality) that bounds the hypervolume

    def __post_init__(self) -> None:
        cost, quality = self.reference
        if not (0 < cost < math.inf and math.isfinite(quality)):
            raise ValueError(f"reference needs a finite cost above 0, a finite quality: got {self.reference}")


def is_complete(point: Point) -> bool:
    """Whether a point can be judged and drawn: finished, with a finite quality and a finite cost above 0."""
    return point.status == "finished" and 0 < point.cost < math.inf and math.isfinite(point.quality)


def on_front(frontier: Frontier) -> tuple[bool, ...]:
    """For each of `frontier.points`: complete, and no other complete point dominates it."""
    return tuple(pareto_front(_costs(frontier.points)).tolist())


def front_points(frontier: Frontier) -> tuple[Point, ...]:
    """The points on the front, cheapest first."""
    front = (point for point, on in zip(frontier.points, on_front(frontier), strict=True) if on)
    return tuple(sorted(front, key=lambda point: point.cost))


def dominated_points(frontier: Frontier) -> tuple[Point, ...]:
    """The complete points off the front, in their order."""
    pairs = zip(frontier.points, on_front(frontier), strict=True)
    return tuple(point for point, on in pairs if is_complete(point) and not on)


def hypervolume(frontier: Frontier) -> float:
    """Area between the front and the reference: decades of cost times fractions of quality."""
    cost, quality = frontier.reference
    return hypervolume_2d(_costs(frontier.points), np.array([math.log10(cost), 1 - quality]))


def knee_point(points: Sequence[Point]) -> Point:
    """The front point with the best trade: see `pareto.knee`. Raises: ValueError if no point is complete."""
    return points[knee(_costs(points))]


def _costs(points: Sequence[Point]) -> NDArray[np.float64]:
    """(points, 2) in the declared space; NaN where incomplete."""
    rows = [(math.log10(p.cost), 1 - p.quality) if is_complete(p) else (math.nan, math.nan) for p in points]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)
