"""Frontiers of runs that other tools left in MLflow, if they named their metrics."""

import math
from collections.abc import Sequence

from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point
from orchestrator.sweeps.report import Axes, make_frontier, status_of
from orchestrator.tracking import Found


def foreign_frontier(
    name: str, runs: Sequence[Found], axes: Axes, *, family: str, claims: Sequence[str]
) -> Frontier:
    """Of runs of any tool that named these metrics. `family`: the param or tag that tells curves apart.

    Raises:
        UsageError: if no run has both metrics.
    """
    points = []
    for run in runs:
        known = {**run.params, **run.tags, **{f"metrics.{n}": v for n, v in run.metrics.items()}}
        fields: dict[str, str | float] = {n: _number(v) for n, v in run.params.items()}
        points.append(
            Point(
                arm=run.name or run.run_id,
                family=str(known.get(family, "runs")),
                cost=run.metrics.get(axes.cost, math.nan),
                quality=run.metrics.get(axes.quality, math.nan),
                size=1.0,
                run_id=run.run_id,
                run_url=run.url,
                status=status_of(run),
                costs=dict(run.metrics),
                settings={"family": str(known.get(family, "runs")), **fields},
            )
        )
    if not any(math.isfinite(p.cost) and math.isfinite(p.quality) for p in points):
        seen = sorted({name for run in runs for name in run.metrics})
        raise UsageError(
            f"none of {len(runs)} runs has both {axes.quality!r} and {axes.cost!r}; their metrics:"
            f" {', '.join(seen) or 'none'}"
        )
    return make_frontier(name, tuple(points), axes, claims=tuple(claims))


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
