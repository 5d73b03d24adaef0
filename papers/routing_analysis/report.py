"""The report: tables of figures, and an HTML page that needs no other file and no network."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import comb, log
from typing import Any

import numpy as np

from moe import ExpertChoiceConfig, SoftConfig, ViTConfig
from orchestrator.frontier.drawing import png
from papers.routing_analysis import draw
from papers.routing_analysis.collect import (
    BINS,
    SIGMAS,
    Counts,
    Examples,
    discards,
    extremes,
    mutual_information,
)

Table = dict[str, list[Any]]  # columns of equal length by name
Section = tuple[str, str, dict[str, bytes]]  # title, how to read its pictures, PNG files by name
COSINES = ("least", "mean", "largest")

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = (
    files("orchestrator.frontier").joinpath("page.css").read_text(encoding="utf-8")
    + """
nav { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 10px 0; font-size: 13.5px; }
img { display: block; max-width: 100%; margin: 0 0 14px; padding: 8px;
  background: #ffffff; border: 1px solid var(--line); border-radius: 8px; }
p { max-width: 90ch; }
th, td { padding: 5px 12px; text-align: right; }
"""
)


def layer_table(layers: dict[int, Counts]) -> Table:
    """A row per MoE layer, with every figure that is a single number."""
    rows = []
    for block, counts in layers.items():
        images, acc_random = counts.images, float(counts.correct_random / counts.images)
        row = {
            "block": block,
            "mutual_information_nats": mutual_information(counts.class_expert),
            "contribution_ratio": float(counts.contribution / images),
            "discarded_frac": float(counts.experts_frac()[0]),
            "weight_mean": counts.mean_weight(),
            "acc_random": acc_random,
            "acc_lost": float(counts.correct / images) - acc_random,
        }
        if len(counts.flips):
            row["flip_frac_sigma_1"] = float(counts.flips[SIGMAS.index(1.0)] / images)
        if len(counts.slots_NN):
            row["slot_cosine_mean"] = float((counts.cosines / counts.groups)[0, 1])
        rows.append(row)
    return {name: [row[name] for row in rows] for name in rows[0]}


def figure_table(layers: dict[int, Counts], examples: Examples, names: Sequence[str]) -> Table:
    """The figures behind the pictures: a row for each bar of a histogram and each cell of a map."""
    table: Table = {"block": [], "figure": [], "row": [], "column": [], "value": []}

    def add(block: int, figure: str, values: Any, rows: Sequence[Any], columns: Sequence[Any]) -> None:
        for (row, column), value in np.ndenumerate(np.reshape(values, (len(rows), len(columns)))):
            cells = (block, figure, str(rows[row]), str(columns[column]), float(value))
            for column_cells, cell in zip(table.values(), cells, strict=True):
                column_cells.append(cell)

    for block, counts in layers.items():
        P, E = counts.position_expert.shape
        add(block, "mean_weight_by_class", counts.mean_by_class(), names, range(E))
        add(block, "mean_weight_by_position", counts.mean_by_position(), range(P), range(E))
        add(block, "experts_per_patch_frac", counts.experts_frac(), range(E + 1), [""])
        add(block, "weight_from_frac", counts.weights_frac(), [i / BINS for i in range(BINS)], [""])
        if len(counts.flips):
            add(block, "flip_frac", counts.flips / counts.images, SIGMAS, [""])
        if len(counts.slots_NN):
            add(block, "slot_cosine", counts.cosines / counts.groups, ["dispatch", "combine"], COSINES)
        if block in examples.phi_NN:
            add(block, "slot_cosine", extremes(examples.phi_NN[block]), ["parameters"], COSINES)
        for discarded in examples.discarded:
            setting = discarded.setting
            add(
                block,
                "discarded_frac",
                discarded.frac[block],
                [setting.capacity_factor],
                [setting.priority or ""],
            )
    return table


def sections(
    layers: dict[int, Counts], examples: Examples, config: ViTConfig, names: Sequence[str]
) -> Iterator[Section]:
    """Draws and yields the sections in the order of the page."""
    moe, first = config.moe, next(iter(layers.values()))
    assert moe
    router, images = moe.router, int(first.images)
    chosen, soft = discards(router), isinstance(router, SoftConfig)
    yield (
        "Layer by layer",
        "Mutual information: how much the class of an image says about the expert of its patches, from"
        f" nothing (0) to everything ({log(len(names)):.2f} nats). |moe(x)| / |x|: near 0 the model ignores"
        " the experts of the block. Accuracy lost: by random numbers in place of the router of that block"
        f" alone; a single image is {1 / images:.2%}.",
        {"overview": png(draw.draw_overview(layer_table(layers), discards=chosen))},
    )
    if examples.discarded:
        fate = "pass the block by its skip connection alone" if moe.residual else "become zeros"
        yield (
            "Discarded patches",
            f"White patches (outlined) have no seat at any expert of the block and {fate}. The capacity holds"
            " in all MoE blocks. First come: tokens are served from the upper left corner on. By priority:"
            " tokens are served by their routing weight. Shares count all images of the batch.",
            {f"discarded_{b:02d}": png(draw.draw_discarded(examples, b, names)) for b in layers},
        )
    elif not chosen:
        kind = router.kind.replace("_", " ")
        text = f"A {kind} router discards nothing: every expert sees every patch at any capacity."
        yield "Discarded patches", text, {}
    if soft:
        yield (
            "Weights of slots over patches: dispatch",
            "Each map shows a slot's weights over the patches (a column of D, which sums to 1 over the tokens"
            " that are routed together); white is an even share. Each row shows the slots with the largest"
            " share in the output of the image's patches, and that share.",
            {f"dispatch_{b:02d}": png(draw.draw_dispatch(examples, b, names)) for b in layers},
        )
        yield (
            "Weights of patches over slots: combine",
            "A cell for each patch, in its place: the weights of all slots in the patch's output (a row of C,"
            " which sums to 1); dark is large. Cells that look alike get the same mixture of slots.",
            {f"combine_{b:02d}": png(draw.draw_combine(examples, b, names)) for b in layers},
        )
    else:
        below = "the number of experts that see the patch (white: none)" if chosen else "that weight"
        yield (
            "Experts of each patch",
            f"The colour shows the expert with the largest weight in the patch's output; below is {below}.",
            {f"experts_{b:02d}": png(draw.draw_experts(examples, b, names, chosen)) for b in layers},
        )
    yield (
        "Experts by class",
        "Mean routing weight of the patches of each class, before patches are discarded; every row sums to 1."
        " Classes and experts are sorted in each block, so that experts of few classes stand along the"
        " diagonal.",
        {"classes": png(draw.draw_classes(layers, names))},
    )
    yield (
        "Experts by place",
        "Mean routing weight of the patches at each place of the image; the experts sum to 1 at each place."
        " A flat map means that the weight does not depend on the place.",
        {"positions": png(draw.draw_positions(layers))},
    )
    rings = multiplicity_at_random(config) if isinstance(router, ExpertChoiceConfig) else ()
    yield (
        "Experts per patch, and their weights",
        ("The number of experts that see a patch (red: none), and the weight" if chosen else "The weight")
        + " of an expert's output in the sum of a patch that it sees."
        + " Rings: the same if experts picked patches at random." * bool(rings),
        {"histograms": png(draw.draw_histograms(layers, chosen, rings))},
    )
    if len(first.flips):
        what = "patches whose expert of the largest weight changes" if soft else "choices that change"
        unit = "sigma" if soft else f"sigma / {moe.num_experts}"
        trained_std: float = router.noise_std  # pyright: ignore[reportAttributeAccessIssue]
        yield (
            "Stability of choices under noise",
            f"Share of the {what} when normal noise of standard deviation {unit} is added to the logits of"
            " the block alone. In V-MoE, training noise changes 15 % of the choices early in training, and"
            " 2-3 % later.",
            {"flips": png(draw.draw_flips(layers, trained_std, unit))},
        )
    if len(first.slots_NN):
        yield (
            "Similarity of slots",
            "Cosines between two slots: of their weights over the tokens (mean over groups), and of their"
            " parameters, each with its own scale. Dark squares along the diagonal mean that the slots of an"
            " expert do the same work.",
            {"slots": png(draw.draw_similarity(layers, examples))},
        )


def multiplicity_at_random(config: ViTConfig) -> list[float]:
    """The share of tokens with 0 .. E experts if each expert took C of a group's tokens at random.

    The shares are binomial; at large E the share without an expert is near exp(-capacity). Source: Soft MoE,
    appendix B.
    """
    assert config.moe
    E, share = config.moe.num_experts, config.slots() / (config.tokens() * config.moe.images_per_group)
    return [comb(E, n) * share**n * (1 - share) ** (E - n) for n in range(E + 1)]


def page(title: str, facts: str, layers: Table, parts: Sequence[Section]) -> str:
    """The HTML page, readable in light and dark."""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in layers)
    rows = ("".join(f"<td>{cell:.4g}</td>" for cell in row) for row in zip(*layers.values(), strict=True))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(facts)}</p>
<nav>{"".join(f'<a href="#part{i}">{escape(part[0])}</a>' for i, part in enumerate(parts))}</nav>
<div class="wide"><table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>
{"".join(_part(i, *part) for i, part in enumerate(parts))}
</body>
</html>
"""


def _part(index: int, title: str, text: str, pictures: Mapping[str, bytes]) -> str:
    images = "".join(
        f'<img alt="{escape(name)}" src="data:image/png;base64,{b64encode(content).decode()}">\n'
        for name, content in pictures.items()
    )
    return f'<h2 id="part{index}">{escape(title)}</h2>\n<p>{escape(text)}</p>\n{images}'
