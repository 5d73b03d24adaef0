"""The picture of a study: its panels, side by side or two by two."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from orchestrator.evaluation.studies.found import Curve, Found, Panel
from orchestrator.frontier.figure import INK, MUTED

# told apart in the common colour vision deficiencies, as those of the frontier
COLOURS = ("#D55E00", "#2B87C8", "#009E73", "#CC79A7", "#7A78D8", "#9A7D0A")
GRID, EDGE = "#e9ecf0", "#b8c0ca"
PANEL_INCHES, ALONE_INCHES, DPI = (5.2, 4.0), (8.0, 4.6), 150


def draw(found: Found, path: Path) -> None:
    """PNG or SVG, by the suffix."""
    columns = min(len(found.panels), 3) if len(found.panels) != 4 else 2
    rows = math.ceil(len(found.panels) / columns)
    width, height = PANEL_INCHES if len(found.panels) > 1 else ALONE_INCHES
    figure = Figure(
        figsize=(columns * width, rows * height + 0.5),
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1),
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel, place in zip(found.panels, axes.flat, strict=True):
        _draw_panel(place, panel)
    figure.suptitle(found.title, x=0.015, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.savefig(path, dpi=DPI)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    colours = iter(COLOURS)
    for curve in panel.curves:
        colour = MUTED if curve.reference else next(colours)
        (_draw_marks if panel.x_names else _draw_curve)(axes, curve, colour)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    if panel.x_ticks:
        axes.set_xticks(panel.x_ticks, panel.x_names or [f"{tick:g}" for tick in panel.x_ticks])
        axes.minorticks_off()
    if panel.y_range:
        axes.set_ylim(panel.y_range)
    if panel.title:
        axes.set_title(panel.title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(panel.x_title, color=INK)
    axes.set_ylabel(panel.y_title, color=INK)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(EDGE)
    axes.tick_params(which="both", color=EDGE, labelcolor=INK, labelsize=9.5)
    axes.legend(frameon=False, fontsize=9.5, labelcolor=INK)


def _draw_marks(axes: Axes, curve: Curve, colour: str) -> None:
    """Of settings without an order: no line from one to the next."""
    axes.vlines(curve.x, curve.low, curve.high, color=colour, linewidth=1.2)
    axes.plot(curve.x, curve.y, color=colour, label=curve.label, linestyle="none", marker="o", markersize=6)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    if curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    look = {"linestyle": "--", "linewidth": 1.2} if curve.reference else {"marker": "o", "markersize": 4.5}
    axes.plot(curve.x, curve.y, color=colour, label=curve.label, **look)
