"""What trained models are worth at other settings of their routers, without training again.

A point of `Frontier.operating` has costs of inference alone: in panels of training costs it is nowhere. As
settings are picked by the images that they are judged by, the gain is that of a choice among them. Measured
costs have a spread (`Point.spreads`), and a gain that lies within it is none.
"""

import math
from dataclasses import dataclass, replace

from orchestrator.frontier.points import Frontier, Point, front_points, hypervolume, is_complete, panel

_ROUNDING = 1e-9  # relative, of two equal hypervolumes


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Hypervolume of trained models, and with their operating points, to the same reference.

    Attributes:
        models: "all models", or "MoE models alone" where there are others.
        with_points: equal to `without` if the gain is none.
        at_least: the relative gain if everything with operating points stands at the upper quartiles of its
            costs, and the trained models alone at the lower ones; None if all costs are exact.
        none_because: why a gain by the medians is none; empty otherwise.
    """

    cost_name: str
    models: str
    without: float
    with_points: float
    at_least: float | None = None
    none_because: str = ""

    def __str__(self) -> str:
        if self.none_because:
            return f"none: {self.none_because}"
        more = f"{self.with_points / self.without - 1:+.1%}" if self.without else ""
        if self.at_least is not None:
            more += f", at least {self.at_least:+.1%} by the quartiles of the times"
        arrow = f"{self.without:.4f} \N{RIGHTWARDS ARROW} {self.with_points:.4f}"
        return f"{arrow} ({more})" if more else arrow


def operating_costs(frontier: Frontier) -> tuple[str, ...]:
    """Those that operating points stand over."""
    names = (frontier.cost_name, *frontier.panels)
    return tuple(name for name in names if any(name in point.costs for point in frontier.operating))


def operating_front(frontier: Frontier) -> tuple[Point, ...]:
    """The front of MoE models and their operating points, cheapest first, of the models alone if what points
    add lies within the spread of the costs; nothing without operating points.
    """
    if not any(map(is_complete, frontier.operating)):
        return ()
    alone = _moe(frontier)
    return front_points(alone if _gain(alone, "").none_because else _together(alone))


def gains(frontier: Frontier) -> tuple[Gain, ...]:
    """The gain over each cost that operating points have."""
    alone = _moe(frontier)
    some = [("all models", frontier)]
    some += [("MoE models alone", alone)] if len(alone.points) < len(frontier.points) else []
    return tuple(_gain(panel(of, cost), models) for cost in operating_costs(frontier) for models, of in some)


def _gain(one: Frontier, models: str) -> Gain:
    """The gain over the cost of a single panel."""
    without, with_points = hypervolume(one), hypervolume(_together(one))
    gain = Gain(cost_name=one.cost_name, models=models, without=without, with_points=with_points)
    spreads = [point.spreads[one.cost_name] for point in one.operating if one.cost_name in point.spreads]
    if not spreads or _equal(without, with_points):
        return gain
    without, with_points = hypervolume(_at_quartile(one, 0)), hypervolume(_together(_at_quartile(one, 1)))
    if _equal(without, with_points):
        known = any(math.isfinite(high) for _, high in spreads)
        why = "within the spread of the times" if known else "the spread of the times is unknown"
        return replace(gain, with_points=gain.without, none_because=why)
    return replace(gain, at_least=with_points / without - 1 if without else None)


def _at_quartile(one: Frontier, which: int) -> Frontier:
    """The same points at the lower (0) or upper (1) quartile of their costs; exact costs stay."""

    def moved(points: tuple[Point, ...]) -> tuple[Point, ...]:
        exact = ((point, (point.cost, point.cost)) for point in points)
        return tuple(replace(p, cost=p.spreads.get(one.cost_name, cost)[which]) for p, cost in exact)

    return replace(one, points=moved(one.points), operating=moved(one.operating))


def _equal(without: float, with_points: float) -> bool:
    return with_points - without <= _ROUNDING * with_points


def _moe(frontier: Frontier) -> Frontier:
    return replace(frontier, points=tuple(point for point in frontier.points if point.family != "dense"))


def _together(frontier: Frontier) -> Frontier:
    return replace(frontier, points=frontier.points + frontier.operating, operating=())
