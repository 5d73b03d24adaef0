"""A trained V-MoE at other settings: capacity and priority, k, random routers.

Four blocks on digits, experts in blocks 0 and 2, token choice with k=2, trained without priority at capacity
1. Other settings need no training.

Source: Riquelme et al. 2021, "Scaling Vision with Sparse MoE": sections 4.1-4.2, figures 5-6 (capacity),
section 5 and appendix E.4 (k), section 5 and appendix E.1 (random routers).
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch.nn.functional as F

from moe import RoutingOverrides, TokenChoiceConfig, ViT
from moe.overrides import AS_TRAINED
from papers.digits import MOE_BLOCKS, TESTED, accuracy, answer, digits, trained_vit
from papers.results import ProgressFn, StudyResult, draw_reference, draw_seeds, finish, panels

CAPACITIES = (1.5, 1.0, 0.7, 0.5, 0.3, 0.15, 0.05)
CHOICES = (1, 2, 3, 4, 8)
TRAINED_K, EPOCHS = 2, 20
ACCURACY = "Accuracy on unseen digits"


@cache
def train_models(seeds: int, progress: ProgressFn) -> list[ViT]:
    """A trained model per seed."""
    models = []
    for seed in range(seeds):
        router = TokenChoiceConfig(k=TRAINED_K, capacity_factor=1.0)
        models.append(trained_vit(router, epochs=EPOCHS, seed=seed))
        progress(f"model {seed + 1} of {seeds}: accuracy {accuracy(models[-1]):.4f}")
    return models


def accuracies(models: Sequence[ViT], settings: Sequence[RoutingOverrides]) -> np.ndarray:
    """(models, settings)."""
    return np.array([[accuracy(model, setting) for setting in settings] for model in models])


def capacity(seeds: int, progress: ProgressFn) -> StudyResult:
    """V-MoE, figures 5 and 6: batch prioritized routing against the order of the tokens."""
    models = train_models(seeds, progress)
    vanilla, bpr = (
        accuracies(models, [RoutingOverrides(capacity_factor=c, priority=order) for c in CAPACITIES])
        for order in ("none", "max")
    )
    gains = (bpr - vanilla).mean(0).tolist()
    title = f"Capacity at inference, trained at 1 without priority ({seeds} seeds)"
    figure, (axes,) = panels(title)
    draw_seeds(axes, CAPACITIES, bpr, label="by priority (BPR)")
    draw_seeds(axes, CAPACITIES, vanilla, label="in the order of tokens (vanilla)")
    axes.set_xscale("log")
    finish(axes, "Capacity factor C", ACCURACY, CAPACITIES)
    means = {"vanilla": vanilla.mean(0).tolist(), "BPR": bpr.mean(0).tolist()}
    return StudyResult(
        title=title,
        table={"capacity": CAPACITIES, **means, "BPR - vanilla": gains},
        figure=figure,
        metrics={f"gain/c-{c}": gain for c, gain in zip(CAPACITIES, gains, strict=True)},
    )


def choices(seeds: int, progress: ProgressFn) -> StudyResult:
    """V-MoE, appendix E.4: another k at inference than in training."""
    models = train_models(seeds, progress)
    found = accuracies(models, [RoutingOverrides(k=k) for k in CHOICES])
    mean = found.mean(0)
    trained = mean[CHOICES.index(TRAINED_K)]
    title = f"Experts per token at inference, trained with k={TRAINED_K} ({seeds} seeds)"
    figure, (axes,) = panels(title)
    draw_seeds(axes, CHOICES, found, label="accuracy")
    draw_reference(axes, CHOICES, [trained] * len(CHOICES), "as trained")
    finish(axes, "Experts per token k", ACCURACY, CHOICES)
    return StudyResult(
        title=title,
        table={
            "k": CHOICES,
            "accuracy": mean.tolist(),
            "lowest": found.min(0).tolist(),
            "highest": found.max(0).tolist(),
            "against the trained k": (mean - trained).tolist(),
        },
        figure=figure,
        metrics={f"accuracy/k-{k}": y for k, y in zip(CHOICES, mean.tolist(), strict=True)},
    )


def random_router(seeds: int, progress: ProgressFn) -> StudyResult:
    """V-MoE, appendix E.1: the router of one layer, or of all, chooses at random."""
    models = train_models(seeds, progress)
    settings = {"as trained": AS_TRAINED}
    settings |= {f"block {block}": RoutingOverrides(random_blocks=(block,)) for block in MOE_BLOCKS}
    settings["all blocks"] = RoutingOverrides(random_blocks=MOE_BLOCKS)
    found = accuracies(models, list(settings.values()))
    mean = found.mean(0)
    lost = (mean[0] - mean).tolist()
    labels = digits().labels[TESTED]
    losses = [
        np.mean([F.cross_entropy(answer(model, setting).logits, labels).item() for model in models]).item()
        for setting in settings.values()
    ]
    title = f"A random router at inference ({seeds} seeds)"
    figure, (axes,) = panels(title)
    error = np.abs(np.stack([found.min(0), found.max(0)]) - mean)
    axes.errorbar(list(settings), mean, error, fmt="o", label="mean, and range of seeds")
    finish(axes, "Random router in", ACCURACY)
    return StudyResult(
        title=title,
        table={
            "random": list(settings),
            "accuracy": mean.tolist(),
            "deviation": found.std(0, ddof=1 if len(models) > 1 else 0).tolist(),
            "lost": lost,
            "loss": losses,
        },
        figure=figure,
        metrics={f"lost/{name.replace(' ', '-')}": x for name, x in zip(settings, lost, strict=True)},
        notes=["In so small a model the first MoE layer matters most; in V-MoE the last layers do."],
    )
