"""The trials of a sweep as points of cost and quality, and what is derived from them. Knows only numbers.

Everything is judged in one declared space, (log10 cost, 1 - quality), both minimised: another scale of an
axis, or another reference, changes hypervolumes and their order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from orchestrator.frontier.pareto import hypervolume_2d, knee, pareto_front

SPACE = "log10 cost, 1 - quality"

Status = Literal["finished", "stopped", "diverged", "failed", "running"]  # stopped: early, never judged


@dataclass(frozen=True, kw_only=True)
class Point:
    """One arm of a sweep, or one operating point of a checkpoint. Unknown numbers are NaN."""

    arm: str
    family: str  # dense, soft, token_choice, expert_choice, or any later one
    cost: float  # minimised; in the unit that Frontier.cost_name says
    quality: float  # maximised; a fraction; the mean of `qualities` where there are several seeds
    size: float  # expert slots per token: k * C, c, or slots / tokens; dense 1
    run_id: str
    run_url: str | None = None
    status: Status
    details: Mapping[str, str | float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)  # of the further panels, by metric
    # Quartiles of the costs that are measured, by metric: NaN where unknown. Exact costs have none.
    spreads: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    qualities: tuple[float, ...] = ()  # one per seed, if several
    runs: tuple[tuple[str, str | None], ...] = ()  # (id, address) of the seeds beyond `run_id`
    settings: Mapping[str, str | float] = field(default_factory=dict)  # what claims and filters go by
    spent: float = 0.0  # device seconds, whatever came of them
    ended: float = math.nan  # unix seconds


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """A sweep's points under one cost and one quality metric."""

    name: str
    cost_name: str
    quality_name: str
    points: tuple[Point, ...]
    rest: tuple[Point, ...] = ()  # confirmation runs, trained longer: shown, never counted
    operating: tuple[Point, ...] = ()  # trained models used otherwise: see `operating.py`
    reference: tuple[float, float]  # (cost, quality) that bounds the hypervolume
    panels: tuple[str, ...] = ()  # further cost metrics, each found in the points' `costs`
    claims: tuple[str, ...] = ()  # statements to check: see `claims.py`
    published: bool = True  # whether the papers' points are drawn where the metrics agree
    note: str = ""  # a sentence for the reader, such as how shared training is charged

    def __post_init__(self) -> None:
        cost, quality = self.reference
        if not (0 < cost < math.inf and math.isfinite(quality)):
            raise ValueError(f"reference needs a finite cost above 0, a finite quality: got {self.reference}")


def is_complete(point: Point) -> bool:
    """Whether a point can be judged and drawn: finished, with a finite quality and a finite cost above 0."""
    return point.status == "finished" and 0 < point.cost < math.inf and math.isfinite(point.quality)


def quartiles(point: Point, cost_name: str) -> tuple[float, float]:
    """The quartiles of `point.cost`, which is that of `cost_name`; twice the cost itself if it has none."""
    low, high = point.spreads.get(cost_name, (point.cost, point.cost))
    return (low, high) if low <= point.cost <= high else (point.cost, point.cost)


def on_front(frontier: Frontier) -> tuple[bool, ...]:
    """For each of `frontier.points`: complete, and no other complete point dominates it."""
    return tuple(pareto_front(costs_of(frontier.points)).tolist())


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
    return hypervolume_2d(costs_of(frontier.points), np.array([math.log10(cost), 1 - quality]))


def standings(frontier: Frontier) -> tuple[str, ...]:
    """For each of `points`, `rest` and `operating`, its place if it is complete, else its status.

    Places are "frontier", "frontier, knee", "dominated", "confirm" in the rest, and "operating".
    """
    front = on_front(frontier)
    at_knee = knee(costs_of(frontier.points)) if any(front) else -1
    places = [
        "frontier, knee"
        if i == at_knee
        else "frontier"
        if on
        else "dominated"
        if is_complete(point)
        else point.status
        for i, (point, on) in enumerate(zip(frontier.points, front, strict=True))
    ]
    places += ["confirm" if is_complete(point) else point.status for point in frontier.rest]
    return (*places, *("operating" for _ in frontier.operating))


def family_fronts(frontier: Frontier) -> dict[str, tuple[Point, ...]]:
    """Of each family that has a complete point: its own front, cheapest first."""
    families = dict.fromkeys(point.family for point in frontier.points if is_complete(point))
    return {
        family: front_points(
            replace(frontier, points=tuple(p for p in frontier.points if p.family == family))
        )
        for family in families
    }


def panel(frontier: Frontier, cost_name: str) -> Frontier:
    """The same points under another of their costs, bounded at 1.1 times its highest."""
    points, rest, operating = (
        tuple(replace(point, cost=point.costs.get(cost_name, math.nan)) for point in group)
        for group in (frontier.points, frontier.rest, frontier.operating)
    )
    highest = max((p.cost for p in points if 0 < p.cost < math.inf), default=1.0)
    reference = (1.1 * highest, frontier.reference[1])
    return replace(
        frontier,
        cost_name=cost_name,
        points=points,
        rest=rest,
        operating=operating,
        reference=reference,
        panels=(),
        claims=(),
    )


def everything(frontier: Frontier) -> tuple[Point, ...]:
    """All that is drawn and listed, in the order of `standings`."""
    return frontier.points + frontier.rest + frontier.operating


def knee_point(points: Sequence[Point]) -> Point:
    """The front point with the best trade: see `pareto.knee`. Raises: ValueError if no point is complete."""
    return points[knee(costs_of(points))]


def costs_of(points: Sequence[Point]) -> NDArray[np.float64]:
    """(points, 2) in the declared space, log10 cost and 1 - quality; NaN where incomplete."""
    rows = [(math.log10(p.cost), 1 - p.quality) if is_complete(p) else (math.nan, math.nan) for p in points]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)
