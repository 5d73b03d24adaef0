"""What the page says: every picture with how to read it, and what a router has no picture of."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb, log

from matplotlib.figure import Figure

from moe.layer import MoEConfig
from moe.routers import ExpertChoiceConfig, SoftConfig
from moe.vit import ViTConfig
from orchestrator.evaluation.microscope.discarded import drops
from orchestrator.evaluation.microscope.draw_images import (
    draw_combine,
    draw_discarded,
    draw_dispatch,
    draw_experts,
)
from orchestrator.evaluation.microscope.draw_layers import (
    draw_classes,
    draw_flips,
    draw_histograms,
    draw_overview,
    draw_positions,
    draw_similarity,
)
from orchestrator.evaluation.microscope.examples import Examples
from orchestrator.evaluation.microscope.survey import Survey
from orchestrator.evaluation.microscope.tables import similarities


@dataclass(frozen=True, kw_only=True)
class Section:
    """Attributes:
    text: how to read the pictures, or why there is none.
    pictures: by file name without its suffix.
    """

    title: str
    text: str
    pictures: dict[str, Figure]


def sections(
    survey: Survey, examples: Examples, config: ViTConfig, names: tuple[str, ...]
) -> Iterator[Section]:
    """In the order of the page; drawn one after the other."""
    moe = config.moe
    assert moe
    yield Section(
        title="Layer by layer",
        text="What class and expert share says how much the class of an image tells about the expert of its"
        f" patches: 0 is nothing, {log(len(names)):.2f} nats all. |moe(x)| / |x| near 0: the model ignores"
        " the experts of that block. Lost: if the router of that block alone is replaced by random numbers;"
        f" one image is {100 / survey.images:.2g} points.",
        pictures={"overview": draw_overview(survey, chosen=drops(moe.router))},
    )
    yield _discarded(examples, moe, names)
    yield from _on_images(examples, moe, names)
    yield Section(
        title="Experts by class",
        text="Mean routing weight of the patches of each class, before anything is dropped; every row sums to"
        " 1. Classes and experts are sorted for each block alone, so that experts of few classes form blocks"
        " along the diagonal.",
        pictures={"classes": draw_classes(survey, names)},
    )
    yield Section(
        title="Experts by place",
        text="Mean routing weight of the patches at each place of the image; at any place the experts sum to"
        " 1. Flat maps: the expert does not care for the place.",
        pictures={"positions": draw_positions(survey)},
    )
    yield _histograms(survey, config)
    yield _noise(survey, moe)
    if survey.layers[0].slots is not None:
        yield _similarity(survey)


def _discarded(examples: Examples, moe: MoEConfig, names: tuple[str, ...]) -> Section:
    title = "Discarded patches"
    if not drops(moe.router):
        why = f"A {_kind(moe)} router discards nothing: every expert sees every patch, whatever its capacity."
        return Section(title=title, text=why, pictures={})
    if not examples.discarded:
        return Section(title=title, text="No other capacity was asked for.", pictures={})
    left = "pass it by its skip connection alone" if moe.residual else "leave it as zeros"
    text = (
        f"White patches (outlined) have no seat at any expert in that block and {left}. The capacity holds in"
        " all MoE blocks. "
    )
    if isinstance(moe.router, ExpertChoiceConfig):
        text += "Experts choose, so nobody queues and there is no priority."
    else:
        text += "First come: tokens queue from the upper left corner on. With priority, by routing weight."
    blocks = examples.views
    return Section(
        title=title,
        text=text + " Shares are those of all images of the batch.",
        pictures={f"discarded_{b:02d}": draw_discarded(examples, b, names) for b in blocks},
    )


def _on_images(examples: Examples, moe: MoEConfig, names: tuple[str, ...]) -> Iterator[Section]:
    if examples.slots:
        yield Section(
            title="What slots take: dispatch",
            text="Each map is one slot's weights over the patches, a column of D, which sums to 1 over the"
            " tokens that are routed together; white is an even share. For every image the slots that its"
            " patches get most back from, with the share that they get.",
            pictures={f"dispatch_{b:02d}": draw_dispatch(examples, b, names) for b in examples.slots},
        )
        yield Section(
            title="What patches take: combine",
            text="One cell per patch, in its place: the weights of all slots in that patch's output, a row of"
            " C, which sums to 1; dark is the largest. Cells that look alike get the same mixture of slots.",
            pictures={f"combine_{b:02d}": draw_combine(examples, b, names) for b in examples.slots},
        )
        return
    chosen = drops(moe.router)
    yield Section(
        title="Which expert for which patch",
        text="Colour (and number, where it fits) name the expert with the largest weight in the patch's"
        " output; below, "
        + ("how many experts see the patch. White: nobody." if chosen else "how large that weight is."),
        pictures={
            f"experts_{b:02d}": draw_experts(examples, b, names, chosen=chosen) for b in examples.views
        },
    )


def _histograms(survey: Survey, config: ViTConfig) -> Section:
    moe = config.moe
    assert moe
    chosen = drops(moe.router)
    at_random = multiplicity_at_random(config) if isinstance(moe.router, ExpertChoiceConfig) else ()
    text = "What the output of an expert weighs in the sum of a patch that it sees."
    if chosen:
        text = "How many experts see a patch (red: none), and what the output of each weighs in its sum."
    else:
        text += " Every expert sees every patch."
    if at_random:
        text += " Rings: if experts picked at random."
    figure = draw_histograms(survey, chosen=chosen, at_random=at_random)
    return Section(title="Experts per patch, and their weights", text=text, pictures={"histograms": figure})


def multiplicity_at_random(config: ViTConfig) -> list[float]:
    """Share of tokens with 0 .. E experts if each took C of a group's tokens at random: binomial, at large E
    near exp(-capacity) for none. Source: Soft MoE, appendix B."""
    assert config.moe
    E, share = config.moe.num_experts, config.slots() / (config.tokens() * config.moe.images_per_group)
    return [comb(E, n) * share**n * (1 - share) ** (E - n) for n in range(E + 1)]


def _noise(survey: Survey, moe: MoEConfig) -> Section:
    title = "How firm the choices are"
    if survey.layers[0].flips is None:
        why = f"A {_kind(moe)} router knows no noise and makes no choices that noise could change."
        return Section(title=title, text=why, pictures={})
    soft = isinstance(moe.router, SoftConfig)
    what = (
        "patches whose expert of the largest weight changes"
        if soft
        else "choices (whatever the capacity; of class tokens, too) that change"
    )
    text = (
        f"Share of the {what} when normal noise is added to the logits of that block alone"
        f" ({'sigma' if soft else 'sigma / number of experts, as in V-MoE'}). Training noise changes 15 % of"
        " the choices early in V-MoE's training, 2-3 % later."
    )
    figure = draw_flips(
        survey,
        trained_std=moe.router.noise_std,  # pyright: ignore[reportAttributeAccessIssue]
        over="sigma" if soft else f"sigma / {moe.num_experts}",
    )
    return Section(title=title, text=text, pictures={"flips": figure})


def _similarity(survey: Survey) -> Section:
    lines = [
        f"block {layer.block} {what}: {one.least:.3f} / {one.mean:.3f} / {one.most:.3f}"
        for layer in survey.layers
        for what, one in similarities(layer).items()
    ]
    text = (
        "Cosines between two slots: of their weights over the tokens (mean over groups), and of their"
        " parameters (by expert; mind the scale). Dark squares along the diagonal: the slots of an expert do"
        " the same work. Least / mean / largest of different slots (combine: of different tokens):"
        f" {'; '.join(lines)}."
    )
    return Section(title="How alike slots are", text=text, pictures={"slots": draw_similarity(survey)})


def _kind(moe: MoEConfig) -> str:
    return moe.router.kind.replace("_", " ")
