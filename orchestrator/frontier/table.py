"""A frontier as an HTML table: every point, cheapest first, complete or not. The page's script sorts it."""

import math
from html import escape

from orchestrator.frontier.points import Frontier, Point, is_complete, knee_point, on_front
from orchestrator.frontier.style import (
    SIZE_TITLE,
    FamilyStyle,
    axis_title,
    detail,
    family_label,
    family_styles,
    fraction,
    number,
    web_link,
)


def points_table(frontier: Frontier) -> str:
    points = [*frontier.points, *frontier.rest]
    standing = [*_standings(frontier), *("confirm" if is_complete(p) else p.status for p in frontier.rest)]
    styles = family_styles(points)
    rows = sorted(zip(points, standing, strict=True), key=lambda row: _sort_cost(row[0]))
    titles = [axis_title(frontier.cost_name), axis_title(frontier.quality_name), SIZE_TITLE]
    heads = [
        *(_head(title) for title in ("Arm", "Family")),
        *(_head(title, "number") for title in titles),
        *(_head(title) for title in ("Status", "Details", "MLflow run")),
    ]
    body = "\n".join(_row(point, status, styles[point.family]) for point, status in rows)
    return (
        f'<div class="wide"><table>\n<thead><tr>{"".join(heads)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _standings(frontier: Frontier) -> list[str]:
    """For each counted point: its place if complete, else its status."""
    front = on_front(frontier)
    knee = knee_point(frontier.points) if any(front) else None
    places = []
    for point, on in zip(frontier.points, front, strict=True):
        place = "frontier" if on else "dominated" if is_complete(point) else point.status
        places.append("frontier, knee" if point is knee else place)
    return places


def _sort_cost(point: Point) -> float:
    return math.inf if math.isnan(point.cost) else point.cost


def _head(title: str, kind: str = "text") -> str:
    return f'<th class="{kind}" scope="col"><button type="button">{escape(title)}</button></th>'


def _row(point: Point, standing: str, style: FamilyStyle) -> str:
    details = " &middot; ".join(
        f"<span>{escape(name)} {escape(detail(value))}</span>" for name, value in point.details.items()
    )
    shown = ((point.cost, number), (point.quality, fraction), (point.size, number))
    numbers = "".join(f'<td class="number" data-value="{value}">{show(value)}</td>' for value, show in shown)
    family = escape(family_label(point.family))
    return (
        f'<tr class="{standing.split(",")[0]}"><td class="arm">{escape(point.arm)}</td>'
        f'<td><span style="color:{style.colour}">{style.glyph}</span> {family}</td>'
        f'{numbers}<td class="status">{standing}</td><td class="details">{details}</td>'
        f"<td>{_run(point)}</td></tr>"
    )


def _run(point: Point) -> str:
    link = web_link(point)
    run_id = f'<code title="{escape(point.run_id)}">{escape(point.run_id)}</code>'
    linked = f'<a href="{escape(link)}" target="_blank" rel="noopener">{run_id}</a>' if link else run_id
    return f'{linked}<button type="button" class="copy">copy</button>'
