"""Few-shot figures of trained models, and the probe: a linear classifier on all frozen features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe.vit import ViT
from orchestrator.config import RunConfig
from orchestrator.data.stream import in_order
from orchestrator.evaluation.images import evaluation_run
from orchestrator.evaluation.trained import Trained
from orchestrator.fewshot import STRENGTHS, best_strength, choose_shots
from orchestrator.recipe import FewShotConfig
from orchestrator.training.fewshot import (
    FewShot,
    FewShotResult,
    all_labels,
    features_of,
    frozen_features,
    short_names,
)


def few_shot(
    trained: Trained, config: FewShotConfig, *, batch_size: int, device: torch.device
) -> FewShotResult:
    """As training reports it, of the weights as they are. Raises UsageError for data that is not there."""
    run = evaluation_run(trained.run, path=trained.run.data.path, batch_size=batch_size)
    return FewShot(run, config).measure(trained.load(device), device)


def short_of_images(run: RunConfig, path: str, shots: Sequence[int]) -> str:
    """Which classes have fewer training images than the most shots, in words; empty if none has."""
    labels = all_labels(in_order(evaluation_run(run, path=path, batch_size=run.data.batch_size), "train"))
    counts = np.bincount(labels)
    few = int(((counts > 0) & (counts < max(shots))).sum())
    if not few:
        return ""
    images = len(choose_shots(labels, shots=max(shots), seed=0))
    return (
        f"{few} of {int((counts > 0).sum())} classes have fewer than {max(shots)} training images, the rarest"
        f" {counts[counts > 0].min()}: all of theirs are used, {images} images in all"
    )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Attributes:
    strength: chosen for all data sets.
    accuracy: by data set.
    """

    strength: float
    accuracy: Mapping[str, float]


def probe(
    model: ViT, run: RunConfig, paths: Sequence[str], *, batch_size: int, device: torch.device
) -> Probe:
    """Ridge on the frozen features of all training images, at the model's own resolution, with the strength
    that few-shot evaluation would choose.
    """
    found = {}
    for name, path in short_names(paths).items():
        here = evaluation_run(run, path=path, batch_size=batch_size)
        train, test = (frozen_features(model, in_order(here, split), device) for split in ("train", "val"))
        found[name] = features_of(train, test).accuracies()
    best = best_strength(np.stack(list(found.values())))
    accuracy = {name: float(accuracies[best]) for name, accuracies in found.items()}
    return Probe(strength=STRENGTHS[best], accuracy=accuracy)
