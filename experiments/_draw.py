"""How pictures look: colours, figures and axes."""

import io

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

INK, MUTED, GRID, EDGE = "#1d2430", "#5b6675", "#e9ecf0", "#b8c0ca"
BLUE, MARK = "#2B87C8", "#D55E00"
# Okabe and Ito's colours and lighter ones: told apart in the common colour vision deficiencies.
COLOURS = (
    BLUE, "#E69F00", "#009E73", "#CC79A7", MARK, "#56B4E9", "#F0E442", "#7A78D8",
    "#A0643C", "#9AD0A5", "#F4B6C2", "#7F7F7F",
)  # fmt: skip
DPI = 130


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def style_axes(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Titles, a light frame and a grid behind the data. A `$` in a class name is no formula."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, parse_math=False)
    axes.set_xlabel(x, fontsize=9.5, color=MUTED, parse_math=False)
    axes.set_ylabel(y, fontsize=9.5, color=MUTED, parse_math=False)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(EDGE)
    axes.tick_params(which="both", color=EDGE, labelcolor=INK, labelsize=9)


def percent(axis: Axis) -> None:
    """Shows fractions as percentages."""
    axis.set_major_formatter(PercentFormatter(1, decimals=None))


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
