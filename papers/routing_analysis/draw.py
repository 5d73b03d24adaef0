"""The pictures of a routing analysis: tiles on example images, and charts of layers."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from orchestrator.frontier.drawing import COLOURS, INK, MUTED, new_figure, style_axes
from papers.routing_analysis.collect import BINS, SIGMAS, Counts, Examples, mutual_information, whitened

BLUE, MARK = COLOURS[0], COLOURS[4]
CMAP = "YlGnBu"  # small values are light, also in print
NAMED = 40  # classes or experts up to which an axis has room for their names
POSITION_EXPERTS, TOP_SLOTS, COMBINE_IMAGES, FEW_EXPERTS = 16, 8, 4, 16
MAX_DOUBLINGS = 3.0  # of an even share, the limit of colours
STEP = 1.16  # from tile to tile, in tiles: the rest has room for a caption


class Tile(NamedTuple):
    """A square picture among others."""

    image: np.ndarray  # pixels, or values by patch
    caption: str = ""
    outlined: np.ndarray | None = None  # patches that get a line around their region
    numbers: np.ndarray | None = None  # written on large patches, unless negative
    look: dict[str, Any] | None = None  # further arguments of `imshow`


def draw_tiles(
    title: str, rows: Sequence[tuple[str, Sequence[Tile]]], *, size: float = 1.0, left: float = 1.7
) -> Figure:
    """Square tiles of `size` inches, each row with a label `left` inches wide.

    All share a pair of axes, which is much faster than axes for each tile.
    """
    columns = max(len(tiles) for _, tiles in rows)
    width, height = columns * STEP * size + left, len(rows) * STEP * size + 0.35
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((left / width, 0, 1 - left / width, 1 - 0.35 / height), autoscale_on=False)
    axes.set(xlim=(0, columns * STEP), ylim=(len(rows) * STEP, 0))
    axes.set_axis_off()
    figure.text(0.01, 1 - 0.08 / height, title, va="top", weight="bold", color=INK, parse_math=False)
    text: dict[str, Any] = {"ha": "center", "color": INK, "parse_math": False}
    for row, (label, tiles) in enumerate(rows):
        y = (row + 1) * STEP - 1
        label_style = text | {"ha": "right", "va": "center", "fontsize": 9}
        axes.text(-0.1, y + 0.5, label, **label_style)
        for column, tile in enumerate(tiles):
            x = column * STEP
            axes.imshow(tile.image, extent=(x, x + 1, y + 1, y), interpolation="nearest", **tile.look or {})
            axes.text(x + 0.5, y - 0.04, tile.caption, fontsize=8 if len(tile.caption) < 15 else 6, **text)
            if tile.outlined is not None:
                side, line = len(tile.outlined), {"color": MARK, "linewidth": 0.9}
                padded = np.pad(tile.outlined, 1)
                down, across = np.nonzero(np.diff(padded[1:-1], axis=1))
                axes.vlines(x + across / side, y + down / side, y + (down + 1) / side, **line)
                down, across = np.nonzero(np.diff(padded[:, 1:-1], axis=0))
                axes.hlines(y + down / side, x + across / side, x + (across + 1) / side, **line)
            if tile.numbers is not None and (side := len(tile.numbers)) <= 8:
                for (i, j), number in np.ndenumerate(tile.numbers):
                    at = x + (j + 0.5) / side, y + (i + 0.5) / side
                    axes.text(*at, f"{number}" if number >= 0 else "", va="center", fontsize=6, **text)
    return figure


def image_row(examples: Examples, names: Sequence[str], count: int | None = None) -> tuple[str, list[Tile]]:
    """The example images under the names of their classes."""
    captions = [names[int(label)] for label in examples.label_B]
    tiles = [Tile(pixels(image), name) for image, name in zip(examples.image_B3HW, captions, strict=True)]
    return "image", tiles[:count]


def pixels(image_3HW: Tensor) -> np.ndarray:
    return image_3HW.permute(1, 2, 0).numpy()


def on_grid(patch_P: Tensor) -> np.ndarray:
    """(P,) -> (side, side)."""
    return patch_P.unflatten(0, (math.isqrt(len(patch_P)), -1)).numpy()


def draw_discarded(examples: Examples, block: int, names: Sequence[str]) -> Figure:
    """Rows: capacities, with and without priority. V-MoE, figure 4."""
    rows = [image_row(examples, names)]
    orders = {None: "", "none": "first come\n", "max": "by priority: max\n", "sum": "by priority: sum\n"}
    for discarded in examples.discarded:
        capacity, order = discarded.setting.capacity_factor, orders[discarded.setting.priority]
        patch_BP = discarded.patch_BP[block]
        white = zip(whitened(examples.image_B3HW, patch_BP), patch_BP, strict=True)
        tiles = [Tile(pixels(image), outlined=on_grid(patch_P)) for image, patch_P in white]
        rows.append((f"capacity {capacity:g}\n{order}{discarded.frac[block]:.0%} discarded", tiles))
    return draw_tiles(f"Block {block}: patches that no expert sees, white", rows)


def draw_experts(examples: Examples, block: int, names: Sequence[str], discards: bool) -> Figure:
    """The expert of the largest weight in each patch; then how many see it (`discards`), or the weight."""
    view = examples.views[block]
    E = view.gate_BPE.shape[-1]
    experts = np.arange(E)
    colours = COLOURS[:E] if E in range(len(COLOURS) + 1) else colormaps["turbo"](experts / E)
    rgb = np.array([*map(to_rgb, colours), (1, 1, 1)])  # index -1: discarded
    second = view.experts_BP() if discards else view.weight_BPE.amax(-1)
    look = {"cmap": CMAP, "vmin": 0, "vmax": 1.6 * float(second.max())}  # numbers stay readable
    best, below = [], []
    for best_P, second_P in zip(map(on_grid, view.best_BP()), map(on_grid, second), strict=True):
        best.append(Tile(rgb[best_P], outlined=best_P < 0, numbers=best_P))
        below.append(Tile(second_P, numbers=second_P if discards else None, look=look))
    label = "experts that\nsee the patch" if discards else "its weight"
    rows = [image_row(examples, names), ("expert of the\nlargest weight", best), (label, below)]
    figure = draw_tiles(f"Block {block}: experts of each patch", rows, size=1.25)
    for expert in experts if E <= FEW_EXPERTS else ():
        figure.axes[0].plot([], [], "s", color=rgb[expert], label=str(expert))
    figure.legend(loc="upper right", ncols=E, frameon=False, fontsize=8, handletextpad=0)
    return figure


def draw_dispatch(examples: Examples, block: int, names: Sequence[str]) -> Figure:
    """A row per image: the slots that its patches get most back from. Soft MoE, appendix G."""
    dispatch_BPEC, combine_BPEC = examples.dispatch_BPEC[block], examples.combine_BPEC[block]
    P, C = dispatch_BPEC.shape[1], dispatch_BPEC.shape[3]
    share = dispatch_BPEC * P / dispatch_BPEC.sum(1, keepdim=True).clamp(min=1e-30)
    doublings_BPN = share.clamp(min=2**-MAX_DOUBLINGS).log2().flatten(2)
    limit = min(max(float(doublings_BPN.abs().max()), 0.1), MAX_DOUBLINGS)
    rows = []
    for image, label, doublings_PN, combine_PEC in zip(
        examples.image_B3HW, examples.label_B.tolist(), doublings_BPN, combine_BPEC, strict=True
    ):
        tiles, use_N = [Tile(pixels(image))], combine_PEC.mean(0).flatten()
        for slot in use_N.argsort(descending=True, stable=True)[:TOP_SLOTS].tolist():
            caption = f"expert {slot // C}, slot {slot % C}: {float(use_N[slot]):.1%}"
            look = {"cmap": "PuOr", "vmin": -limit, "vmax": limit}
            tiles.append(Tile(on_grid(doublings_PN[:, slot]), caption, look=look))
        rows.append((names[label], tiles))
    scale = f"orange {2**-limit:.2g}x, white 1x, purple {2**limit:.2g}x"
    return draw_tiles(
        f"Block {block}: weights of slots over patches, beside an even share ({scale})", rows, left=0.8
    )


def draw_combine(examples: Examples, block: int, names: Sequence[str]) -> Figure:
    """Below each image its patches, each a small map of the slots in the order of their experts."""
    combine_BPEC = examples.combine_BPEC[block][:COMBINE_IMAGES]
    look = {"cmap": CMAP, "vmin": float(combine_BPEC.min()), "vmax": float(combine_BPEC.max())}
    tiles = [Tile(mosaic(combine_PEC), look=look) for combine_PEC in combine_BPEC]
    label = "in each patch: slots,\nrow by row by expert"
    rows = [image_row(examples, names, COMBINE_IMAGES), (label, tiles)]
    E, C = combine_BPEC.shape[2:]
    title = f"Block {block}: weights of patches over slots; each cell {E} experts x {C} slots"
    return draw_tiles(title, rows, size=2.9, left=1.9)


def mosaic(map_PEC: Tensor) -> np.ndarray:
    """Each patch's map in its place, and NaN between the maps.

    A row of a map has the slots of an expert, or of several of many experts, so that maps are nearly square.
    """
    P, E, C = map_PEC.shape
    side, experts_per_row = math.isqrt(P), max(1, round((E / C) ** 0.5))
    whole_PEC = F.pad(map_PEC, (0, 0, 0, -E % experts_per_row), value=torch.nan)
    maps = F.pad(whole_PEC.reshape(side, side, -1, experts_per_row * C), (0, 1, 0, 1), value=torch.nan)
    return maps.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:-1, :-1].numpy()


def draw_positions(layers: dict[int, Counts]) -> Figure:
    """A row per layer and a map per expert, at most those that vary most. V-MoE, figure 30."""
    maps = {block: counts.mean_by_position() for block, counts in layers.items()}
    look = {"cmap": CMAP, "vmin": 0, "vmax": max(float(mean_PE.max()) for mean_PE in maps.values())}
    rows = []
    for block, mean_PE in maps.items():
        experts = mean_PE.std(0, correction=0).argsort(descending=True, stable=True)[:POSITION_EXPERTS]
        tiles = [Tile(on_grid(mean_PE[:, e]), f"expert {e}", look=look) for e in sorted(experts.tolist())]
        rows.append((f"block {block}", tiles))
    return draw_tiles("Mean routing weight by place", rows, left=0.9)


def draw_overview(table: dict[str, list[Any]], discards: bool) -> Figure:
    """Columns of the table of layers as bars over the blocks."""
    panels = {
        "mutual_information_nats": ("Class and expert share", "mutual information (nats)"),
        "contribution_ratio": ("What experts add", "|moe(x)| / |x|"),
        "acc_lost": ("Lost by random routing", "accuracy"),
        "discarded_frac": ("Discarded", "patches"),
    }
    figure = new_figure(11, 2.7)
    for axes, (column, titles) in zip(figure.subplots(1, 3 + discards), panels.items(), strict=False):
        axes.bar([str(block) for block in table["block"]], table[column], color=BLUE, width=0.6)
        axes.axhline(0, color=MUTED, linewidth=0.8)
        if column in ("acc_lost", "discarded_frac"):
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        style_axes(axes, titles[0], "MoE block", titles[1])
    return figure


def draw_classes(layers: dict[int, Counts], names: Sequence[str]) -> Figure:
    """A heat map per layer, rows and columns in an order of its own. V-MoE, figure 7."""
    E = next(iter(layers.values())).class_expert.shape[1]
    columns = min(len(layers), 3)
    rows = math.ceil(len(layers) / columns)
    figure = new_figure(columns * min(2 + 0.3 * E, 5.5) + 1, rows * (1.1 + min(0.24 * len(names), 5)) + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (block, counts) in zip(panels, layers.items(), strict=False):
        by_class, by_expert = block_order(counts.mean_by_class())
        title, mean = (
            f"Block {block}: {mutual_information(counts.class_expert):.3f} nats",
            counts.mean_by_class(),
        )
        heat_map(axes, mean[by_class][:, by_expert], title, "expert", "class", aspect="auto")
        ticks = (axes.set_yticks, [names[i] for i in by_class]), (axes.set_xticks, by_expert)
        for set_ticks, labels in ticks:
            if len(labels) <= NAMED:
                set_ticks(range(len(labels)), labels, parse_math=False, fontsize=8 if E <= 20 else 6)
    for axes in panels[len(layers) :]:
        axes.set_axis_off()
    return figure


def block_order(mean: Tensor) -> tuple[list[int], list[int]]:
    """An order of rows and columns in which structure shows as blocks along the diagonal.

    Every row stands beside the column that it favours most, compared with the other rows. Columns are sorted
    by how strongly they are favoured.
    """
    lift = mean / mean.mean(0).clamp(min=1e-30)
    favourite, strength = lift.argmax(1).tolist(), lift.amax(1).tolist()
    order = lift.amax(0).argsort(descending=True, stable=True).tolist()
    columns = sorted(order, key=lambda column: column not in favourite)
    rows = sorted(range(len(mean)), key=lambda row: (columns.index(favourite[row]), -strength[row]))
    return rows, columns


def draw_histograms(layers: dict[int, Counts], discards: bool, at_random: Sequence[float]) -> Figure:
    """A column per layer: experts per patch (`discards`; rings: `at_random`), then weights of the seats."""
    figure = new_figure(max(2.6 * len(layers) + 0.6, 5), 4.8 if discards else 2.6)
    panels = figure.subplots(1 + discards, len(layers), squeeze=False)
    for column, (block, counts) in zip(panels.T, layers.items(), strict=True):
        if discards:
            share = counts.experts_frac().numpy()
            last = max(int(np.flatnonzero(share).max()), 2)
            column[0].bar(range(last + 1), share[: last + 1], color=[MARK] + [BLUE] * last)
            column[0].plot(at_random[: last + 1], "o", color=MUTED, markerfacecolor="none")
            column[0].set_xticks(range(0, last + 1, math.ceil((last + 1) / 9)))
            title = f"Block {block}: none for {share[0]:.1%}"
            style_axes(column[0], title, "experts that see a patch", "patches")
        weights = counts.weights_frac().numpy()
        last = int(np.flatnonzero(weights).max(initial=0)) + 1
        column[-1].bar(np.arange(last) / BINS, weights[:last], width=0.9 / BINS, align="edge", color=BLUE)
        title = f"Block {block}: mean {counts.mean_weight():.3f}"
        style_axes(column[-1], title, "weight of an output", "seats")
    for axes in panels.flat:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    return figure


def draw_flips(layers: dict[int, Counts], trained_std: float, unit: str) -> Figure:
    """Choices that noise changes, by its standard deviation in `unit`."""
    figure = new_figure(6, 3.4)
    axes = figure.subplots()
    for i, (block, counts) in enumerate(layers.items()):
        colour = colormaps[CMAP](0.35 + 0.6 * i / max(1, len(layers) - 1))
        axes.plot(SIGMAS, counts.flips / counts.images, marker="o", color=colour, label=f"block {block}")
    if trained_std:
        axes.axvline(trained_std, color=MARK, linewidth=1.2, linestyle="--", label="in training")
    axes.set_xscale("symlog", linthresh=SIGMAS[1])
    axes.set_xticks(SIGMAS, [f"{sigma:g}" for sigma in SIGMAS])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    style_axes(axes, "Choices that noise changes", f"standard deviation on the logits, {unit}", "choices")
    return figure


def draw_similarity(layers: dict[int, Counts], examples: Examples) -> Figure:
    """A row per layer: cosines of slots' dispatch weights, then of their parameters. Soft MoE, appendix I."""
    columns = 1 + bool(examples.phi_NN)
    figure = new_figure(4 * columns, 3.3 * len(layers))
    panels = figure.subplots(len(layers), columns, squeeze=False)
    for row, (block, counts) in zip(panels, layers.items(), strict=True):
        N, E = len(counts.slots_NN), counts.class_expert.shape[1]
        edges = np.arange(N // E, N, N // E) - 0.5
        phi_NN = examples.phi_NN.get(block)
        matrices = {"dispatch weights": counts.slots_NN / counts.groups, "parameters": phi_NN}
        for axes, (what, cosine_NN) in zip(row, matrices.items(), strict=False):
            heat_map(axes, cosine_NN, f"Block {block}: slots' {what}", "slots by expert (lines)", "", vmax=1)
            for draw in (axes.hlines, axes.vlines):
                draw(edges, -0.5, N - 0.5, color="white", linewidth=min(0.6, 6 / len(edges)))
    return figure


def heat_map(axes: Axes, values: Tensor, title: str, x: str, y: str, **look: Any) -> None:
    image = axes.imshow(values.numpy(), cmap=CMAP, interpolation="nearest", **look)
    style_axes(axes, title, x, y)
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[])
    axes.figure.colorbar(image, ax=axes, shrink=0.85).ax.tick_params(labelsize=8)
