"""What all pictures share: figures, colours, and a board of tiles."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from orchestrator.frontier.figure import INK, MUTED

DPI = 130
SEQUENTIAL = "YlGnBu"  # light is little, also in print
MARK = "#D55E00"  # on images and beside the blues
_EXPERTS = (  # Okabe and Ito's, then lighter ones
    "#2B87C8", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#7A78D8",
    "#A0643C", "#9AD0A5", "#F4B6C2", "#7F7F7F",
)  # fmt: skip
_GAP = 0.08  # between tiles, of their side
_HEADER = 0.45  # inches


def new_figure(width: float, height: float) -> Figure:
    """Inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes) -> None:
    """Light frame, grid behind."""
    axes.grid(color="#e9ecf0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c0ca")
    axes.tick_params(color="#b8c0ca", labelcolor=INK, labelsize=9)


def titled(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, parse_math=False)
    axes.set_xlabel(x, fontsize=9.5, color=MUTED, parse_math=False)
    axes.set_ylabel(y, fontsize=9.5, color=MUTED, parse_math=False)


def expert_colours(count: int) -> NDArray[np.float64]:
    """(count, 3); more than the named ones repeat, darker each time."""
    rounds = range(math.ceil(count / len(_EXPERTS)))
    colours = [np.array(to_rgb(colour)) * 0.72**i for i in rounds for colour in _EXPERTS]
    return np.stack(colours[:count])


class Board:
    """Square tiles in rows and columns on one pair of axes, which is much faster than axes for each.

    Row labels stand left of a row, column labels above.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        title: str,
        tile: float = 1.0,
        left: float = 1.7,
        captions: float = _GAP,
        right: float = 0.1,
    ) -> None:
        """`tile`, `left`, `right`: inches of a tile's side and of what stands beside them; `captions`: space
        above each, of its side."""
        self.row_height = 1 + captions
        width, height = columns * (1 + _GAP) * tile + left + right, rows * self.row_height * tile + _HEADER
        self.figure = new_figure(width, height)
        self.axes = self.figure.add_axes(
            (left / width, 0.05 / height, 1 - (left + right) / width, 1 - (0.05 + _HEADER) / height)
        )
        self.figure.set_layout_engine("none")
        self.axes.set_axis_off()
        self.figure.text(
            0.01,
            1 - 0.08 / height,
            title,
            va="top",
            fontsize=11,
            fontweight="bold",
            color=INK,
            parse_math=False,
        )
        self.extent = columns * (1 + _GAP) - _GAP, (rows - 1) * self.row_height + 1

    def tile(self, row: int, column: int, image: NDArray[Any], **look: Any) -> None:
        x, y = self._place(row, column)
        self.axes.imshow(image, extent=(x, x + 1, y + 1, y), interpolation="nearest", **look)
        self.axes.set_xlim(-0.01, self.extent[0] + 0.01)
        self.axes.set_ylim(self.extent[1] + 0.01, 0.99 - self.row_height)

    def outline(self, row: int, column: int, mask: NDArray[np.bool_]) -> None:
        """A line around the regions of a square mask."""
        x, y = self._place(row, column)
        lines = [[(x + a, y + b), (x + c, y + d)] for a, b, c, d in borders(mask)]
        self.axes.add_collection(LineCollection(lines, colors=MARK, linewidths=0.9), autolim=False)

    def row_label(self, row: int, text: str) -> None:
        y = self._place(row, 0)[1]
        self.axes.text(-0.1, y + 0.5, text, ha="right", va="center", fontsize=9, color=INK, parse_math=False)

    def column_label(self, column: int, text: str) -> None:
        x = self._place(0, column)[0]
        self.axes.text(x + 0.5, -0.06, text, ha="center", fontsize=9, color=MUTED, parse_math=False)

    def scale(self, cmap: str, low: float, high: float) -> None:
        """A bar at the right for colours that go by the logarithm."""
        width = self.figure.get_size_inches()[0]
        axes = self.figure.add_axes((1 - 0.75 / width, 0.3, 0.12 / width, 0.4))
        bar = Colorbar(axes, ScalarMappable(cmap=cmap, norm=LogNorm(low, high)))
        ticks = [low, 1, high]
        bar.set_ticks(ticks, labels=[f"{tick:.2g}x" for tick in ticks])
        bar.minorticks_off()
        axes.tick_params(labelsize=8, labelcolor=MUTED)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]

    def caption(self, row: int, column: int, text: str) -> None:
        self.note(row, column, text, at=(0.5, -0.04), va="bottom", fontsize=6)

    def note(
        self, row: int, column: int, text: str, *, at: tuple[float, float] = (0.5, 0.5), **look: Any
    ) -> None:
        """`at`: of the tile, from its upper left corner."""
        x, y = self._place(row, column)
        style = {"ha": "center", "va": "center", "fontsize": 7, "color": INK} | look
        self.axes.text(x + at[0], y + at[1], text, parse_math=False, **style)

    def _place(self, row: int, column: int) -> tuple[float, float]:
        return column * (1 + _GAP), row * self.row_height


def borders(mask: NDArray[np.bool_]) -> list[Sequence[float]]:
    """(x0, y0, x1, y1) of the sides, in 0..1, where the mask changes or ends."""
    side = len(mask)
    padded = np.pad(mask, 1)
    across, down = np.diff(padded[1:-1].astype(int), axis=1), np.diff(padded[:, 1:-1].astype(int), axis=0)
    upright = [(x / side, y / side, x / side, (y + 1) / side) for y, x in np.argwhere(across)]
    level = [(x / side, y / side, (x + 1) / side, y / side) for y, x in np.argwhere(down)]
    return [*upright, *level]
