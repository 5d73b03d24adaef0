"""A frontier as PNG or SVG: the page's first plot, light, with names on the front. No pyplot, no globals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from orchestrator.frontier.labels import name_front
from orchestrator.frontier.operating import operating_front
from orchestrator.frontier.points import (
    Frontier,
    Point,
    dominated_points,
    family_fronts,
    front_points,
    is_complete,
    quartiles,
)
from orchestrator.frontier.published import Published, published
from orchestrator.frontier.style import (
    DOMINATED_OPACITY,
    INK,
    MUTED,
    NOTHING_YET,
    SIZE_TITLE,
    FamilyStyle,
    axis_title,
    family_label,
    family_styles,
    key_sizes,
    marker_px,
    number,
)

Styles = Mapping[str, FamilyStyle]

_GRID, _EDGE = "#e9ecf0", "#b8c0ca"
_POINTS_PER_PX = 72 / 96  # matplotlib measures in points, the styles in pixels at 96 per inch
_DPI = 160
_DENSE = "Dense alone"
_DOT = FamilyStyle(colour=MUTED, symbol="circle", marker="o", glyph="●")


def frontier_picture(frontier: Frontier, path: Path) -> None:
    """1600 x 1000 pixels, or as large in an SVG, by the suffix. `points.panel` gives those of other costs."""
    figure = Figure(figsize=(10, 6.25), dpi=_DPI, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    front, dominated = front_points(frontier), dominated_points(frontier)
    rest = [point for point in frontier.rest if is_complete(point)]
    burnt = [p for p in frontier.points if p.status == "diverged" and 0 < p.cost < math.inf]
    otherwise = [point for point in frontier.operating if is_complete(point)]
    papers = published(frontier.quality_name, frontier.cost_name) if frontier.published else ()
    drawn = [point.family for point in (*front, *dominated, *rest, *burnt)]
    styles = family_styles([*drawn, *(paper.family for paper in papers)])

    _frame(axes, frontier)
    families = [_key(family_label(name), **_marker(styles[name], 1)) for name in styles if name in drawn]
    lines = _lines(frontier, front)
    marks = _draw_lines(axes, lines, styles)
    marks += _draw_operating(axes, styles, otherwise, operating_front(frontier))
    marks += _draw_others(axes, styles, rest, papers, burnt)
    bars = _cost_bars([*front, *dominated, *otherwise], frontier.cost_name)
    marks += _draw_cost_bars(axes, styles, bars)
    _draw_counted(axes, styles, dominated, front)
    _legend(figure, [*families, *marks, *_size_keys(key_sizes([*front, *dominated, *rest]))])
    axes.margins(x=0.09, y=0.1)
    if not front:
        axes.text(0.5, 0.5, NOTHING_YET, transform=axes.transAxes, ha="center", color=MUTED)
    canvas.draw()
    if front:
        name_front(canvas, axes, [*lines.values(), *bars], [*dominated, *rest], papers)
    figure.savefig(path, dpi=_DPI)


def _draw_counted(axes: Axes, styles: Styles, dominated: Sequence[Point], front: Sequence[Point]) -> None:
    """With a thin bar from the worst seed to the best."""
    for points, alpha in ((dominated, DOMINATED_OPACITY), (front, 1)):
        for point in points:
            style = styles[point.family]
            axes.plot(point.cost, point.quality, **_marker(style, point.size), alpha=alpha, zorder=2 + alpha)
            if len(point.qualities) > 1:
                ends = min(point.qualities), max(point.qualities)
                axes.vlines(point.cost, *ends, color=style.colour, linewidth=0.8)


def _cost_bars(points: Sequence[Point], cost_name: str) -> list[tuple[Point, Point]]:
    """The ends of a bar from quartile to quartile, of each point whose cost is measured."""
    ends = [(point, quartiles(point, cost_name)) for point in points]
    return [(replace(p, cost=low), replace(p, cost=high)) for p, (low, high) in ends if low < high]


def _draw_cost_bars(axes: Axes, styles: Styles, bars: Sequence[tuple[Point, Point]]) -> list[Line2D]:
    """Returns their entry for the legend."""
    look: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.6}
    for low, high in bars:
        axes.hlines(low.quality, low.cost, high.cost, color=styles[low.family].colour, **look)
    return [Line2D([], [], color=MUTED, **look, label="Quartiles of\nmeasured costs")] if bars else []


def _draw_operating(
    axes: Axes, styles: Styles, points: Sequence[Point], front: Sequence[Point]
) -> list[Line2D]:
    """Returns their entries for the legend."""
    if not points:
        return []
    for point in points:
        axes.plot(point.cost, point.quality, **_plus(styles[point.family].colour), zorder=1.9)
    look: dict[str, Any] = {"color": INK, "linewidth": 1.2, "linestyle": ":"}
    axes.plot([p.cost for p in front], [p.quality for p in front], **look, zorder=2)
    return [
        _key("Operating point,\nnot trained anew", **_plus(MUTED)),
        Line2D([], [], **look, label="MoE models with\noperating points"),
    ]


def _draw_others(
    axes: Axes,
    styles: Styles,
    rest: Sequence[Point],
    papers: Sequence[Published],
    burnt: Sequence[Point],
) -> list[Line2D]:
    """What does not count. Returns the entries for the legend."""
    for point in rest:
        axes.plot(point.cost, point.quality, **_star(styles[point.family].colour), zorder=3)
    for paper in papers:
        axes.plot(paper.cost, paper.quality, **_hollow(styles[paper.family]), zorder=2)
    for point in burnt:  # on the cost axis, as it has no quality
        on_axis = axes.get_xaxis_transform()
        axes.plot(point.cost, 0, **_cross(styles[point.family].colour), transform=on_axis, clip_on=False)
    return [
        *([_key("Confirmation,\nnot counted", **_star(MUTED))] if rest else []),
        *([_key("Published,\nnot counted", **_hollow(_DOT))] if papers else []),
        *([_key("Diverged", **_cross(MUTED))] if burnt else []),
    ]


def _frame(axes: Axes, frontier: Frontier) -> None:
    axes.set_xscale("log")
    axes.set_title(
        frontier.name, loc="left", fontsize=14, fontweight="bold", pad=14, color=INK, parse_math=False
    )
    axes.set_xlabel(axis_title(frontier.cost_name), labelpad=8, color=INK, parse_math=False)
    axes.set_ylabel(axis_title(frontier.quality_name), labelpad=8, color=INK, parse_math=False)
    axes.grid(color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_EDGE)
    axes.tick_params(which="both", color=_EDGE, labelcolor=INK, labelsize=9.5)


def _marker(style: FamilyStyle, size: float) -> dict[str, Any]:
    points = marker_px(size) * _POINTS_PER_PX
    return {"marker": style.marker, "markersize": points, "color": style.colour, "markeredgewidth": 0}


def _star(colour: str) -> dict[str, Any]:
    return {
        "marker": "*",
        "markersize": 13,
        "color": "none",
        "markeredgecolor": colour,
        "markeredgewidth": 1.3,
    }


def _hollow(style: FamilyStyle) -> dict[str, Any]:
    edge = {"markeredgecolor": style.colour, "markeredgewidth": 0.9}
    return {"marker": style.marker, "markersize": 6, "color": "none", **edge}


def _plus(colour: str) -> dict[str, Any]:
    return {"marker": "+", "markersize": 5.5, "color": colour, "markeredgewidth": 0.9}


def _cross(colour: str) -> dict[str, Any]:
    return {"marker": "x", "markersize": 6, "color": colour, "markeredgewidth": 1.2}


def _lines(frontier: Frontier, front: Sequence[Point]) -> dict[str, Sequence[Point]]:
    """The front, and that of the dense models alone if there are others."""
    fronts = family_fronts(frontier)
    dense = {_DENSE: fronts["dense"]} if "dense" in fronts and len(fronts) > 1 else {}
    return {"Frontier": front} | dense


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[Point]], styles: Styles) -> list[Line2D]:
    """Returns their entries for the legend."""
    keys = []
    for label, points in lines.items():
        look: dict[str, Any] = {"color": MUTED, "linewidth": 1.2, "label": label}
        if label == _DENSE:
            look |= {"color": styles["dense"].colour, "linestyle": "--"}
        axes.plot([p.cost for p in points], [p.quality for p in points], **look, zorder=2)
        keys.append(Line2D([], [], **look))
    return keys


def _size_keys(sizes: Sequence[float]) -> list[Line2D]:
    title = _key("\n" + SIZE_TITLE.replace(" per", "\nper"))
    return [title, *(_key(number(size), **_marker(_DOT, size)) for size in sizes)] if sizes else []


def _legend(figure: Figure, keys: Sequence[Line2D]) -> None:
    legend = figure.legend(
        handles=keys, loc="outside right upper", frameon=False, fontsize=10, labelspacing=1, labelcolor=INK
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _key(label: str, **marker: Any) -> Line2D:
    return Line2D([], [], linestyle="none", label=label, **marker)
