"""What one trained model does at other settings: capacity and priority, k, random routers.

Four blocks on digits, experts in blocks 0 and 2, token choice with k=2, trained without priority at capacity
1. Other settings need no training.

Source: Riquelme et al. 2021, "Scaling Vision with Sparse MoE": sections 4.1-4.2, figures 5-6 (capacity),
section 5 and appendix E.4 (k), section 5 and appendix E.1 (random routers).
"""

from collections.abc import Sequence
from statistics import fmean

from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers import TokenChoiceConfig
from moe.vit import ViT
from orchestrator.evaluation.studies.digits import MOE_BLOCKS, accuracy, loss_of, trained_vit
from orchestrator.evaluation.studies.found import Curve, Found, Panel, Say, band, deviation

CAPACITIES = (1.5, 1.0, 0.7, 0.5, 0.3, 0.15, 0.05)
CHOICES = (1, 2, 3, 4, 8)
TRAINED_K, EPOCHS = 2, 20
ACCURACY = "Accuracy on unseen digits"


def choosers(seeds: int, say: Say) -> list[ViT]:
    """One trained model per seed."""
    models = []
    for seed in range(seeds):
        router = TokenChoiceConfig(k=TRAINED_K, capacity_factor=1.0)
        models.append(trained_vit(router, epochs=EPOCHS, seed=seed))
        say(f"model {seed + 1} of {seeds}: accuracy {accuracy(models[-1]):.4f}")
    return models


def capacity(models: Sequence[ViT]) -> Found:
    """V-MoE, figures 5 and 6: batch prioritized routing against the order of the tokens."""

    def accuracies(priority) -> list[list[float]]:
        points = [RoutingOverrides(capacity_factor=c, priority=priority) for c in CAPACITIES]
        return [[accuracy(model, point) for point in points] for model in models]

    vanilla, prioritized = (
        band(label, CAPACITIES, accuracies(priority))
        for label, priority in (("in the order of tokens (vanilla)", "none"), ("by priority (BPR)", "max"))
    )
    gains = [best - plain for best, plain in zip(prioritized.y, vanilla.y, strict=True)]
    return Found(
        title=f"Capacity at inference, trained at 1 without priority ({len(models)} seeds)",
        table={
            "capacity": CAPACITIES,
            "vanilla": vanilla.y,
            "BPR": prioritized.y,
            "BPR - vanilla": gains,
        },
        panels=[
            Panel(
                curves=[prioritized, vanilla],
                x_title="Capacity factor C",
                y_title=ACCURACY,
                log_x=True,
                x_ticks=CAPACITIES[::-1],
            )
        ],
        figures={f"gain/c-{c}": gain for c, gain in zip(CAPACITIES, gains, strict=True)},
    )


def choices(models: Sequence[ViT]) -> Found:
    """V-MoE, appendix E.4: k at inference that is not the k of training."""
    samples = [[accuracy(model, RoutingOverrides(k=k)) for k in CHOICES] for model in models]
    curve = band("accuracy", CHOICES, samples)
    base = curve.y[CHOICES.index(TRAINED_K)]
    return Found(
        title=f"Experts per token at inference, trained with k={TRAINED_K} ({len(models)} seeds)",
        table={
            "k": CHOICES,
            "accuracy": curve.y,
            "lowest": curve.low,
            "highest": curve.high,
            "against the trained k": [y - base for y in curve.y],
        },
        panels=[
            Panel(
                curves=[curve, Curve(label="as trained", x=CHOICES, y=[base] * len(CHOICES), reference=True)],
                x_title="Experts per token k",
                y_title=ACCURACY,
                x_ticks=CHOICES,
            )
        ],
        figures={f"accuracy/k-{k}": y for k, y in zip(CHOICES, curve.y, strict=True)},
    )


def random_router(models: Sequence[ViT]) -> Found:
    """V-MoE, appendix E.1: one layer's router at a time chooses at random."""
    points = {"as trained": AS_TRAINED}
    points |= {f"block {block}": RoutingOverrides(random_blocks=(block,)) for block in MOE_BLOCKS}
    points["all blocks"] = RoutingOverrides(random_blocks=MOE_BLOCKS)
    samples = [[accuracy(model, point) for model in models] for point in points.values()]
    means = [fmean(sample) for sample in samples]
    places = list(range(len(points)))
    return Found(
        title=f"A random router at inference ({len(models)} seeds)",
        table={
            "random": list(points),
            "accuracy": means,
            "deviation": [deviation(sample) for sample in samples],
            "lost": [means[0] - y for y in means],
            "loss": [fmean(loss_of(model, point) for model in models) for point in points.values()],
        },
        panels=[
            Panel(
                curves=[band("mean, and range of seeds", places, list(zip(*samples, strict=True)))],
                x_title="Random router in",
                y_title=ACCURACY,
                x_ticks=places,
                x_names=list(points),
            )
        ],
        figures={
            f"lost/{name.replace(' ', '-')}": means[0] - y for name, y in zip(points, means, strict=True)
        },
        notes=["In so small a model the first layer matters most; V-MoE found the last ones to."],
    )
