"""Pictures of layers: what they follow, how firm they are, what they matter."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from orchestrator.evaluation.microscope.draw_images import on_grid
from orchestrator.evaluation.microscope.drawing import (
    MARK,
    MUTED,
    SEQUENTIAL,
    Board,
    new_figure,
    plain,
    titled,
)
from orchestrator.evaluation.microscope.survey import Layer, Survey
from orchestrator.evaluation.microscope.tally import BINS, block_order

BAR = "#2B87C8"
_NAMED = 40  # rows or columns up to which each has room for its name
_POSITION_EXPERTS = 16


def draw_overview(survey: Survey, *, chosen: bool) -> Figure:
    """Panels over the blocks; that of discarded patches where experts or tokens choose."""
    layers = survey.layers
    figure = new_figure(11, 2.7)
    panels = figure.subplots(1, 3 + chosen)
    _bars(panels[0], layers, Layer.mutual_information)
    titled(panels[0], "Class and expert share", "MoE block", "mutual information (nats)")
    _bars(panels[1], layers, lambda layer: layer.contribution)
    titled(panels[1], "What experts add", "MoE block", "|moe(x)| / |x|")
    _bars(panels[2], layers, lambda layer: 100 * (survey.acc - layer.acc_random))
    panels[2].axhline(0, color=MUTED, linewidth=0.8)
    titled(panels[2], "Lost if it were random", "MoE block", "accuracy (points)")
    if chosen:
        _bars(panels[3], layers, lambda layer: float(layer.tally.experts_frac()[0]))
        panels[3].yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        titled(panels[3], "Discarded", "MoE block", "of the patches")
    return figure


def draw_classes(survey: Survey, names: tuple[str, ...]) -> Figure:
    """A heat-map per layer; rows and columns in an order of its own."""
    E = survey.layers[0].tally.class_expert.shape[1]
    columns = min(len(survey.layers), 3)
    rows = math.ceil(len(survey.layers) / columns)
    figure = new_figure(columns * min(2 + 0.3 * E, 5.5) + 1, rows * (1.1 + min(0.24 * len(names), 5)) + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(survey.layers) :]:
        axes.set_axis_off()
    for axes, layer in zip(panels, survey.layers, strict=False):
        mean = layer.tally.mean_by_class()
        by_class, by_expert = block_order(mean)
        image = axes.imshow(
            mean[by_class][:, by_expert].numpy(), aspect="auto", cmap=SEQUENTIAL, interpolation="nearest"
        )
        _names(axes.set_yticks, by_class, names)
        _names(axes.set_xticks, by_expert, tuple(map(str, range(E))))
        axes.tick_params(length=0, labelsize=8)
        axes.tick_params(axis="x", labelsize=8 if E <= 20 else 6)
        figure.colorbar(image, ax=axes, shrink=0.85).ax.tick_params(labelsize=8)
        information = layer.mutual_information()
        titled(axes, f"Block {layer.block}: {information:.3f} nats", "expert", "class")
    return figure


def draw_positions(survey: Survey) -> Figure:
    """A row per layer, a map per expert: of many, those that care most for the place."""
    E = survey.layers[0].tally.position_expert.shape[1]
    shown = min(E, _POSITION_EXPERTS)
    board = Board(len(survey.layers), shown, title="Mean routing weight by place", left=0.9, captions=0.22)
    maps = [layer.tally.mean_by_position() for layer in survey.layers]
    most = max(float(mean.max()) for mean in maps)
    for row, (layer, mean) in enumerate(zip(survey.layers, maps, strict=True)):
        board.row_label(row, f"block {layer.block}")
        experts = mean.std(0, correction=0).argsort(descending=True, stable=True)[:shown].sort().values
        for column, expert in enumerate(experts.tolist()):
            board.tile(row, column, on_grid(mean[:, expert]), cmap=SEQUENTIAL, vmin=0, vmax=most)
            board.caption(row, column, f"expert {expert}")
    return board.figure


def draw_histograms(survey: Survey, *, chosen: bool, at_random: Sequence[float] = ()) -> Figure:
    """A column per layer: experts per patch (`chosen`; rings: `at_random`), then weights of the seats."""
    count = len(survey.layers)
    figure = new_figure(max(2.6 * count + 0.6, 5), 4.8 if chosen else 2.6)
    panels = figure.subplots(1 + chosen, count, squeeze=False)
    for column, layer in enumerate(survey.layers):
        if chosen:
            axes, share = panels[0][column], layer.tally.experts_frac().numpy()
            last = max(int(np.flatnonzero(share).max()), 2)
            axes.bar(range(last + 1), share[: last + 1], color=[MARK] + [BAR] * last)
            if len(at_random):
                axes.plot(
                    range(last + 1),
                    at_random[: last + 1],
                    linestyle="none",
                    marker="o",
                    color=MUTED,
                    mfc="none",
                )
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
            axes.set_xticks(range(0, last + 1, math.ceil((last + 1) / 9)))
            plain(axes)
            titled(
                axes, f"Block {layer.block}: none for {share[0]:.1%}", "experts that see a patch", "patches"
            )
        axes, weights = panels[-1][column], layer.tally.weights.numpy()
        last = int(np.flatnonzero(weights).max()) + 1 if weights.any() else BINS
        axes.bar(
            np.arange(last) / BINS, weights[:last] / weights.sum(), width=0.9 / BINS, align="edge", color=BAR
        )
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        plain(axes)
        titled(
            axes, f"Block {layer.block}: mean {layer.tally.mean_weight():.3f}", "weight of an output", "seats"
        )
    return figure


def draw_flips(survey: Survey, *, trained_std: float, over: str) -> Figure:
    """Of the layers with noise; `over`: what sigma is divided by."""
    figure = new_figure(6, 3.4)
    axes = figure.subplots()
    layers = [layer for layer in survey.layers if layer.flips is not None]
    for i, layer in enumerate(layers):
        colour = colormaps[SEQUENTIAL](0.35 + 0.6 * i / max(1, len(layers) - 1))
        axes.plot(survey.sigmas, layer.flips or (), marker="o", color=colour, label=f"block {layer.block}")
    axes.set_xscale("symlog", linthresh=min(s for s in survey.sigmas if s))
    axes.set_xticks(survey.sigmas, [f"{sigma:g}" for sigma in survey.sigmas])
    axes.minorticks_off()
    if trained_std:
        axes.axvline(trained_std, color=MARK, linewidth=1.2, linestyle="--", label="in training")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    plain(axes)
    titled(axes, "Choices that noise changes", f"noise on the logits: standard deviation {over}", "choices")
    return figure


def draw_similarity(survey: Survey) -> Figure:
    """A row per layer: slots' dispatch weights, then their parameters if they have some."""
    layers = [layer for layer in survey.layers if layer.slots is not None]
    columns = 2 if any(layer.parameters is not None for layer in layers) else 1
    figure = new_figure(4 * columns, 3.3 * len(layers))
    panels = figure.subplots(len(layers), columns, squeeze=False)
    for row, layer in zip(panels, layers, strict=True):
        assert layer.slots is not None
        slots_per_expert = len(layer.slots.mean_NN()) // layer.tally.class_expert.shape[1]
        matrices = [("dispatch weights", layer.slots.mean_NN()), ("parameters", layer.parameters)]
        for axes, (what, similarity) in zip(row, matrices, strict=False):
            if similarity is None:
                axes.set_axis_off()
                continue
            lowest = float(similarity.min())
            image = axes.imshow(similarity.numpy(), cmap=SEQUENTIAL, vmin=lowest, vmax=1)
            edges = range(slots_per_expert, len(similarity), slots_per_expert)
            for edge in edges:
                axes.axhline(edge - 0.5, color="white", linewidth=min(0.6, 6 / len(edges)))
                axes.axvline(edge - 0.5, color="white", linewidth=min(0.6, 6 / len(edges)))
            axes.set_xticks([])
            axes.set_yticks([])
            figure.colorbar(image, ax=axes, shrink=0.85).ax.tick_params(labelsize=8)
            titled(axes, f"Block {layer.block}: slots' {what}", "slots by expert (lines)", "")
    return figure


def _bars(axes: Axes, layers: Sequence[Layer], of: Callable[[Layer], float]) -> None:
    axes.bar(range(len(layers)), [of(layer) for layer in layers], color=BAR, width=0.6)
    axes.set_xticks(range(len(layers)), [str(layer.block) for layer in layers])
    axes.set_xlim(-0.7, len(layers) - 0.3)
    plain(axes)


def _names(set_ticks: Callable[..., object], order: Sequence[int], names: tuple[str, ...]) -> None:
    if len(order) <= _NAMED:
        set_ticks(range(len(order)), [names[i] for i in order], parse_math=False)
    else:
        set_ticks([])
