"""What trained models are worth at other settings of their routers, without training again.

A point of `Frontier.operating` has costs of inference alone: in panels of training costs it is nowhere. As
settings are picked by the images that they are judged by, the gain is that of a choice among them.
"""

from dataclasses import dataclass, replace

from orchestrator.frontier.points import Frontier, Point, front_points, hypervolume, is_complete, panel


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Hypervolume of trained models, and with their operating points, to the same reference.

    `models`: "all models", or "MoE models alone" where there are others.
    """

    cost_name: str
    models: str
    without: float
    with_points: float

    def __str__(self) -> str:
        more = f" ({self.with_points / self.without - 1:+.1%})" if self.without else ""
        return f"{self.without:.4f} \N{RIGHTWARDS ARROW} {self.with_points:.4f}{more}"


def operating_costs(frontier: Frontier) -> tuple[str, ...]:
    """Those that operating points stand over."""
    names = (frontier.cost_name, *frontier.panels)
    return tuple(name for name in names if any(name in point.costs for point in frontier.operating))


def operating_front(frontier: Frontier) -> tuple[Point, ...]:
    """Of MoE models and their operating points together, cheapest first; none without operating points."""
    return front_points(_together(_moe(frontier))) if any(map(is_complete, frontier.operating)) else ()


def gains(frontier: Frontier) -> tuple[Gain, ...]:
    """By each cost that operating points have."""
    alone = _moe(frontier)
    some = [("all models", frontier)]
    some += [("MoE models alone", alone)] if len(alone.points) < len(frontier.points) else []
    return tuple(
        Gain(
            cost_name=cost,
            models=models,
            without=hypervolume(panel(of, cost)),
            with_points=hypervolume(_together(panel(of, cost))),
        )
        for cost in operating_costs(frontier)
        for models, of in some
    )


def _moe(frontier: Frontier) -> Frontier:
    return replace(frontier, points=tuple(point for point in frontier.points if point.family != "dense"))


def _together(frontier: Frontier) -> Frontier:
    return replace(frontier, points=frontier.points + frontier.operating, operating=())
