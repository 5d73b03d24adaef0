"""Pictures on images: what is discarded, where patches go, what slots take and patches get back."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.evaluation.microscope.discarded import whitened
from orchestrator.evaluation.microscope.drawing import INK, SEQUENTIAL, Board, expert_colours
from orchestrator.evaluation.microscope.examples import Examples

_TOP_SLOTS = 8
_MOST_DOUBLINGS = 3.0  # of an even share, beyond which colours stay
_COMBINE_IMAGES = 4
_NUMBERED_GRID = 8  # patches per side up to which each has room for a number
_NAMED_EXPERTS = 16


def draw_discarded(examples: Examples, block: int, names: tuple[str, ...]) -> Figure:
    """Rows: capacities, with and without priority."""
    board = Board(
        len(examples.discarded) + 1,
        len(examples.label_B),
        title=f"Block {block}: patches that no expert sees, white",
    )
    _images(board, examples, names)
    for row, one in enumerate(examples.discarded, start=1):
        order = {None: "", "none": "first come", "max": "by priority: max", "sum": "by priority: sum"}[
            one.priority
        ]
        share = examples.discarded_frac[row - 1][block]
        lines = [f"capacity {one.capacity:g}", order, f"{share:.0%} discarded"]
        board.row_label(row, "\n".join(filter(None, lines)))
        patch_BP = one.patch_BP[block]
        for column, image in enumerate(whitened(examples.image_B3HW, patch_BP)):
            board.tile(row, column, _pixels(image))
            board.outline(row, column, on_grid(patch_BP[column]))
    return board.figure


def draw_experts(examples: Examples, block: int, names: tuple[str, ...], *, chosen: bool) -> Figure:
    """Which expert has most say in each patch; then how many see it (`chosen`) or how much say that is."""
    view = examples.views[block]
    E = view.gate_BPE.shape[-1]
    board = Board(3, len(examples.label_B), tile=1.25, title=f"Block {block}: who works on which patch")
    _images(board, examples, names)
    board.row_label(1, "expert of the\nlargest weight")
    board.row_label(2, "experts that\nsee the patch" if chosen else "its weight")
    colours = np.vstack([expert_colours(E), [1, 1, 1]])  # the last, index -1: nobody
    second = view.experts_BP() if chosen else view.weight_BPE.amax(-1)
    numbered = view.best_BP().shape[1] <= _NUMBERED_GRID**2
    darkest = max(float(second.max()), 1e-9) * (1.6 if chosen and numbered else 1)  # or numbers drown
    for column, best_P in enumerate(view.best_BP()):
        best = on_grid(best_P)
        board.tile(1, column, colours[best])
        board.outline(1, column, best < 0)
        board.tile(2, column, on_grid(second[column]), cmap=SEQUENTIAL, vmin=0, vmax=darkest)
        if numbered:
            _numbers(board, 1, column, best)
            if chosen:
                _numbers(board, 2, column, on_grid(second[column]))
    if E <= _NAMED_EXPERTS:
        board.figure.legend(
            handles=[_square(colours[e], f"{e}") for e in range(E)],
            loc="upper right",
            ncols=E,
            frameon=False,
            fontsize=8,
            labelcolor=INK,
            handletextpad=0.1,
            columnspacing=0.8,
        )
    return board.figure


def draw_dispatch(examples: Examples, block: int, names: tuple[str, ...]) -> Figure:
    """A row per image: the slots that its patches get most back from."""
    maps = examples.slots[block]
    _, _, E, C = maps.dispatch_BPEC.shape
    shown = min(_TOP_SLOTS, E * C)
    board = Board(
        len(examples.label_B),
        shown + 1,
        title=f"Block {block}: what slots take of the patches, compared with an even share",
        left=0.8,
        right=0.9,
        captions=0.2,
    )
    even = maps.dispatch_BPEC.sum(1, keepdim=True) / maps.dispatch_BPEC.shape[1]
    doublings = (maps.dispatch_BPEC / even.clamp(min=1e-30)).clamp(min=2**-_MOST_DOUBLINGS).log2()
    limit = min(max(float(doublings.abs().max()), 0.1), _MOST_DOUBLINGS)
    for row, image in enumerate(examples.image_B3HW):
        board.row_label(row, names[int(examples.label_B[row])])
        board.tile(row, 0, _pixels(image))
        use_N = maps.combine_BPEC[row].mean(0).flatten()
        for column, slot in enumerate(use_N.argsort(descending=True, stable=True)[:shown].tolist(), start=1):
            map_P = doublings[row].flatten(1)[:, slot]
            board.tile(row, column, on_grid(map_P), cmap="PuOr", vmin=-limit, vmax=limit)
            board.caption(row, column, f"expert {slot // C}, slot {slot % C}: {float(use_N[slot]):.1%}")
    board.scale("PuOr", 2**-limit, 2**limit)
    return board.figure


def draw_combine(examples: Examples, block: int, names: tuple[str, ...]) -> Figure:
    """Below every image its grid of patches, each a small map of the slots: E rows of C; of many experts a
    square."""
    maps = examples.slots[block]
    _, _, E, C = maps.combine_BPEC.shape
    by_expert = E <= _NAMED_EXPERTS
    shown = min(_COMBINE_IMAGES, len(examples.label_B))
    board = Board(
        2,
        shown,
        tile=2.9,
        title=f"Block {block}: what patches take of the slots (combine); each cell {E} experts x {C} slots",
        left=1.9,
    )
    _images(board, examples, names, shown)
    cell = "rows: experts,\ncolumns: their slots" if by_expert else "row by row: slots,\nby their experts"
    board.row_label(1, f"in each patch\n{cell}")
    least, most = float(maps.combine_BPEC.min()), float(maps.combine_BPEC.max())
    for column, combine_PEC in enumerate(maps.combine_BPEC[:shown]):
        cells = combine_PEC if by_expert else squared(combine_PEC.flatten(1))
        board.tile(1, column, mosaic(cells), cmap=SEQUENTIAL, vmin=least, vmax=most)
    return board.figure


def mosaic(map_PEC: Tensor) -> NDArray[np.float64]:
    """Maps side by side on the patch grid, NaN between them."""
    grid = math.isqrt(len(map_PEC))
    tiles = np.pad(map_PEC.double().numpy(), ((0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    rows, columns = tiles.shape[1:]
    whole = tiles.reshape(grid, grid, rows, columns).transpose(0, 2, 1, 3)
    return whole.reshape(grid * rows, grid * columns)[:-1, :-1]


def squared(map_PN: Tensor) -> Tensor:
    """(P, N) -> (P, side, side), row by row, NaN where nothing is left."""
    side = math.ceil(map_PN.shape[1] ** 0.5)
    return F.pad(map_PN, (0, side * side - map_PN.shape[1]), value=torch.nan).unflatten(1, (side, side))


def on_grid(patch_P: Tensor) -> NDArray[Any]:
    """(P,) -> (side, side)."""
    side = math.isqrt(len(patch_P))
    return patch_P.view(side, side).numpy()


def _images(board: Board, examples: Examples, names: tuple[str, ...], count: int | None = None) -> None:
    board.row_label(0, "image")
    for column, image in enumerate(examples.image_B3HW[:count]):
        board.column_label(column, names[int(examples.label_B[column])])
        board.tile(0, column, _pixels(image))


def _pixels(image_3HW: Tensor) -> NDArray[np.uint8]:
    return image_3HW.permute(1, 2, 0).numpy()


def _numbers(board: Board, row: int, column: int, numbers: NDArray[Any]) -> None:
    side = len(numbers)
    for (y, x), number in np.ndenumerate(numbers):
        if number >= 0:
            at = ((x + 0.5) / side, (y + 0.5) / side)
            board.note(row, column, f"{number}", at=at, fontsize=6)


def _square(colour: NDArray[np.float64], label: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker="s", markersize=7, color=tuple(colour), label=label)
