"""The names of the arms on the front, in a picture: where each has room, touching neither marker nor line."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from orchestrator.frontier.points import Point, knee_point
from orchestrator.frontier.published import Published
from orchestrator.frontier.style import INK, MUTED, marker_px

NAMED = 40  # points of a front that are tried: more names would not have room

_RISES = range(2, 90, 22)  # pixels from a marker up or down to its label: the first with room


def name_front(
    canvas: FigureCanvasAgg,
    axes: Axes,
    lines: Sequence[Sequence[Point]],
    others: Sequence[Point],
    papers: Sequence[Published],
) -> None:
    """Names the points of the front, the first of `lines`, that have room, the knee first. In pixels."""
    front, dpi = lines[0], canvas.figure.dpi
    knee = knee_point(front)
    renderer = canvas.get_renderer()
    corners = [axes.transData.transform([(p.cost, p.quality) for p in line]) for line in lines]
    along = np.concatenate([_along(line) for line in corners])
    covered = [_marker_box(axes, dpi, point) for point in [*front, *others]]
    covered += [_box(axes, dpi, paper.cost, (paper.quality,), marker_px(0)) for paper in papers]
    some = front[:: -(-len(front) // NAMED)]
    for point in [knee, *(point for point in some if point is not knee)]:
        name = f"Knee: {point.arm}" if point is knee else point.arm
        font = FontProperties(size=9.5, weight="bold" if point is knee else "normal")
        width, _, _ = renderer.get_text_width_height_descent(name, font, ismath=False)
        # Text stands as high as if it had a descender: `Text._get_layout` measures "lp" too.
        _, height, _ = renderer.get_text_width_height_descent(f"lp{name}", font, ismath=False)
        marker = _marker_box(axes, dpi, point)
        box = free_box(marker, (width, height), covered, along, axes.bbox)
        if box is None:
            continue
        covered.append(box)
        below = box.y1 < marker.y0
        near = box.y0 <= marker.y1 + _RISES[0] if not below else box.y1 >= marker.y0 - _RISES[0]
        leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "relpos": (0, 1) if below else (1, 0)}
        axes.annotate(
            name,
            (point.cost, point.quality),
            xytext=(box.x0 * 72 / dpi, box.y0 * 72 / dpi),
            textcoords="figure points",  # which an SVG, written at another resolution, keeps
            fontproperties=font,
            color=INK,
            va="bottom",
            arrowprops=None if near else leader,
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


def _marker_box(axes: Axes, dpi: float, point: Point) -> Bbox:
    return _box(axes, dpi, point.cost, point.qualities or (point.quality,), marker_px(point.size))


def _box(axes: Axes, dpi: float, cost: float, qualities: Sequence[float], px: float) -> Bbox:
    """Around a mark this wide, and its bar from the lowest to the highest quality."""
    (x, low), (_, high) = axes.transData.transform([(cost, min(qualities)), (cost, max(qualities))])
    half = px / 2 * dpi / 96
    return Bbox.from_extents(x - half, low - half, x + half, high + half)


def _along(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points (N, 2) of the line through these corners, close enough for no label to slip between them."""
    place = np.linspace(0, len(corners) - 1, 100 * len(corners))
    return np.stack([np.interp(place, np.arange(len(corners)), axis) for axis in corners.T], axis=1)
