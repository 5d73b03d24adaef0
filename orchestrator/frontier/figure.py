"""A frontier as a plotly figure: quality against log cost. Text and grid take their colours from the page."""

import math
from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from orchestrator.frontier.points import (
    Frontier,
    Point,
    dominated_points,
    front_points,
    is_complete,
    knee_point,
)
from orchestrator.frontier.style import (
    DOMINATED_OPACITY,
    NOTHING_YET,
    SIZE_TITLE,
    FamilyStyle,
    axis_title,
    detail,
    family_label,
    family_styles,
    fraction,
    marker_px,
    number,
    web_link,
)

_NOTHING_NOTE = {
    "text": NOTHING_YET,
    "showarrow": False,
    "xref": "paper",
    "yref": "paper",
    "x": 0.5,
    "y": 0.5,
}


def frontier_figure(frontier: Frontier) -> go.Figure:
    """Only complete points are drawn. The page's script reads `customdata` (links) and `meta` (the line)."""
    front = front_points(frontier)
    dominated = dominated_points(frontier)
    rest = [point for point in frontier.rest if is_complete(point)]
    styles = family_styles([*front, *dominated, *rest])

    figure = go.Figure(layout=_layout(frontier))
    for family, style in styles.items():
        figure.add_scatter(
            **_legend_entry(family_label(family), style.symbol, style.colour), legendgroup=family
        )
    figure.add_scatter(**_line(front))
    for points, opacity in ((dominated, DOMINATED_OPACITY), (front, 1)):
        for family, style in styles.items():
            mine = [point for point in points if point.family == family]
            figure.add_scatter(**_cloud(frontier, mine), marker=_marker(style, mine) | {"opacity": opacity})
    for family, style in styles.items():
        mine = [point for point in rest if point.family == family]
        figure.add_scatter(**_cloud(frontier, mine), marker=_star(style.colour))
    if rest:
        figure.add_scatter(**_legend_entry("Confirmation, not counted", "star-open", "#7F7F7F"))
    figure.add_annotation(**(_knee_note(knee_point(front)) if front else _NOTHING_NOTE))
    return figure


def _line(front: Sequence[Point]) -> dict[str, object]:
    return {
        "x": [point.cost for point in front],
        "y": [point.quality for point in front],
        "mode": "lines",
        "name": "Frontier",
        "meta": "front",
        "line": {"width": 1.6},
        "hoverinfo": "skip",
    }


def _cloud(frontier: Frontier, points: Sequence[Point]) -> dict[str, object]:
    """Markers of one family, so that its legend entry switches them."""
    return {
        "x": [point.cost for point in points],
        "y": [point.quality for point in points],
        "mode": "markers",
        "hovertext": [_hover(frontier, point) for point in points],
        "hoverinfo": "text",
        "customdata": [web_link(point) for point in points],
        "legendgroup": points[0].family if points else "",
        "showlegend": False,
    }


def _marker(style: FamilyStyle, points: Sequence[Point]) -> dict[str, object]:
    sizes = [marker_px(point.size) for point in points]
    return {"symbol": style.symbol, "color": style.colour, "size": sizes, "line": {"width": 0}}


def _star(colour: str) -> dict[str, object]:
    return {"symbol": "star-open", "color": colour, "size": 15, "line": {"width": 1.8}}


def _legend_entry(label: str, symbol: str, colour: str) -> dict[str, object]:
    """A trace without points: the legend shows every family at full strength and one size."""
    marker = {"symbol": symbol, "color": colour, "size": 11}
    return {"x": [None], "y": [None], "mode": "markers", "name": _plain(label), "marker": marker}


def _hover(frontier: Frontier, point: Point) -> str:
    facts = {
        axis_title(frontier.cost_name): number(point.cost),
        axis_title(frontier.quality_name): fraction(point.quality),
        SIZE_TITLE: number(point.size),
    } | {name: detail(value) for name, value in point.details.items()}
    lines = [f"{_plain(name)}: {_plain(value)}" for name, value in facts.items()]
    head = f"<b>{_plain(point.arm)}</b> &nbsp; {_plain(family_label(point.family))}"
    return "<br>".join([head, *lines, f"run {_plain(point.run_id)}"])


def _knee_note(point: Point) -> dict[str, object]:
    """Above and to the left of the front no point can lie. Log axes are annotated in log10."""
    return {
        "x": math.log10(point.cost),
        "y": point.quality,
        "text": f"<b>Knee</b> &nbsp;{_plain(point.arm)}",
        "ax": -30,
        "ay": -36,
        "xanchor": "right",
        "arrowwidth": 1.2,
        "arrowhead": 0,
        "standoff": marker_px(point.size) / 2 + 3,
    }


def _layout(frontier: Frontier) -> dict[str, object]:
    font = {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13}
    axis = {"zeroline": False, "showline": True, "ticks": "outside", "ticklen": 5, "automargin": True}
    cost = {
        "type": "log",
        "nticks": 6,
        "exponentformat": "power",
        "title": {"text": _plain(axis_title(frontier.cost_name))},
    }
    quality = {"title": {"text": _plain(axis_title(frontier.quality_name)), "standoff": 14}}
    stops = [{"dtickrange": [0.9 * 0.1**n, 9 * 0.1**n], "value": f".{n}f"} for n in (1, 2, 3, 4)]
    return {
        "template": "none",
        "height": 560,
        "margin": {"l": 70, "r": 24, "t": 56, "b": 60},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": font,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": font},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": axis | cost,
        "yaxis": axis | quality | {"tickformatstops": stops},
    }


def _plain(text: str) -> str:
    """Text for plotly, which reads a few HTML tags and these three entities in any label."""
    return escape(text, quote=False)
