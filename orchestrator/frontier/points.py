"""The arms of a sweep as points of cost and quality: their front, knee and hypervolume.

All points are judged in the space (log10 cost, 1 - quality), both minimised: another scale of an axis, or
another reference, changes hypervolumes and their order.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import UsageError
from orchestrator.frontier.pareto import hypervolume_2d, knee, pareto_front
from orchestrator.output import IN_BITS, UNKNOWN

if TYPE_CHECKING:
    from moe.model import Model

OPERATING_POINT = "operating point"  # the setting that names it
IN_CONFIG = {"k", "capacity", "priority", "images_per_group"}  # settings of operating points that files hold
TOGETHER = "images_per_group"  # the setting of `Point.together`
SPACE = "log10 cost, 1 - quality"

Status = Literal["finished", "stopped", "interrupted", "diverged", "failed", "running"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One arm of a sweep, or one operating point of a trained model. Unknown numbers are NaN.

    Attributes:
        family: ``dense``, ``soft``, ``token_choice``, ``expert_choice``, ..
        cost: minimised; in the unit of `Frontier.cost_name`.
        quality: maximised; a fraction; the mean of `qualities` where there are several seeds.
        size: expert slots per token: k * C, c, or slots / tokens; dense 1.
        status: ``stopped`` is a trial that ended early and has no final quality.
        details: further facts for the reader.
        costs: further costs by metric.
        spreads: quartiles of measured costs, by metric.
        qualities: of each seed, if there are several.
        images: on which an accuracy was judged; 0: unknown, or the quality is no accuracy.
        runs: (id, address) in MLflow of the seeds beyond `run_id`.
        settings: what claims compare.
        statistics: of its router when training ended, by metric: means over layers and seeds.
        quality_name: its metric, if it is shown as another (`as_shown`).
        load_run: returns the trained model of one of `run_ids`; None for a point without weights of its own.
    """

    arm: str
    family: str
    cost: float
    quality: float
    size: float
    run_id: str = field(repr=False)
    run_url: str | None = field(default=None, repr=False)
    status: Status
    details: Mapping[str, str | float] = field(default_factory=dict, repr=False)
    costs: Mapping[str, float] = field(default_factory=dict, repr=False)
    spreads: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    qualities: tuple[float, ...] = field(default=(), repr=False)
    images: int = field(default=0, repr=False)
    runs: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    settings: Mapping[str, str | float] = field(default_factory=dict, repr=False)
    statistics: Mapping[str, float] = field(default_factory=dict, repr=False)
    quality_name: str = field(default="", repr=False)
    load_run: Callable[[str], "Model"] | None = field(default=None, repr=False, compare=False)

    def load(self) -> "Model":
        """Returns the trained model in evaluation mode; of several seeds, the one of `typical_run`.

        Raises:
            UsageError: if the arm is not finished, or its checkpoint is gone or damaged.
        """
        if self.load_run is None:
            raise UsageError(
                f"{self.arm!r} is a point without weights of its own: load the arm it belongs to"
            )
        if self.status != "finished":
            raise UsageError(f"arm {self.arm!r} is {self.status}, not finished: it has no trained model yet")
        return self.load_run(self.typical_run)

    @property
    def together(self) -> int:
        """The number of images that are routed together: an answer depends on all of them."""
        return int(self.settings.get(TOGETHER, 1))

    @property
    def in_file(self) -> bool:
        """Whether a file can be written of it: an expert subset is no part of a config."""
        parts = str(self.settings.get(OPERATING_POINT, "")).split()
        return {part.partition("=")[0] for part in parts} <= IN_CONFIG

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The runs of all seeds."""
        return (self.run_id, *(run_id for run_id, _ in self.runs))

    @property
    def typical_run(self) -> str:
        """The run of the seed whose quality is nearest to the arm's mean."""
        qualities = self.qualities or (self.quality,)
        nearest = min(zip(self.run_ids, qualities, strict=True), key=lambda each: abs(each[1] - self.quality))
        return nearest[0]

    @property
    def seed_error(self) -> float:
        """Standard error of the quality's mean over seeds, on the same images; NaN for a single seed."""
        count = len(self.qualities)
        return float(np.std(self.qualities, ddof=1)) / math.sqrt(count) if count > 1 else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the quality, by seeds and images, as far as there are several; NaN: unknown."""
        parts = [self.seed_error, image_error(self.quality, self.images) or math.nan]
        known = [part for part in parts if math.isfinite(part)]
        return math.hypot(*known) if known else math.nan

    @property
    def quality_text(self) -> str:
        """The quality, with its standard error if that is known; a dash where it is unknown."""
        if not math.isfinite(self.quality):
            return UNKNOWN
        unit = self.quality * math.log(2) if self.quality_name in IN_BITS else 1
        known = math.isfinite(self.standard_error)
        error = f" \N{PLUS-MINUS SIGN} {self.standard_error / unit:.4f}" if known else ""
        return f"{as_shown(self.quality_name, self.quality)[1]:.4f}{error}"


def as_shown(name: str, quality: float) -> tuple[str, float]:
    """Returns the metric and the value by which readers know a quality: of a likelihood its bits."""
    if name not in IN_BITS:
        return name, quality
    return IN_BITS[name], -math.log2(max(quality, sys.float_info.min))


def image_error(quality: float, images: int) -> float:
    """Returns the standard error of an accuracy over so many images, with two right and two wrong ones added
    (Agresti and Coull, 1998), so that none is 0; 0 without images.
    """
    if not images or not math.isfinite(quality):
        return 0.0
    near = (quality * images + 2) / (images + 4)
    return math.sqrt(near * (1 - near) / (images + 4))


def is_complete(point: Point) -> bool:
    """Whether a point can be judged and drawn: finished, with a finite quality and a finite cost above 0."""
    return point.status == "finished" and 0 < point.cost < math.inf and math.isfinite(point.quality)


def quartiles(point: Point, cost_name: str) -> tuple[float, float]:
    """The quartiles of `point.cost`, whose metric is `cost_name`; the cost itself if it has none."""
    low, high = point.spreads.get(cost_name, (point.cost, point.cost))
    return (low, high) if low <= point.cost <= high else (point.cost, point.cost)


def costs_of(points: Sequence[Point]) -> NDArray[np.float64]:
    """(points, 2): log10 cost and 1 - quality; NaN where a point is incomplete."""
    rows = [(math.log10(p.cost), 1 - p.quality) if is_complete(p) else (math.nan, math.nan) for p in points]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def on_front(points: Sequence[Point]) -> tuple[bool, ...]:
    """For each point: it is complete, and no other complete point dominates it."""
    return tuple(pareto_front(costs_of(points)).tolist())


def front_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points on the front, cheapest first."""
    front = (point for point, on in zip(points, on_front(points), strict=True) if on)
    return tuple(sorted(front, key=lambda point: point.cost))


def knee_point(points: Sequence[Point]) -> Point:
    """The front point with the best trade: see `pareto.knee`. Raises: ValueError if no point is complete."""
    return points[knee(costs_of(points))]


def knee_points(points: Sequence[Point], count: int) -> list[Point]:
    """The knee of the points, then the knee of the others, and so on."""
    left = [point for point in points if is_complete(point)]
    knees: list[Point] = []
    while left and len(knees) < count:
        knees.append(knee_point(left))
        left.remove(knees[-1])
    return knees


def hypervolume(points: Sequence[Point], reference: tuple[float, float]) -> float:
    """Area between the front and the reference (cost, quality), in decades of cost times fractions."""
    return hypervolume_2d(costs_of(points), _bound(reference))


def hypervolume_by_budget(
    points: Sequence[Point], reference: tuple[float, float], spending: Sequence[tuple[str, float]]
) -> NDArray[np.float64]:
    """(entries, 2): device seconds spent so far, and the hypervolume of the points known by then.

    `spending` has (run id, device seconds) for each piece of work, in the order in which they ended, so the
    rungs of a trial that is stopped later count when they were trained. A point is known from the last entry
    of its last run, and never if a run of it has no entry.
    """
    last_entry = {run_id: number for number, (run_id, _) in enumerate(spending)}
    known_from: dict[int, list[Point]] = {}
    for point in points:
        if all(run_id in last_entry for run_id in point.run_ids):
            known_from.setdefault(max(last_entry[run_id] for run_id in point.run_ids), []).append(point)
    front, areas = np.zeros((0, 2)), []
    for number in range(len(spending)):
        front = np.concatenate([front, costs_of(known_from.get(number, []))])
        front = front[pareto_front(front)]
        areas.append(hypervolume_2d(front, _bound(reference)))
    return np.stack([np.cumsum([seconds for _, seconds in spending]), np.array(areas)], axis=1)


def _bound(reference: tuple[float, float]) -> NDArray[np.float64]:
    cost, quality = reference
    return np.array([math.log10(cost), 1 - quality])
