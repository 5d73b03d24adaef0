"""What the page says of each point, as plain JSON values: its place, numbers, facts and runs."""

import math
from dataclasses import replace

from orchestrator.frontier.points import Frontier, Point, everything, quartiles, standings
from orchestrator.frontier.style import (
    SIZE_TITLE,
    axis_title,
    detail,
    family_label,
    family_styles,
    fraction,
    number,
    number_with_quartiles,
    web_link,
)

Json = dict[str, object]


def columns(frontier: Frontier) -> list[Json]:
    """Of the table. A number column shows the next of a point's `numbers`."""
    costs = map(axis_title, (frontier.cost_name, *frontier.panels))
    numbers = [*costs, axis_title(frontier.quality_name), SIZE_TITLE]
    return [
        {"title": "Arm", "kind": "arm"},
        {"title": "Family", "kind": "family"},
        *({"title": title, "kind": "number"} for title in numbers),
        {"title": "Status", "kind": "status"},
        {"title": "Details", "kind": "details"},
        {"title": "MLflow run", "kind": "runs"},
    ]


def families(frontier: Frontier) -> dict[str, Json]:
    styles = family_styles(point.family for point in everything(frontier))
    return {
        family: {"label": family_label(family), "colour": style.colour, "glyph": style.glyph}
        for family, style in styles.items()
    }


def point_facts(frontier: Frontier) -> list[Json]:
    """One entry for each of `points.everything`. Unknown numbers are null."""
    points = zip(everything(frontier), standings(frontier), strict=True)
    return [_facts(point, standing, frontier) for point, standing in points]


def _facts(point: Point, standing: str, frontier: Frontier) -> Json:
    at_costs = {frontier.cost_name: point}
    at_costs |= {name: replace(point, cost=point.costs.get(name, math.nan)) for name in frontier.panels}
    numbers = [
        (at.cost, number_with_quartiles(at.cost, quartiles(at, name))) for name, at in at_costs.items()
    ]
    numbers += [(point.quality, fraction(point.quality)), (point.size, number(point.size))]
    facts = {**point.details, **point.settings}
    if len(point.qualities) > 1:
        worst, best = map(fraction, (min(point.qualities), max(point.qualities)))
        facts["seeds"] = f"{len(point.qualities)}, from {worst} to {best}"
    return {
        "arm": point.arm,
        "family": point.family,
        "standing": standing,
        "numbers": [value if math.isfinite(value) else None for value, _ in numbers],
        "texts": [text for _, text in numbers],
        "facts": [[name, detail(value)] for name, value in facts.items()],
        "runs": [[run_id, web_link(url)] for run_id, url in ((point.run_id, point.run_url), *point.runs)],
    }
