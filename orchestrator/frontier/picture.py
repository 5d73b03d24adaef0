"""A frontier as a PNG: the page's plot, light, with the arms on the front named. No pyplot, so no globals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

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
    family_label,
    family_styles,
    key_sizes,
    marker_px,
    number,
)

_INK, _MUTED, _GRID = "#1d2430", "#5b6675", "#e9ecf0"
_POINTS_PER_PX = 72 / 96  # matplotlib measures in points, the styles in pixels at 96 per inch
_DPI = 160
_RISES = range(2, 90, 22)  # pixels of the picture from a marker up or down to its label: the first with room


def frontier_picture(frontier: Frontier, path: Path) -> None:
    """1600 x 1000 pixels, with only the complete points."""
    figure = Figure(figsize=(10, 6.25), dpi=_DPI, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    front = front_points(frontier)
    dominated = dominated_points(frontier)
    rest = [point for point in frontier.rest if is_complete(point)]
    styles = family_styles([*front, *dominated, *rest])

    _frame(axes, frontier)
    axes.plot([p.cost for p in front], [p.quality for p in front], color=_MUTED, linewidth=1.2, zorder=2)
    for point in dominated:
        axes.plot(
            point.cost, point.quality, **_marker(styles[point.family], point.size), alpha=DOMINATED_OPACITY
        )
    for point in front:
        axes.plot(point.cost, point.quality, **_marker(styles[point.family], point.size), zorder=3)
    for point in rest:
        axes.plot(point.cost, point.quality, **_star(styles[point.family].colour), zorder=3)
    _legend(figure, styles, key_sizes([*front, *dominated, *rest]), confirmed=bool(rest))
    axes.margins(x=0.09, y=0.1)
    if not front:
        axes.text(0.5, 0.5, NOTHING_YET, transform=axes.transAxes, ha="center", color=_MUTED)
    canvas.draw()
    if front:
        _name_front(axes, canvas, front, [*dominated, *rest])
    figure.savefig(path, format="png", dpi=_DPI)


def _frame(axes: Axes, frontier: Frontier) -> None:
    axes.set_xscale("log")
    axes.set_title(
        frontier.name, loc="left", fontsize=14, fontweight="bold", pad=14, color=_INK, parse_math=False
    )
    axes.set_xlabel(axis_title(frontier.cost_name), labelpad=8, color=_INK, parse_math=False)
    axes.set_ylabel(axis_title(frontier.quality_name), labelpad=8, color=_INK, parse_math=False)
    axes.grid(color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c0ca")
    axes.tick_params(which="both", color="#b8c0ca", labelcolor=_INK, labelsize=9.5)


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


def _legend(
    figure: Figure, styles: Mapping[str, FamilyStyle], sizes: Sequence[float], confirmed: bool
) -> None:
    """Right of the plot: families above, sizes below."""
    keys = [_key(family_label(family), **_marker(style, 1)) for family, style in styles.items()]
    keys.append(Line2D([], [], color=_MUTED, linewidth=1.2, label="Frontier"))
    if confirmed:
        keys.append(_key("Confirmation,\nnot counted", **_star("#7F7F7F")))
    if sizes:
        dot = FamilyStyle(colour=_MUTED, symbol="circle", marker="o", glyph="●")
        keys.append(_key("\n" + SIZE_TITLE.replace(" per", "\nper")))
        keys += [_key(number(size), **_marker(dot, size)) for size in sizes]
    legend = figure.legend(
        handles=keys, loc="outside right upper", frameon=False, fontsize=10, labelspacing=1, labelcolor=_INK
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _key(label: str, **marker: Any) -> Line2D:
    return Line2D([], [], linestyle="none", label=label, **marker)


def _name_front(axes: Axes, canvas: FigureCanvasAgg, front: Sequence[Point], others: Sequence[Point]) -> None:
    """Names the points of the front that have room, the knee first. Positions are pixels of the picture."""
    knee = knee_point(front)
    renderer = canvas.get_renderer()
    line = axes.transData.transform([(point.cost, point.quality) for point in front])
    covered = [_marker_box(axes, point) for point in [*front, *others]]
    for point in sorted(front, key=lambda point: point is not knee):
        name = f"Knee: {point.arm}" if point is knee else point.arm
        font = FontProperties(size=9.5, weight="bold" if point is knee else "normal")
        width, height, _ = renderer.get_text_width_height_descent(name, font, ismath=False)
        marker = _marker_box(axes, point)
        box = free_box(marker, (width, height), covered, _along(line), axes.bbox)
        if box is None:
            continue
        covered.append(box)
        leader = {"arrowstyle": "-", "color": _MUTED, "linewidth": 0.7, "relpos": (1, 0)}
        axes.annotate(
            name,
            (point.cost, point.quality),
            xytext=(box.x0, box.y0),
            textcoords="figure pixels",
            fontproperties=font,
            color=_INK,
            va="bottom",
            arrowprops=leader if box.y0 > marker.y1 + _RISES[0] else None,
            in_layout=False,
            parse_math=False,
        )


def free_box(
    marker: Bbox, extent: tuple[float, float], covered: Sequence[Bbox], line: NDArray[np.float64], frame: Bbox
) -> Bbox | None:
    """Where a label of this (width, height) touches neither a box nor a point of `line` (N, 2), if anywhere.

    Tried above and left of its marker, where a front leaves room, ever higher, then below and right.
    """
    width, height = extent
    above = [(max(marker.x0 - width, frame.x0 + _RISES[0]), marker.y1 + rise) for rise in _RISES]
    below = [(marker.x1, marker.y0 - height - drop) for drop in _RISES]
    for left, bottom in [*above, *below]:
        box = Bbox.from_bounds(left, bottom, width, height)
        inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
        if inside and not box.count_overlaps(covered) and not box.count_contains(line):
            return box
    return None


def _marker_box(axes: Axes, point: Point) -> Bbox:
    x, y = axes.transData.transform((point.cost, point.quality))
    half = marker_px(point.size) / 2 * _DPI / 96
    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def _along(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points (N, 2) of the line through these corners, close enough for no label to slip between them."""
    place = np.linspace(0, len(corners) - 1, 100 * len(corners))
    return np.stack([np.interp(place, np.arange(len(corners)), axis) for axis in corners.T], axis=1)
