"""Draws `figure.FigureData` in two ways: as plotly's traces and layout, and with matplotlib."""

import math
from collections.abc import Sequence
from html import escape
from itertools import product
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import Bbox

from orchestrator.frontier.figure import (
    GREY,
    INK,
    MUTED,
    ROLES,
    SIZE_TITLE,
    FigureData,
    Series,
    marker_px,
    number,
)

Json = dict[str, Any]

DPI = 160
MOST_NAMES = 40  # in a picture: more have no room

_FONT = {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13}
_AXIS = {"zeroline": False, "showline": True, "ticks": "outside", "ticklen": 5, "automargin": True}
_PX = 72 / 96  # a pixel in points, which matplotlib measures in
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_RISES = range(2, 180, 20)  # pixels between a mark and its name: the first with room


def plotly_data(data: FigureData) -> Json:
    """`data` and `layout` of a plotly figure. A trace's `meta` has its role and family, `customdata` the
    addresses of runs.
    """
    named: set[str] = set()
    traces = []
    for series in data.series:
        trace = {
            "type": "scatter",
            "x": series.x,
            "y": series.y,
            "name": plain(series.label),
            "legendgroup": plain(series.label),
            "showlegend": bool(series.label) and series.label not in named,
            "visible": "legendonly" if series.optional else True,
            "meta": {"role": series.role, "family": series.family},
        }
        named.add(series.label)
        traces.append(trace | (_plotly_marks(series) if series.shape else _plotly_line(series, data)))
    return {"data": traces, "layout": _plotly_layout(data)}


def _plotly_line(series: Series, data: FigureData) -> Json:
    line = {"color": series.colour, "dash": series.dash, "width": 1.8}
    hover: Json = {"hoverinfo": "skip"}
    if data.is_budget:
        line["shape"] = "hv"
        hover = {"hovertemplate": f"%{{y:.4f}} after %{{x:.4g}}: {data.x_title}<extra></extra>"}
    return {"mode": "lines", "line": line} | hover


def _plotly_marks(series: Series) -> Json:
    assert series.shape
    marker = {
        "symbol": series.shape.plotly + ("-open" if series.hollow else ""),
        "color": series.colour,
        "size": series.sizes,
        "opacity": series.opacity,
        "line": {"width": 1.4 if series.hollow else 0},
    }
    return {
        "mode": "markers",
        "marker": marker,
        "yaxis": "y2" if series.on_axis else "y",
        "cliponaxis": not series.on_axis,
        "hoverinfo": "text",
        "hovertext": [
            "<br>".join([f"<b>{plain(name)}</b>", *map(plain, more)]) for name, *more in series.texts
        ],
        "customdata": series.links,
        "error_x": _plotly_bars(series.x, series.x_bars),
        "error_y": _plotly_bars(series.y, series.y_bars),
    }


def _plotly_bars(places: Sequence[float], bars: Sequence[tuple[float, float]]) -> Json:
    if not bars:
        return {"visible": False}
    above = [high - at for at, (_, high) in zip(places, bars, strict=True)]
    below = [at - low for at, (low, _) in zip(places, bars, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": above,
        "arrayminus": below,
        "thickness": 1,
        "width": 0,
    }


def _plotly_layout(data: FigureData) -> Json:
    x_axis, y_axis = (
        {**_AXIS, "title": {"text": plain(title), "standoff": 10}} for title in (data.x_title, data.y_title)
    )
    if data.is_budget:
        x_axis["rangemode"] = y_axis["rangemode"] = "tozero"
    else:
        x_axis |= {"type": "log", "nticks": 6, "exponentformat": "power"}
    # On a log axis an annotation's place is a logarithm. Above and to the left of a front there is room.
    knees = [
        {"x": math.log10(knee.cost), "y": knee.quality, "ax": -24, "ay": -34, "text": "<b>Knee</b>"}
        | {"arrowwidth": 1.2, "arrowhead": 0, "standoff": marker_px(knee.size) / 2 + 3, "arrowcolor": GREY}
        for knee in data.named[:1]
    ]
    message = {"text": data.message, "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    return {
        "title": {"text": plain(data.title)},
        "xaxis": x_axis,
        "yaxis": y_axis,
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "annotations": [message] if data.message else knees,
        "font": _FONT,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": _FONT},
    }


def plain(text: str) -> str:
    """Text for plotly, which reads a few HTML tags and these three entities in any label."""
    return escape(text, quote=False)


def matplotlib_figure(data: FigureData) -> Figure:
    """1600 x 1000 pixels, with the names of points on the front. Uses neither pyplot nor global state."""
    figure = Figure(figsize=(10, 6.25), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    _frame(axes, data)
    # The last series of a label is the foremost one and explains it. Families stand before other marks.
    shown = [series for series in data.series if not series.optional]
    drawn = {series.label: _draw(axes, series, order) for order, series in enumerate(shown, start=2)}
    roles = {label for label, _ in ROLES.values()}
    keys = [drawn[label] for label in sorted(drawn, key=lambda label: label in roles)]
    if data.sizes:
        keys += axes.plot([], [], " ", label="\n" + SIZE_TITLE.replace(" per", "\nper"))
    for size in data.sizes:
        keys.append(axes.scatter([], [], (marker_px(size) * _PX) ** 2, MUTED, label=number(size)))
    legend = figure.legend(
        handles=keys, loc="outside right upper", frameon=False, labelspacing=1, labelcolor=INK
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    axes.margins(x=0.09, y=0.1)
    axes.text(0.5, 0.5, data.message, transform=axes.transAxes, ha="center", color=MUTED)
    canvas.draw()
    _name_points(axes, data)
    return figure


def _frame(axes: Axes, data: FigureData) -> None:
    axes.set_xscale("log")
    text: Json = {"color": INK, "parse_math": False}
    axes.set_title(data.title, loc="left", fontsize=14, fontweight="bold", pad=14, **text)
    axes.set_xlabel(data.x_title, labelpad=8, **text)
    axes.set_ylabel(data.y_title, labelpad=8, **text)
    axes.grid(color="#e9ecf0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c0ca")
    axes.tick_params(which="both", color="#b8c0ca", labelcolor=INK, labelsize=9.5)


def _draw(axes: Axes, series: Series, z_order: float) -> Artist:
    """Draws a series and returns what explains it in a legend."""
    look: Json = {"color": series.colour, "zorder": z_order}
    label = series.label.replace(", ", ",\n").replace(" with ", " with\n")
    if series.shape is None:
        (line,) = axes.plot(series.x, series.y, _DASHES[series.dash], linewidth=1.2, label=label, **look)
        return line
    for bars, draw, at in ((series.x_bars, axes.hlines, series.y), (series.y_bars, axes.vlines, series.x)):
        if bars:
            draw(at, *zip(*bars, strict=True), linewidth=0.8, alpha=0.6, **look)
    empty = series.hollow and series.shape.matplotlib not in ("+", "x")
    colours: Json = {"facecolors": "none", "edgecolors": series.colour} if empty else {"color": series.colour}
    return axes.scatter(
        series.x,
        series.y,
        [(size * _PX) ** 2 for size in series.sizes],
        marker=series.shape.matplotlib,
        linewidths=1 if series.hollow else 0,
        alpha=series.opacity,
        zorder=z_order,
        label=label,
        transform=axes.get_xaxis_transform() if series.on_axis else axes.transData,
        clip_on=not series.on_axis,
        **colours,
    )


def _name_points(axes: Axes, data: FigureData) -> None:
    """Names points of the front where the name touches no mark, line or other name; the knee comes first."""
    axes.autoscale(False)
    taken, along = [], [np.zeros((0, 2))]
    for series in data.series:
        pixels = axes.transData.transform(np.array([series.x, series.y]).T)
        if series.shape and not series.on_axis:
            radii = np.array(series.sizes) * DPI / 96 / 2
            taken += [Bbox([at - radius, at + radius]) for at, radius in zip(pixels, radii, strict=True)]
        elif not series.shape and not series.optional:
            steps = np.linspace(0, len(pixels) - 1, 100 * len(pixels))
            along.append(np.stack([np.interp(steps, np.arange(len(pixels)), axis) for axis in pixels.T], 1))
    lines = np.concatenate(along)
    for point in data.named[:MOST_NAMES]:
        is_knee, radius = point is data.named[0], marker_px(point.size) * DPI / 96 / 2
        name, weight = (f"Knee: {point.arm}", "bold") if is_knee else (point.arm, "normal")
        text = axes.text(0, 0, name, size=9.5, weight=weight, color=INK, va="bottom", parse_math=False)
        text.set_in_layout(False)
        extent, (x, y) = text.get_window_extent(), axes.transData.transform((point.cost, point.quality))
        for rise, side in product(_RISES, (1, -1)):
            # Above and to the left of its mark, where a front leaves room, or below and to the right.
            left = max(x - radius - extent.width, axes.bbox.x0 + 2) if side > 0 else x + radius
            bottom = y + radius + rise if side > 0 else y - radius - rise - extent.height
            box = Bbox.from_bounds(left, bottom, extent.width, extent.height)
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if inside and not box.count_overlaps(taken) and not box.count_contains(lines):
                break
        else:
            text.remove()
            continue
        taken.append(box)
        corner = (box.x1 - 4, box.y0) if side > 0 else (box.x0 + 4, box.y1)
        start, end, place = axes.transData.inverted().transform([(x, y), corner, (box.x0, box.y0)])
        text.set_position(place)
        if rise > _RISES[0]:
            axes.plot(*zip(start, end, strict=True), color=MUTED, linewidth=0.7, zorder=1)
