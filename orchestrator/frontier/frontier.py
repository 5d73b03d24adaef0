"""The result of a sweep: its points, their front and knee, as numbers, as a table and as figures."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from orchestrator.costs import ENERGY, FORWARD, MS_P95, TIMES, USD
from orchestrator.errors import UsageError
from orchestrator.frontier.answer import Answer, answer, upper, verdict
from orchestrator.frontier.drawing import frontier_picture
from orchestrator.frontier.figure import SIZE_TITLE, Json, frontier_plot
from orchestrator.frontier.points import (
    TOGETHER,
    Point,
    front_points,
    hypervolume,
    image_error,
    is_complete,
    knee_point,
    on_front,
)
from orchestrator.units import axis_title

UNDECIDED = "one seed, not decided"
BOUNDS = (MS_P95, "infer/batch_ms_per_image", "infer/memory_mib", "infer/file_mb", ENERGY, USD, FORWARD)
_ROUNDING = 1e-9  # relative difference of two equal hypervolumes


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """A sweep's points under one cost and one quality metric: what `run_sweep` returns.

    Attributes:
        points: the arms, each the mean of its seeds.
        reference: the quality metric, the cost metric and further costs -> the worst values that hypervolumes
            count. It belongs to the sweep, so hypervolumes of the same sweep compare, whichever trials have
            ended, until an arm is added that costs more than all before.
        data: what quality is measured on, such as "367 images of digits (val split)".
        trials: (arm, state) of each trial of a sweep, begun or not.
        retrained: arms that were trained again for longer: shown, never counted.
        operating: trained models at other settings of their routers: see `gains`.
        papers: points of papers, with the same quality on the same data: drawn, never counted.
        baselines: qualities of other methods, by name: drawn as lines.
        claims: statements to check: see `claims.py`.
        spending: (run id, device seconds): see `hypervolume_by_budget`.
        note: a sentence for the reader, such as how shared training is charged.
    """

    name: str
    cost_name: str
    quality_name: str
    points: tuple[Point, ...]
    reference: Mapping[str, float]
    data: str = ""
    trials: tuple[tuple[str, str], ...] = ()
    retrained: tuple[Point, ...] = ()
    operating: tuple[Point, ...] = ()
    papers: tuple[Point, ...] = ()
    baselines: Mapping[str, float] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    spending: tuple[tuple[str, float], ...] = ()
    note: str = ""
    size_title: str = SIZE_TITLE  # what `Point.size` is

    def __post_init__(self) -> None:
        cost, quality = (self.reference.get(name, math.nan) for name in (self.cost_name, self.quality_name))
        if not (0 < cost < math.inf and math.isfinite(quality)):
            raise ValueError(
                f"reference needs a finite cost above 0 for {self.cost_name!r} and a finite"
                f" {self.quality_name!r}, got {dict(self.reference)}"
            )

    def __repr__(self) -> str:
        front = self.front
        knee = f", knee {self.knee.arm!r}" if front else ""
        return (
            f"Frontier({self.name!r}: {_count(len(self.points), 'arm')}, {len(front)} on the frontier{knee})"
        )

    def __getitem__(self, arm: str) -> Point:
        """Returns the point of an arm. Raises KeyError, which names the arms, if there is no such arm."""
        points = {point.arm: point for point in self.points}
        if arm not in points:
            raise KeyError(f"no arm {arm!r}; the arms are {', '.join(points)}")
        return points[arm]

    @property
    def bound(self) -> tuple[float, float]:
        """The reference point: cost and quality."""
        return self.reference[self.cost_name], self.reference[self.quality_name]

    @property
    def panels(self) -> tuple[str, ...]:
        """Further costs of the reference that all finished points have."""
        finished = [point for point in self.points if point.status == "finished"]
        further = [name for name in self.reference if name not in (self.cost_name, self.quality_name)]
        return tuple(name for name in further if finished and all(name in point.costs for point in finished))

    @property
    def subtitle(self) -> str:
        """Arms, seeds and trials, what is measured on which images, and its error; empty without trials."""
        if not self.trials:
            return ""
        arms = Counter(arm for arm, _ in self.trials)
        seeds = max(arms.values())
        each = f" {TIMES} {_count(seeds, 'seed')} =" if {*arms.values()} == {seeds} else ","
        measured = " on ".join(filter(None, [axis_title(self.quality_name), self.data]))
        judged = any(point.images for point in self.points)
        known = " and ".join([*(["seeds"] if seeds > 1 else []), *(["images"] if judged else [])])
        mean = f"mean of {seeds} seeds" if seeds > 1 else "one seed, whose error is not known"
        mean += f"; ± and bars: standard error by {known}" if known else ""
        return f"{_count(len(arms), 'arm')}{each} {_count(len(self.trials), 'trial')}. {measured}: {mean}."

    @property
    def verdict(self) -> list[str]:
        """What the points say, in sentences: the best, the knee, and what is not decided."""
        return verdict(self.points, quality_name=self.quality_name, cost_name=self.cost_name)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the reader: `note`, and what holds for arms that route several images together."""
        return tuple(filter(None, [self.note, _of_groups(self)]))

    @property
    def all_points(self) -> tuple[Point, ...]:
        """Everything that is listed, in the order of `statuses`."""
        return self.points + self.retrained + self.operating

    @property
    def front(self) -> tuple[Point, ...]:
        """The points on the front, cheapest first."""
        return front_points(self.points)

    @property
    def knee(self) -> Point:
        """The front point with the best trade. Raises: ValueError if no point is complete."""
        return knee_point(self.points)

    @property
    def doubt(self) -> str:
        """Why the knee is not decided; empty if its arm has several seeds, or comes from no sweep."""
        single = self.trials and self.front and len(self.knee.qualities) < 2
        return UNDECIDED if single else ""

    @property
    def hypervolume(self) -> float:
        """Area between the front and the reference: decades of cost times fractions of quality."""
        return hypervolume(self.points, self.bound)

    def none_beats(self, quality: float) -> bool:
        """Returns whether no point of the front, which is not empty, is above the quality of a baseline."""
        return bool(self.front) and all(point.quality <= quality for point in self.front)

    def baseline_error(self, quality: float) -> float:
        """Returns the standard error of a baseline's quality by the images; 0 if they are not counted."""
        return image_error(quality, max((point.images for point in self.points), default=0))

    def baseline_text(self, quality: float) -> str:
        """Returns the quality of a baseline, with its standard error if that is known."""
        error = self.baseline_error(quality)
        return f"{quality:.4f} \N{PLUS-MINUS SIGN} {error:.4f}" if error else f"{quality:.4f}"

    def statuses(self) -> tuple[str, ...]:
        """The place of each of `all_points` if it is complete, else its status.

        Places are "frontier", "frontier, knee", "dominated", "retrained" and "operating".
        """
        front = on_front(self.points)
        knee = self.knee if any(front) else None
        places = [
            ("frontier, knee" if point is knee else "frontier" if on else "dominated")
            if is_complete(point)
            else point.status
            for point, on in zip(self.points, front, strict=True)
        ]
        places += ["retrained" if is_complete(point) else point.status for point in self.retrained]
        return (*places, *("operating" for _ in self.operating))

    def at_cost(self, cost_name: str) -> "Frontier":
        """The same points under another of their costs."""

        def moved(points: Sequence[Point]) -> tuple[Point, ...]:
            return tuple(replace(point, cost=point.costs.get(cost_name, math.nan)) for point in points)

        groups = {name: moved(getattr(self, name)) for name in ("points", "retrained", "operating", "papers")}
        known = [point.cost for point in groups["points"] if 0 < point.cost < math.inf]
        reference = {cost_name: 1.1 * max(known, default=1.0), **self.reference}
        return replace(self, cost_name=cost_name, reference=reference, **groups)

    def part(
        self, *, cost: str | None = None, families: Collection[str] = (), baselines: bool = True
    ) -> "Frontier":
        """The same frontier under another of its costs, of some families alone, or without its baselines.

        Raises:
            UsageError: for a cost that no point has, or a family that there is not; it names those known.
        """
        points = (*self.all_points, *self.papers)
        costs = {name for point in self.points for name in (self.cost_name, *point.costs)}
        present = {point.family for point in points}
        for what, asked, known in (("cost", [cost or self.cost_name], costs), ("family", families, present)):
            for name in asked:
                if name not in known:
                    raise UsageError(f"{self.name} has no {what} {name!r}; known: {', '.join(sorted(known))}")
        found = self if cost in (None, self.cost_name) else self.at_cost(cost)
        groups = {
            group: tuple(point for point in getattr(found, group) if not families or point.family in families)
            for group in ("points", "retrained", "operating", "papers")
        }
        arms = {point.arm for point in groups["points"]}
        trials = tuple(trial for trial in self.trials if not families or trial[0] in arms)
        return replace(found, **groups, trials=trials, baselines=self.baselines if baselines else {})

    def within(self, cost_name: str, at_most: float) -> "Frontier":
        """The same frontier of the points alone that keep a bound of one of their costs, a measured one by
        its upper end; an unknown cost keeps none.
        """

        def keep(points: Sequence[Point]) -> tuple[Point, ...]:
            known = (replace(p, costs={**p.costs, self.cost_name: p.cost}) for p in points)
            return tuple(p for p, q in zip(points, known, strict=True) if upper(q, cost_name) <= at_most)

        return replace(self, points=keep(self.points), operating=keep(self.operating))

    def answer(
        self,
        *,
        max_ms: float | None = None,
        max_batch_ms: float | None = None,
        max_mib: float | None = None,
        max_mb: float | None = None,
        max_mj: float | None = None,
        max_usd: float | None = None,
        max_gflops: float | None = None,
    ) -> Answer:
        """Returns the best model within bounds, as `jobs/answer.py` prints it: on the 95th percentile of the
        time of one image, its time in a batch, peak memory, size of the file, millijoules of an image, USD of
        a million images, forward GFLOPs. Operating points of which these costs are known are among them, if a
        file can be written.

        Raises:
            UsageError: without bounds, or if a cost that has one was not measured.
        """
        asked = (max_ms, max_batch_ms, max_mib, max_mb, max_mj, max_usd, max_gflops)
        given = dict(zip(BOUNDS, asked, strict=True))
        bounds = {name: most for name, most in given.items() if most is not None}
        for name in bounds:
            if not any(name in point.costs for point in self.points):
                raise UsageError(
                    f"{name} was not measured: jobs/answer.py {self.name} does that, in Python measure_sweep"
                )
        first = next(iter(bounds), "")
        points = [*self.points]
        for point in self.operating:
            if point.in_file and all(name in point.costs for name in bounds):
                points.append(replace(point, cost=point.costs[first]))
        return answer(points, bounds, quality_name=self.quality_name)

    def to_dataframe(self) -> pd.DataFrame:
        """A row for every point: its place, cost, quality with standard error, further costs, statistics of
        its router, and runs.
        """
        costs = dict.fromkeys((*self.panels, *(name for point in self.points for name in point.costs)))
        costs.pop(self.cost_name, None)
        statistics = dict.fromkeys(name for point in self.points for name in point.statistics)
        rows = [
            {
                "arm": point.arm,
                "family": point.family,
                "status": status,
                self.cost_name: point.cost,
                self.quality_name: point.quality,
                "standard_error": point.standard_error,
                TOGETHER: point.together,
                "seeds": len(point.run_ids),
                **{name: point.costs.get(name, math.nan) for name in costs},
                **{name: point.statistics.get(name, math.nan) for name in statistics},
                "run": ", ".join(point.run_ids),
            }
            for point, status in zip(self.all_points, self.statuses(), strict=True)
        ]
        return pd.DataFrame(rows)

    def plot(self) -> Json:
        """The plot of quality against the cost: see `figure.frontier_plot`."""
        entries = list(zip(self.all_points, self.statuses(), strict=True))
        entries += [(point, "published") for point in self.papers]
        return frontier_plot(
            self.name,
            self.cost_name,
            self.quality_name,
            entries,
            operating_front=operating_front(self),
            baselines=self.baselines,
            subtitle=self.subtitle,
            size_title=self.size_title,
        )

    def figure(self) -> go.Figure:
        """The plot as a plotly figure, which a notebook shows and `write_html` saves as a page.

        Pictures are saved by `save_picture`: plotly's `write_image` would need the package Kaleido.
        """
        return go.Figure(self.plot())

    def save_picture(self, *paths: Path | str) -> None:
        """Writes the plot to each path, as PNG or SVG by the suffix, drawn once by matplotlib."""
        picture = frontier_picture(self.plot())
        for path in paths:
            picture.savefig(path)


def _of_groups(frontier: Frontier) -> str:
    """Returns a note on arms that route several images together; empty if there are none."""
    if all(point.together == 1 for point in frontier.points + frontier.retrained):
        return ""
    end = f": {TOGETHER}=1"
    alone = [
        f"{point.arm.removesuffix(end)} {point.quality_text}"
        for point in frontier.operating
        if point.arm.endswith(end)
    ]
    if alone:
        measured = f"With each image routed by itself it is: {', '.join(alone)}."
    else:
        measured = f"With each image routed by itself it is not measured: evaluate.py, routing.{TOGETHER}=1."
    return (
        "Arms that route several images together answer an image by its neighbours too: their quality is that"
        f" of these images in their order. {measured}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The hypervolume of trained models without and with their operating points."""

    cost_name: str
    models: str  # "all models", or "MoE models alone" where there are others
    without: float
    with_points: float  # equal to `without` if no gain counts
    at_least: float | None = None  # relative gain by the quartiles of the costs; None if costs are exact
    none_because: str = ""  # why a gain by the medians does not count

    def __str__(self) -> str:
        if self.none_because:
            return f"none: {self.none_because}"
        more = f"{self.with_points / self.without - 1:+.1%}" if self.without else ""
        if self.at_least is not None:
            more += f", at least {self.at_least:+.1%} by the quartiles of the times"
        arrow = f"{self.without:.4f} \N{RIGHTWARDS ARROW} {self.with_points:.4f}"
        return f"{arrow} ({more})" if more else arrow


def operating_costs(frontier: Frontier) -> tuple[str, ...]:
    """The costs that operating points have: those of inference, because they were not trained anew."""
    names = (frontier.cost_name, *frontier.panels)
    return tuple(name for name in names if any(name in point.costs for point in frontier.operating))


def operating_front(frontier: Frontier) -> tuple[Point, ...]:
    """The front of MoE models and their operating points, cheapest first; empty without operating points.

    It is the front of the models alone if the gain lies within the spread of measured costs.
    """
    if not any(map(is_complete, frontier.operating)):
        return ()
    alone = _moe(frontier)
    counts = not _gain(alone, "").none_because
    return front_points(alone.points + (alone.operating if counts else ()))


def gains(frontier: Frontier) -> tuple[Gain, ...]:
    """The gain over each cost that operating points have.

    Settings are chosen by the images on which they are judged, so a gain includes that choice. Measured costs
    have a spread (`Point.spreads`): a gain counts only if some of it is left with all trained models at the
    lower quartiles of their costs and the operating points at the upper ones.
    """
    alone = _moe(frontier)
    groups = [("all models", frontier)]
    if len(alone.points) < len(frontier.points):
        groups.append(("MoE models alone", alone))
    costs = operating_costs(frontier)
    return tuple(_gain(group.at_cost(cost), models) for cost in costs for models, group in groups)


def _gain(frontier: Frontier, models: str) -> Gain:
    """The gain over the cost of a single panel."""
    cost_name, trained, together = frontier.cost_name, frontier.points, frontier.points + frontier.operating
    volume = partial(hypervolume, reference=frontier.bound)
    without, with_points = volume(trained), volume(together)
    gain = Gain(cost_name=cost_name, models=models, without=without, with_points=with_points)
    spreads = [point.spreads[cost_name] for point in frontier.operating if cost_name in point.spreads]
    if not spreads or _equal(without, with_points):
        return gain
    without = volume(_at_quartile(trained, cost_name, 0))
    with_points = volume(_at_quartile(together, cost_name, 1))
    if _equal(without, with_points):
        known = any(math.isfinite(high) for _, high in spreads)
        why = "within the spread of the times" if known else "the spread of the times is unknown"
        return replace(gain, with_points=gain.without, none_because=why)
    return replace(gain, at_least=with_points / without - 1 if without else None)


def _equal(without: float, with_points: float) -> bool:
    return with_points - without <= _ROUNDING * with_points


def _at_quartile(points: Sequence[Point], cost_name: str, which: int) -> list[Point]:
    """The points at the lower (0) or upper (1) quartile of their costs; exact costs stay."""
    return [replace(p, cost=p.spreads.get(cost_name, (p.cost, p.cost))[which]) for p in points]


def _moe(frontier: Frontier) -> Frontier:
    return replace(frontier, points=tuple(point for point in frontier.points if point.family != "dense"))
