"""The plots of a frontier as plotly figures in plain data: the page shows them, `drawing.py` makes a picture.

Source: colours after Okabe and Ito, "Color Universal Design" (2008), distinct in the common colour vision
deficiencies. The blue is lighter than theirs: each has a contrast of 3 or more to white and to #14171c.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from orchestrator.costs import TIMES
from orchestrator.frontier.points import Point, as_shown, front_points, quartiles
from orchestrator.output import IN_BITS
from orchestrator.units import Unit, axis_title, number, unit_of

Json = dict[str, Any]

FADED = 0.65  # opacity of dominated points
GREY = "#7d8896"  # of lines, on white and on #14171c
NOTHING_YET = "No finished trial with a known cost and quality"
SIZE_TITLE = "Expert slots per token"
# What marks and lines mean, from the back to the front, and a sign for each. The statuses of points are among
# these roles.
ROLES = {
    "baseline": ("Baseline, not counted", "┈"),
    "family": ("Frontier of each family", "┈"),
    "longer": ("One model, for more steps", "/"),
    "dense": ("Dense alone", "╌"),
    "published": ("Published, not counted", "○"),
    "diverged": ("Diverged, on the cost axis", TIMES),
    "operating_front": ("MoE models with operating points", "┈"),
    "operating": ("Operating point, not trained anew", "+"),
    "dominated": ("Dominated", "◌"),
    "frontier": ("Frontier", "─"),
    "retrained": ("Retrained, not counted", "☆"),
}

# Marks that are hollow or thin, by role: symbol (None: the family's), diameter in pixels (0: by size).
_MARKS = {
    "published": (None, 9),
    "diverged": ("x-thin", 8),
    "operating": ("cross-thin", 7),
    "retrained": ("star", 15),
}
_FONT = {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13}
_AXIS = {"zeroline": False, "showline": True, "ticks": "outside", "ticklen": 5, "automargin": True}


class FamilyStyle(NamedTuple):
    """How a family looks: its colour, its marker as plotly names it, and the marker as a character."""

    colour: str
    symbol: str
    glyph: str


_FAMILIES = {
    "dense": FamilyStyle("#CC79A7", "square", "■"),
    "soft": FamilyStyle("#D55E00", "circle", "●"),
    "token_choice": FamilyStyle("#2B87C8", "triangle-up", "▲"),
    "sinkhorn_token_choice": FamilyStyle("#7A78D8", "triangle-down", "▼"),
    "expert_choice": FamilyStyle("#009E73", "diamond", "◆"),
    "sinkhorn_expert_choice": FamilyStyle("#7A8F00", "diamond-tall", "♦"),
    "sparse_transport_expert_choice": FamilyStyle("#A0643C", "pentagon", "⬟"),
}
_SPARE_STYLES = (
    FamilyStyle("#9A7D0A", "triangle-left", "◀"),
    FamilyStyle("#A5619B", "triangle-right", "▶"),
    FamilyStyle("#7F7F7F", "hexagon", "⬢"),
)


def frontier_plot(
    name: str,
    cost_name: str,
    quality_name: str,
    entries: Sequence[tuple[Point, str]],
    *,
    operating_front: Sequence[Point] = (),
    baselines: Mapping[str, float] = {},
    subtitle: str = "",
    size_title: str = SIZE_TITLE,
) -> Json:
    """The plot of quality against one cost: `data` and `layout` of a plotly figure.

    A trace's `meta` has its role and family, its `customdata` addresses of runs. The layout's `meta` has
    the sizes that a key explains, and the points on the front, the knee first.
    Trials that stopped, failed or run have no final quality and are not drawn.

    Args:
        entries: all points with their status (`Frontier.statuses`), or as `published`.
        baselines: name -> quality of what has no cost here: a horizontal line each.
        subtitle: what the numbers are: `Frontier.subtitle`.
        size_title: what the sizes of marks are.
    """
    drawn: dict[tuple[str, str], list[Point]] = {}
    for point, status in entries:
        if 0 < point.cost < math.inf:
            drawn.setdefault((status.split(",")[0], point.family), []).append(point)
    styles = family_styles(family for role, family in drawn if role in ROLES)
    unit = unit_of(cost_name, [point.cost for point, status in entries if status != "published"])
    counted = [point for point, status in entries if status.startswith(("frontier", "dominated"))]
    front = front_points(counted)
    traces = [_line("operating_front", operating_front, dash="dot"), _line("frontier", front)]
    families = dict.fromkeys(point.family for point in counted)
    for family in families if len(families) > 1 else ():
        own = front_points([point for point in counted if point.family == family])
        role, dash = ("dense", "dash") if family == "dense" else ("family", "dot")
        traces.append(_line(role, own, family=family, colour=styles[family].colour, dash=dash))
    traces += [
        _line("longer", points, family=family, colour=styles[family].colour, shape="linear")
        for family, points in longer(counted)
    ]
    traces += [
        _marks(drawn[role, family], role, style, cost_name, quality_name, unit)
        for role in ROLES
        for family, style in styles.items()
        if (role, family) in drawn
    ]
    traces = [trace for trace in traces if trace["x"]]
    for trace in traces:
        trace["x"] = [cost / unit.size for cost in trace["x"]]
    costs = [cost for trace in traces for cost in trace["x"]]
    ends = sorted(counted, key=lambda point: point.cost)[:: max(len(counted) - 1, 1)]
    traces[:0] = [
        _baseline(baseline, quality, costs, ends) for baseline, quality in baselines.items() if costs
    ]
    explained: set[str] = set()
    for trace in traces:
        trace |= {"legendgroup": trace["name"], "showlegend": trace["name"] not in explained}
        explained.add(trace["name"])
    knees = [point for point, status in entries if status == "frontier, knee"]
    sizes = key_sizes([*counted, *(point for point, status in entries if status == "retrained")])
    named = [
        {
            "name": plain(point.arm),
            "x": point.cost / unit.size,
            "y": point.quality,
            "px": marker_px(point.size),
        }
        for point in (*knees, *(point for point in front if point not in knees))
    ]
    layout = _layout(name, unit.title, axis_title(quality_name))
    layout["title"]["subtitle"] = {"text": plain(subtitle)}
    layout["meta"] = {"sizes": sizes, "size_title": size_title, "front": named}
    if quality_name in IN_BITS:
        placed = [trace["y"] for trace in traces if trace.get("yaxis") != "y2"]
        layout["yaxis"] |= _bit_ticks([y for each in placed for y in each])
    # With a format every tick of a log axis has its whole number: 20k, 50k. Small numbers, and those of a
    # unit with a prefix, stand as they are.
    tick_format = "~s" if unit.size == 1 and max(costs, default=0) >= 1000 else "~g"
    layout["xaxis"] |= {"type": "log", "nticks": 6, "tickformat": tick_format}
    if front:
        layout["annotations"] = [_knee_label(named[0])]
    else:
        middle = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
        layout["annotations"] = [{"text": NOTHING_YET, "showarrow": False, **middle}]
    return {"data": traces, "layout": layout}


def budget_plot(curve: NDArray[np.float64]) -> Json:
    """The plot of hypervolume against device time: (entries, 2) of `points.hypervolume_by_budget`."""
    scale, unit = (3600, "hours") if curve[-1, 0] >= 7200 else (1, "seconds")
    title = f"Device {unit} spent"
    trace = {
        "type": "scatter",
        "mode": "lines",
        "x": [0.0, *(curve[:, 0] / scale).tolist()],
        "y": [0.0, *curve[:, 1].tolist()],
        "meta": {"role": "", "family": ""},
        "line": {"color": GREY, "width": 1.8, "shape": "hv"},
        "hovertemplate": f"%{{y:.4f}} after %{{x:.4g}}: {title}<extra></extra>",
    }
    layout = _layout("Hypervolume by budget", title, "Hypervolume")
    layout["xaxis"]["rangemode"] = layout["yaxis"]["rangemode"] = "tozero"
    return {"data": [trace], "layout": layout}


def _layout(title: str, x_title: str, y_title: str) -> Json:
    return {
        "title": {"text": plain(title)},
        "xaxis": {**_AXIS, "title": {"text": plain(x_title), "standoff": 10, "font": _FONT}},
        "yaxis": {**_AXIS, "title": {"text": plain(y_title), "standoff": 10, "font": _FONT}},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "font": _FONT,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": _FONT},
    }


def _bit_ticks(likelihoods: Sequence[float]) -> Json:
    """The ticks of an axis of likelihoods, labelled in bits: more bits are further down, and closer."""
    low, high = (-math.log2(end(likelihoods, default=1.0)) for end in (max, min))
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if high - low <= 8 * step)
    bits = [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]
    return {"tickvals": [2**-each for each in bits], "ticktext": [f"{each:g}" for each in bits]}


def _knee_label(knee: Json) -> Json:
    # On a log axis an annotation's place is a logarithm. Above and to the left of a front there is room.
    place = {"x": math.log10(knee["x"]), "y": knee["y"], "ax": -24, "ay": -34, "standoff": knee["px"] / 2 + 3}
    return {"text": "<b>Knee</b>", "arrowwidth": 1.2, "arrowhead": 0, "arrowcolor": GREY, **place}


def longer(points: Iterable[Point]) -> Iterator[tuple[str, list[Point]]]:
    """Yields family and points, by cost, of each model that was trained for several numbers of steps."""
    models: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        same = (f"{name}={value}" for name, value in sorted(point.settings.items()) if name != "steps")
        models.setdefault((point.family, *same), []).append(point)
    for of in models.values():
        if len({point.settings.get("steps") for point in of}) > 1:
            yield of[0].family, sorted(of, key=lambda point: point.cost)


def _line(
    role: str,
    points: Sequence[Point],
    *,
    family: str = "",
    colour: str = GREY,
    dash: str = "solid",
    shape: str = "hv",
) -> Json:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": ROLES[role][0],
        "x": [point.cost for point in points],
        "y": [point.quality for point in points],
        "meta": {"role": role, "family": family},
        # A frontier is a staircase: between two models there is none, and the cheaper one is the best until
        # the next.
        "line": {"color": colour, "dash": dash, "width": 1.8, "shape": shape},
        "visible": "legendonly" if role == "family" else True,
        "hoverinfo": "skip",
    }


def _baseline(name: str, quality: float, costs: Sequence[float], ends: Sequence[Point]) -> Json:
    """A horizontal line over the drawn costs, labelled at the end whose point, the cheapest or the dearest of
    the sweep, is farther away from it.
    """
    label = "<br>".join(map(plain, textwrap.wrap(f"{name}: {quality:.3f}", 22)))
    distances = [abs(point.quality - quality) for point in ends]
    at_left = not distances or distances[0] >= distances[-1]
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": ROLES["baseline"][0],
        "x": [min(costs), max(costs)],
        "y": [quality, quality],
        "text": [label, ""] if at_left else ["", label],
        "textposition": "top right" if at_left else "top left",
        "cliponaxis": False,  # the highest line has little room above it
        "meta": {"role": "baseline", "family": ""},
        "line": {"color": GREY, "dash": "dot", "width": 1.4},
        "hoverinfo": "skip",
    }


def _marks(
    points: Sequence[Point], role: str, style: FamilyStyle, cost_name: str, quality_name: str, unit: Unit
) -> Json:
    """The points of one family that have one role, with bars over quartiles of costs, and of the standard
    error of their qualities.
    """
    symbol, size = _MARKS.get(role, (None, 0))
    spreads = [(*quartiles(point, cost_name), point.cost) for point in points]
    on_axis, hollow = role == "diverged", role in _MARKS
    errors = [(p.quality, p.standard_error if math.isfinite(p.standard_error) else 0.0) for p in points]
    marker = {
        "symbol": (symbol or style.symbol) + ("-open" if hollow else ""),
        "color": style.colour,
        "size": [size or marker_px(point.size) for point in points],
        "opacity": FADED if role == "dominated" else 1,
        "line": {"width": 1.4 if hollow else 0},
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "name": ROLES[role][0] if hollow else plain(family_label(points[0].family)),
        "x": [point.cost for point in points],
        "y": [0.0 if on_axis else point.quality for point in points],
        "meta": {"role": role, "family": points[0].family},
        "marker": marker,
        "yaxis": "y2" if on_axis else "y",
        "cliponaxis": not on_axis,
        "hoverinfo": "text",
        "hovertext": [_hover_text(point, role, cost_name, quality_name, unit) for point in points],
        # A mean has no run of its own.
        "customdata": [web_link(None if point.runs else point.run_url) for point in points],
        "error_x": _bars([(low / unit.size, high / unit.size, at / unit.size) for low, high, at in spreads]),
        "error_y": _bars([] if on_axis else [(mean - error, mean + error, mean) for mean, error in errors]),
    }


def _bars(bars: Sequence[tuple[float, float, float]]) -> Json:
    """Bars of (lower end, upper end, place); none if all are points."""
    if not any(low < high for low, high, _ in bars):
        return {"visible": False}
    # A mean of equal numbers may differ from them in its last bit.
    above, below = [max(high - at, 0.0) for _, high, at in bars], [max(at - low, 0.0) for low, _, at in bars]
    return {"type": "data", "array": above, "arrayminus": below, "thickness": 1, "width": 0}


def _hover_text(point: Point, role: str, cost_name: str, quality_name: str, unit: Unit) -> str:
    """The text of a point under the pointer, in at most 18 lines, because more do not fit beside a plot."""
    lines = [
        f"{family_label(point.family)}, {role}",
        f"{unit.title}: {cost_text(point, cost_name, unit.size)}",
        f"{axis_title(quality_name)}: {point.quality_text}",
        *(f"{name}: {text}" for name, text in facts(point).items()),
    ]
    return "<br>".join([f"<b>{plain(point.arm)}</b>", *map(plain, lines[:17])])


def plain(text: str) -> str:
    """Text for plotly, which reads a few HTML tags and these three entities in any label."""
    return escape(text, quote=False)


def family_styles(families: Iterable[str]) -> dict[str, FamilyStyle]:
    """The style of each family present: known families as in the table, others in alphabetical order."""
    present = {*families}
    styles = {family: style for family, style in _FAMILIES.items() if family in present}
    for index, family in enumerate(sorted(present - styles.keys())):
        styles[family] = _SPARE_STYLES[index % len(_SPARE_STYLES)]
    return styles


def family_label(family: str) -> str:
    return family.replace("_", " ").capitalize()


def marker_px(size: float) -> float:
    """Marker diameter in pixels at 96 per inch: area grows with the size, within bounds."""
    return min(max(13 * math.sqrt(size), 7), 32) if size > 0 else 7


def key_sizes(points: Iterable[Point]) -> tuple[float, ...]:
    """At most four sizes, smallest first, that explain the markers drawn; empty if all are alike."""
    sizes = sorted({point.size for point in points if math.isfinite(point.size)})
    if len(sizes) > 4:
        sizes = [sizes[round(step * (len(sizes) - 1) / 3)] for step in range(4)]
    return tuple(sizes) if len(sizes) > 1 else ()


def cost_text(point: Point, cost_name: str, size: float = 1.0) -> str:
    """The cost in units of a size (`Unit.size`), with its quartiles in brackets if it was measured."""
    low, high = quartiles(point, cost_name)
    spread = f" ({number(low / size)} - {number(high / size)})" if low < high else ""
    return number(point.cost / size) + spread


def facts(point: Point) -> dict[str, str]:
    """The measurements, settings and seeds of a point."""
    known = {**point.details, **point.settings}
    shown = {name: number(x) if isinstance(x, float) else str(x) for name, x in known.items()}
    if len(point.qualities) > 1:
        worst, best = (as_shown(point.quality_name, end(point.qualities))[1] for end in (min, max))
        shown["seeds"] = f"{len(point.qualities)}, from {worst:.4f} to {best:.4f}"
    return shown


def web_link(url: str | None) -> str | None:
    """The address if it is http or https: a `javascript:` address would run in the reader's browser."""
    return url if url and urlsplit(url).scheme in {"http", "https"} else None
