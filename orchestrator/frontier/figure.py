"""One panel of the page: quality against one cost, as plotly's traces and layout in plain values.

`plots.js` draws them. It takes out the points that a filter hides (`customdata` numbers them), adds their
hover text and the colours of the theme; `meta.role` tells it what a trace is.
"""

import math
from collections.abc import Sequence
from html import escape

from orchestrator.frontier.operating import operating_front
from orchestrator.frontier.points import (
    Frontier,
    Point,
    everything,
    family_fronts,
    front_points,
    is_complete,
    knee_point,
    quartiles,
    standings,
)
from orchestrator.frontier.published import Published, published
from orchestrator.frontier.seeds import seed_band
from orchestrator.frontier.style import (
    DOMINATED_OPACITY,
    NOTHING_YET,
    FamilyStyle,
    axis_title,
    family_label,
    family_styles,
    fraction,
    marker_px,
    number,
)

Json = dict[str, object]
FONT = {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13}
AXIS = {"zeroline": False, "showline": True, "ticks": "outside", "ticklen": 5, "automargin": True}


def frontier_panel(frontier: Frontier) -> Json:
    """`customdata` numbers `points.everything`. Traces go from the back to the front."""
    papers = published(frontier.quality_name, frontier.cost_name) if frontier.published else ()
    points, places = everything(frontier), standings(frontier)
    styles = family_styles([*(point.family for point in points), *(paper.family for paper in papers)])
    fronts = family_fronts(frontier)

    traces = [_band(frontier.points), _line(front_points(frontier), "front", "", width=1.8)]
    traces.append(_line(operating_front(frontier), "operating_front", "", width=1.8, dash="dot"))
    for family, style in styles.items():
        if len(fronts) > 1 and family in fronts:
            role, dash = ("dense", "dash") if family == "dense" else ("family", "dot")
            traces.append(_line(fronts[family], role, family, width=1.4, color=style.colour, dash=dash))
    for family, style in styles.items():
        mine = [paper for paper in papers if paper.family == family]
        traces.append(_hollow(mine, family, style))
    for role in ("diverged", "operating", "dominated", "frontier", "confirm"):
        for family, style in styles.items():
            mine = [
                i
                for i, (point, place) in enumerate(zip(points, places, strict=True))
                if place.startswith(role) and point.family == family and 0 < point.cost < math.inf
            ]
            some = [points[i] for i in mine]
            traces.append(_cloud(role, family, style, mine, some) | _cost_bars(some, frontier.cost_name))
    note = _knee_note(frontier) if fronts else _NOTHING_NOTE
    return {
        "traces": [trace for trace in traces if trace["x"]],
        "layout": _layout(frontier) | {"annotations": [note]},
    }


def _line(points: Sequence[Point], role: str, family: str, **line: object) -> Json:
    return {
        "x": [point.cost for point in points],
        "y": [point.quality for point in points],
        "mode": "lines",
        "meta": {"role": role, "family": family},
        "line": line,
        "hoverinfo": "skip",
    }


def _band(points: Sequence[Point]) -> Json:
    band = seed_band(points)
    return {
        "x": band[:, 0].tolist(),
        "y": band[:, 1].tolist(),
        "mode": "none",
        "fill": "toself",
        "fillcolor": "rgba(127,127,127,0.22)",
        "meta": {"role": "band", "family": ""},
        "hoverinfo": "skip",
    }


def _cloud(
    role: str, family: str, style: FamilyStyle, numbers: Sequence[int], points: Sequence[Point]
) -> Json:
    """Markers of one family. What diverged has no quality: it stands on the cost axis, by its own scale."""
    margin = role == "diverged"
    cloud: Json = {
        "x": [point.cost for point in points],
        "y": [0 if margin else point.quality for point in points],
        "yaxis": "y2" if margin else "y",
        "cliponaxis": not margin,
        "mode": "markers",
        "customdata": list(numbers),
        "hoverinfo": "text",
        "meta": {"role": role, "family": family},
        "marker": _marker(role, style, points),
    }
    several = not margin and any(len(point.qualities) > 1 for point in points)
    return cloud | ({"error_y": _spread(points)} if several else {})


def _spread(points: Sequence[Point]) -> Json:
    """Thin bars from the worst seed to the best."""
    return {
        "array": [max(point.qualities, default=point.quality) - point.quality for point in points],
        "arrayminus": [point.quality - min(point.qualities, default=point.quality) for point in points],
    } | _THIN


def _cost_bars(points: Sequence[Point], cost_name: str) -> Json:
    """Thin bars from quartile to quartile of a measured cost; nothing for an exact one."""
    ends = [quartiles(point, cost_name) for point in points]
    if all(low == high for low, high in ends):
        return {}
    bars = {
        "array": [high - point.cost for point, (_, high) in zip(points, ends, strict=True)],
        "arrayminus": [point.cost - low for point, (low, _) in zip(points, ends, strict=True)],
    }
    return {"error_x": bars | _THIN}


_THIN: Json = {"type": "data", "symmetric": False, "thickness": 1, "width": 0}


def _marker(role: str, style: FamilyStyle, points: Sequence[Point]) -> Json:
    if role == "diverged":
        return {"symbol": "x-thin-open", "color": style.colour, "size": 8, "line": {"width": 1.5}}
    if role == "operating":
        return {"symbol": "cross-thin-open", "color": style.colour, "size": 7, "line": {"width": 1.2}}
    if role == "confirm":
        return {"symbol": "star-open", "color": style.colour, "size": 15, "line": {"width": 1.8}}
    return {
        "symbol": style.symbol,
        "color": style.colour,
        "size": [marker_px(point.size) for point in points],
        "line": {"width": 0},
        "opacity": DOMINATED_OPACITY if role == "dominated" else 1,
    }


def _hollow(papers: Sequence[Published], family: str, style: FamilyStyle) -> Json:
    mine = [paper for paper in papers if paper.family == family]
    return {
        "x": [paper.cost for paper in mine],
        "y": [paper.quality for paper in mine],
        "mode": "markers",
        "hovertext": [
            f"<b>{plain(paper.model)}</b> &nbsp; {family_label(family)}<br>{number(paper.cost)}, "
            f"{fraction(paper.quality)}<br>{plain(paper.source)}"
            for paper in mine
        ],
        "hoverinfo": "text",
        "meta": {"role": "published", "family": family},
        "marker": {
            "symbol": f"{style.symbol}-open",
            "color": style.colour,
            "size": 9,
            "opacity": 0.8,
            "line": {"width": 1.2},
        },
    }


_NOTHING_NOTE = {
    "text": NOTHING_YET,
    "showarrow": False,
    "xref": "paper",
    "yref": "paper",
    "x": 0.5,
    "y": 0.5,
}


def _knee_note(frontier: Frontier) -> Json:
    """Above and to the left of the front no point can lie. Near the axis, where there is no room, the note is
    to the right, higher than the front reaches beneath it. Log axes are annotated in log10.
    """
    point, front = knee_point(frontier.points), front_points(frontier)
    complete = [p for p in frontier.points + frontier.rest if is_complete(p)]
    costs = [math.log10(p.cost) for p in complete]
    at, span = math.log10(point.cost), max(costs) - min(costs)
    note: Json = {"ax": -30, "ay": -36, "xanchor": "right"}
    if at - min(costs) < 0.3 * span:
        beneath = [p.quality for p in front if 0 <= math.log10(p.cost) - at < 0.4 * span]
        height = max(p.quality for p in complete) - min(p.quality for p in complete)
        note = {"ax": at, "ay": max(beneath) + 0.08 * height, "axref": "x", "ayref": "y", "xanchor": "left"}
    return note | {
        "x": at,
        "y": point.quality,
        "text": f"<b>Knee</b> &nbsp;{plain(point.arm)}",
        "arrowwidth": 1.2,
        "arrowhead": 0,
        "standoff": marker_px(point.size) / 2 + 3,
    }


def _layout(frontier: Frontier) -> Json:
    cost = {
        "type": "log",
        "nticks": 6,
        "exponentformat": "power",
        "title": {"text": plain(axis_title(frontier.cost_name)), "standoff": 8},
    }
    quality = {"title": {"text": plain(axis_title(frontier.quality_name)), "standoff": 14}}
    stops = [{"dtickrange": [0.9 * 0.1**n, 9 * 0.1**n], "value": f".{n}f"} for n in (1, 2, 3, 4)]
    return bare_layout() | {
        "xaxis": AXIS | cost,
        "yaxis": AXIS | quality | {"tickformatstops": stops},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }


def bare_layout() -> Json:
    return {
        "margin": {"l": 70, "r": 24, "t": 30, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": FONT,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": FONT},
        "showlegend": False,
    }


def plain(text: str) -> str:
    """Text for plotly, which reads a few HTML tags and these three entities in any label."""
    return escape(text, quote=False)
