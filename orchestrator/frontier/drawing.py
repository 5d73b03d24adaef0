"""Pictures by matplotlib, with no global state of pyplot: their style, and the plot of a frontier."""

import io
import textwrap
from collections.abc import Sequence
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from orchestrator.frontier.figure import FADED, ROLES, Json, marker_px
from orchestrator.units import number

INK, MUTED, GRID, EDGE = "#1d2430", "#5b6675", "#e9ecf0", "#b8c0ca"
# Okabe and Ito's colours and lighter ones, distinct in the common colour vision deficiencies.
COLOURS = (
    "#2B87C8", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#7A78D8",
    "#A0643C", "#9AD0A5", "#F4B6C2", "#7F7F7F",
)  # fmt: skip
DPI = 160  # of a frontier's picture
MOST_NAMES = 40  # of points in a picture: more have no room

_PX = 72 / 96  # a pixel in points, which matplotlib measures in
_TIGHT: Json = {
    "labelspacing": 0.3,
    "columnspacing": 1,
    "handletextpad": 0.4,
    "handlelength": 1.5,
    "borderpad": 0.2,
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_MARKERS = {  # plotly's name -> matplotlib's
    "circle": "o",
    "cross-thin": "+",
    "diamond": "D",
    "diamond-tall": "d",
    "hexagon": "h",
    "pentagon": "p",
    "square": "s",
    "star": "*",
    "triangle-down": "v",
    "triangle-left": "<",
    "triangle-right": ">",
    "triangle-up": "^",
    "x-thin": "x",
}
_RISES = range(2, 180, 20)  # pixels between a mark and its name: the first with room


def new_figure(width: float, height: float, *, dpi: float = 130) -> Figure:
    """A figure of this size in inches."""
    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def style_axes(
    axes: Axes, title: str = "", x: str = "", y: str = "", *, size: float = 9.5, pad: float | None = None
) -> None:
    """Sets titles, a light frame and a grid behind the data. A `$` in a name is no formula.

    Args:
        size: of the axes' titles, in points.
        pad: points between the axes and their title; default: `size`.
    """
    text: Json = {"color": INK, "fontweight": "bold", "fontsize": size + 1, "parse_math": False}
    axes.set_title(title, loc="left", pad=size if pad is None else pad, **text)
    axes.set_xlabel(x, fontsize=size, color=MUTED, parse_math=False)
    axes.set_ylabel(y, fontsize=size, color=MUTED, parse_math=False)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(EDGE)
    axes.tick_params(which="both", color=EDGE, labelcolor=INK, labelsize=9)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def frontier_picture(plot: Json) -> Figure:
    """Draws a plot of `figure.frontier_plot` in 1600 x 1000 pixels, with the names of points on the front."""
    layout = plot["layout"]
    figure = new_figure(10, 6.25, dpi=DPI)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15)
    axes = figure.add_subplot()
    keys = _fill(axes, plot)
    titles = (unescape(part["title"]["text"]) for part in (layout, layout["xaxis"], layout["yaxis"]))
    subtitle = textwrap.wrap(unescape(layout["title"]["subtitle"]["text"]), 100)
    style_axes(axes, *titles, size=11, pad=11 + 13 * len(subtitle))
    above = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 8), "textcoords": "offset points"}
    axes.annotate("\n".join(subtitle), **above, va="bottom", size=9, color=MUTED, parse_math=False)
    sizes = layout["meta"]["sizes"]
    if sizes:
        keys += axes.plot([], [], " ", label="\n" + textwrap.fill(layout["meta"]["size_title"], 20))
    for size in sizes:
        keys.append(axes.scatter([], [], (marker_px(size) * _PX) ** 2, MUTED, label=number(size)))
    _legend(figure, keys, loc="outside right upper", labelspacing=1)
    _name_points(axes, plot)
    return figure


def save_column(plot: Json, path: Path | str, *, width: float, font: float, title: str = "") -> None:
    """Writes a plot of `figure.frontier_plot` for a column of a paper, as PDF, SVG or PNG by the suffix.

    All marks have one size, all text has one, and the legend stands above the axes.

    Args:
        width: of the file, in inches.
        font: size of all text, in points.
        title: above the axes; a paper has a caption in its place.
    """
    layout, px = plot["layout"], 0.8 * font / _PX
    small = {"data": [dict(trace) for trace in plot["data"]], "layout": layout}
    for trace in small["data"]:
        if "marker" in trace:
            trace["marker"] = {**trace["marker"], "size": [px for _ in trace["x"]]}
    front = [{**point, "px": px} for point in layout["meta"]["front"]]
    small["layout"] = {**layout, "meta": {**layout["meta"], "front": front}}
    figure = new_figure(width, 0.7 * width, dpi=DPI)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02)
    axes = figure.add_subplot()
    keys = _fill(axes, small, font=font, mark=px)
    labels = (unescape(layout[axis]["title"]["text"]) for axis in ("xaxis", "yaxis"))
    style_axes(axes, title, *labels, size=font, pad=font / 2)
    axes.tick_params(which="both", labelsize=font, length=font / 3, pad=font / 4)
    axes.title.set_fontsize(font)
    for columns in (4, 3, 2, 1):
        legend = _legend(figure, keys, loc="outside upper center", ncols=columns, fontsize=font, **_TIGHT)
        extent = legend.get_window_extent()
        if extent.width <= width * DPI or columns == 1:
            break
        legend.remove()
    figure.set_size_inches(width, 0.7 * width + extent.height / DPI)
    _name_points(axes, small, font=font, rises=_RISES[:2])  # lines to names farther away would cross
    with rc_context({"pdf.fonttype": 42}):  # journals refuse the default, fonts of type 3
        figure.savefig(path)


def _legend(figure: Figure, keys: Sequence[Artist], **options: Any) -> Legend:
    legend = figure.legend(handles=keys, frameon=False, labelcolor=INK, **options)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return legend


def _fill(axes: Axes, plot: Json, *, font: float = 9.5, mark: float = marker_px(1)) -> list[Artist]:
    """Draws the traces of a plot and sets its axes; returns what a legend explains.

    Args:
        font: of the labels of baselines, in points.
        mark: diameter of a mark in the legend, in pixels at 96 per inch.
    """
    layout = plot["layout"]
    axes.set_xscale("log")
    large = layout["xaxis"]["tickformat"] == "~s"
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if large else FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if "tickvals" in layout["yaxis"]:
        axes.set_yticks(layout["yaxis"]["tickvals"], layout["yaxis"]["ticktext"])
    # The last trace of a label is in front and explains it. Families stand before other marks.
    traces = _shown(plot)
    drawn = {trace["name"]: _draw(axes, trace, order, font) for order, trace in enumerate(traces, start=2)}
    roles = {label for label, _ in ROLES.values()}
    keys = [drawn[label] for label in sorted(drawn, key=lambda label: label in roles)]
    if any(trace["meta"]["role"] == "dominated" for trace in traces):
        faded = {"alpha": FADED, "linewidths": 0, "label": ROLES["dominated"][0]}
        keys.append(axes.scatter([], [], (mark * _PX) ** 2, MUTED, **faded))
    axes.margins(x=0.09, y=0.1)
    if not layout["meta"]["front"]:
        message = layout["annotations"][0]["text"]
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", color=MUTED)
    low, high = axes.get_xlim()
    steps = range(1, 10) if high < 4 * low else (1, 2, 5) if high < 1000 * low else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps))
    return keys


def _shown(plot: Json) -> list[Json]:
    return [trace for trace in plot["data"] if trace.get("visible") != "legendonly"]


def _draw(axes: Axes, trace: Json, z_order: float, font: float) -> Artist:
    """Draws a trace and returns the artist that explains it in a legend."""
    label = textwrap.fill(unescape(trace["name"]), 20)
    x, y = trace["x"], trace["y"]
    if "line" in trace:
        look = {"color": trace["line"]["color"], "linestyle": _DASHES[trace["line"]["dash"]]}
        if "text" in trace:
            at, side = (0, "left") if trace["text"][0] else (-1, "right")
            words = unescape(trace["text"][at].replace("<br>", "\n"))
            axes.text(x[at], y[at], words, size=font, color=MUTED, ha=side, va="bottom", parse_math=False)
        (line,) = axes.plot(*_corners(trace), linewidth=1.2, label=label, zorder=z_order, **look)
        return line
    marker = trace["marker"]
    symbol, hollow = _MARKERS[marker["symbol"].removesuffix("-open")], marker["line"]["width"] > 0
    on_axis, colour = trace["yaxis"] == "y2", marker["color"]
    empty = hollow and symbol not in "+x"
    look: Json = {"facecolors": "none", "edgecolors": colour} if empty else {"color": colour}
    x_error, y_error = (
        [bars["arrayminus"], bars["array"]] if "array" in bars else None
        for bars in (trace["error_x"], trace["error_y"])
    )
    axes.errorbar(x, y, y_error, x_error, "none", ecolor=colour, elinewidth=0.8, alpha=0.6, zorder=z_order)
    return axes.scatter(
        x,
        y,
        [(size * _PX) ** 2 for size in marker["size"]],
        marker=symbol,
        linewidths=1 if hollow else 0,
        alpha=marker["opacity"],
        zorder=z_order,
        label=label,
        transform=axes.get_xaxis_transform() if on_axis else axes.transData,
        clip_on=not on_axis,
        **look,
    )


def _corners(trace: Json) -> tuple[list[float], list[float]]:
    """Returns the x and y of a line's corners, with those of a staircase."""
    x, y = trace["x"], trace["y"]
    if trace["line"].get("shape") != "hv":
        return x, y
    return [x[0], *(at for at in x[1:] for _ in "hv")], [*(at for at in y[:-1] for _ in "hv"), y[-1]]


def _name_points(axes: Axes, plot: Json, *, font: float = 9.5, rises: range = _RISES) -> None:
    """Names points of the front where the name touches no mark, line or other name. The first is the knee."""
    FigureCanvasAgg(axes.get_figure(root=True)).draw()  # lays the figure out
    points, traces = plot["layout"]["meta"]["front"][:MOST_NAMES], _shown(plot)
    axes.autoscale(False)
    taken, along = [text.get_window_extent() for text in axes.texts], [np.zeros((0, 2))]
    for trace in traces:
        corners = _corners(trace) if "line" in trace else (trace["x"], trace["y"])
        pixels = axes.transData.transform(np.stack(corners, 1))
        if "line" in trace:
            steps = np.linspace(0, len(pixels) - 1, 100 * len(pixels))
            along.append(np.stack([np.interp(steps, np.arange(len(pixels)), axis) for axis in pixels.T], 1))
        elif trace["yaxis"] == "y":
            radii = np.array(trace["marker"]["size"]) * DPI / 96 / 2
            taken += [Bbox([at - radius, at + radius]) for at, radius in zip(pixels, radii, strict=True)]
    lines = np.concatenate(along)
    for rank, point in enumerate(points):
        name, weight = unescape(point["name"]), "normal" if rank else "bold"
        name = name if rank else f"Knee: {name}"
        text = axes.text(0, 0, name, size=font, weight=weight, color=INK, va="bottom", parse_math=False)
        text.set_in_layout(False)
        extent, radius = text.get_window_extent(), point["px"] * DPI / 96 / 2
        x, y = axes.transData.transform((point["x"], point["y"]))
        for rise, side in product(rises if rank else _RISES, (1, -1)):
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
            lines = np.concatenate([lines, np.linspace((x, y), corner, 100)])
            axes.plot(*zip(start, end, strict=True), color=MUTED, linewidth=0.7, zorder=1)
