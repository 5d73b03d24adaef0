"""The report: tables of figures, and one HTML page that needs no other file and no network."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import comb, log
from typing import Any

import numpy as np

from experiments._draw import png
from experiments.routing_analysis import draw
from experiments.routing_analysis.collect import BINS, SIGMAS, Counts, extremes, mutual_information
from experiments.routing_analysis.examples import Examples, discards
from moe import ExpertChoiceConfig, SoftConfig, ViTConfig

Table = dict[str, list[Any]]  # columns of equal length by name
Section = tuple[str, str, dict[str, bytes]]  # title, how to read its pictures, PNG files by name
COSINES = ("least", "mean", "largest")

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2430; --muted: #5b6675; --line: #d9dee5; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e6e9ee; --muted: #9aa5b4; --line: #343b46; } }
body { margin: 0 auto; max-width: 1240px; padding: 28px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1, h2 { margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { margin-top: 30px; font-size: 18px; }
p { margin: 0 0 10px; color: var(--muted); max-width: 90ch; }
nav { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 10px 0; font-size: 13.5px; }
a { color: inherit; }
img { display: block; max-width: 100%; margin: 0 0 14px; padding: 8px; box-sizing: border-box;
  background: #ffffff; border: 1px solid var(--line); border-radius: 8px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px; text-align: right; border-bottom: 1px solid var(--line); }
"""


def layer_table(layers: dict[int, Counts]) -> Table:
    """A row per MoE layer with every figure that is one number."""
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
            for cell, cells_so_far in zip(cells, table.values(), strict=True):
                cells_so_far.append(cell)

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
        for one in examples.discarded:
            capacity, priority = one.setting.capacity_factor, one.setting.priority or ""
            add(block, "discarded_frac", one.frac[block], [capacity], [priority])
    return table


def sections(
    layers: dict[int, Counts], examples: Examples, config: ViTConfig, names: Sequence[str]
) -> Iterator[Section]:
    """The sections in the order of the page, drawn one after the other."""
    moe, first = config.moe, next(iter(layers.values()))
    assert moe
    router, images = moe.router, int(first.images)
    chosen, soft = discards(router), isinstance(router, SoftConfig)
    yield (
        "Layer by layer",
        "Class and expert share: how much the class of an image says about the expert of its patches, from"
        f" nothing (0) to all ({log(len(names)):.2f} nats). |moe(x)| / |x| near 0: the model ignores the"
        " experts of that block. Lost: the accuracy lost if random numbers replace the router of that block"
        f" alone; a single image is {1 / images:.2%}.",
        {"overview": png(draw.draw_overview(layer_table(layers), discards=chosen))},
    )
    if examples.discarded:
        left = "pass it by its skip connection alone" if moe.residual else "become zeros"
        yield (
            "Discarded patches",
            f"White patches (outlined) have no seat at any expert of that block and {left}. The capacity"
            " holds in all MoE blocks. First come: tokens queue from the upper left corner on. With priority:"
            " they queue by routing weight. Shares are of all images of the batch.",
            {f"discarded_{b:02d}": png(draw.draw_discarded(examples, b, names)) for b in layers},
        )
    elif not chosen:
        kind = router.kind.replace("_", " ")
        text = f"A {kind} router discards nothing: every expert sees every patch, whatever its capacity."
        yield "Discarded patches", text, {}
    if soft:
        yield (
            "What slots take: dispatch",
            "Each map shows a slot's weights over the patches (a column of D, which sums to 1 over the tokens"
            " that are routed together); white is an even share. Every image has the slots that its patches"
            " get most back from, with the share that they get.",
            {f"dispatch_{b:02d}": png(draw.draw_dispatch(examples, b, names)) for b in layers},
        )
        yield (
            "What patches take: combine",
            "A cell per patch, in its place: the weights of all slots in that patch's output (a row of C,"
            " which sums to 1); dark is the largest. Cells that look alike get the same mixture of slots.",
            {f"combine_{b:02d}": png(draw.draw_combine(examples, b, names)) for b in layers},
        )
    else:
        below = "how many experts see the patch; white: none" if chosen else "how large that weight is"
        yield (
            "Which expert for which patch",
            f"Colours name the expert with the largest weight in the patch's output; below, {below}.",
            {f"experts_{b:02d}": png(draw.draw_experts(examples, b, names, chosen)) for b in layers},
        )
    yield (
        "Experts by class",
        "Mean routing weight of the patches of each class, before anything is dropped; every row sums to 1."
        " Classes and experts are sorted block by block, so that experts of few classes form blocks along the"
        " diagonal.",
        {"classes": png(draw.draw_classes(layers, names))},
    )
    yield (
        "Experts by place",
        "Mean routing weight of the patches at each place of the image; at each place the experts sum to 1."
        " In a flat map the weight does not depend on the place.",
        {"positions": png(draw.draw_positions(layers))},
    )
    rings = multiplicity_at_random(config) if isinstance(router, ExpertChoiceConfig) else ()
    yield (
        "Experts per patch, and their weights",
        ("How many experts see a patch (red: none), and the weight" if chosen else "The weight")
        + " of an expert's output in the sum of a patch that it sees."
        + " Rings: if experts picked patches at random." * bool(rings),
        {"histograms": png(draw.draw_histograms(layers, chosen, rings))},
    )
    if len(first.flips):
        what = "patches whose expert of the largest weight changes" if soft else "choices that change"
        unit = "sigma" if soft else f"sigma / {moe.num_experts}"
        trained_std: float = router.noise_std  # pyright: ignore[reportAttributeAccessIssue]
        yield (
            "How firm the choices are",
            f"Share of the {what} when normal noise of standard deviation {unit} is added to the logits"
            " of that block alone. Training noise changes 15 % of the choices early in V-MoE's training,"
            " later 2-3 %.",
            {"flips": png(draw.draw_flips(layers, trained_std, unit))},
        )
    if len(first.slots_NN):
        yield (
            "How alike slots are",
            "Cosines between two slots: of their weights over the tokens (mean over groups), and of their"
            " parameters (by expert; mind the scale). Dark squares along the diagonal: the slots of an expert"
            " do the same work.",
            {"slots": png(draw.draw_similarity(layers, examples))},
        )


def multiplicity_at_random(config: ViTConfig) -> list[float]:
    """Share of tokens with 0 .. E experts if each took C of a group's tokens at random: binomial, at large E
    near exp(-capacity) for none. Source: Soft MoE, appendix B."""
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
