"""What a linear classifier reaches on the images of a sweep: a scale for the qualities of its models."""

import warnings
from dataclasses import replace

import torch

from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.data.stream import Split, in_order, in_process

NAME = "linear classifier on pixels"
MOST_PRODUCTS = 2e8  # of training values and classes: some seconds
ITERATIONS = 100


def linear_baseline(run: RunConfig) -> dict[str, float]:
    """Returns `NAME` -> accuracy of logistic regression on the pixels that the run's model sees, without
    augmentation; nothing for data sets of more than `MOST_PRODUCTS` training values times classes, or with
    several labels per image, and for other tasks than classification.
    """
    if not run.task.classifies:
        return {}
    manifest = open_manifest(run.data.path)
    values = manifest.rows("train") * 3 * run.model.image_side() ** 2
    if values * len(manifest.classes) > MOST_PRODUCTS or manifest.labels > 1:
        return {}
    (pixels, labels), (val_pixels, val_labels) = (_images(run, split) for split in ("train", "val"))
    import sklearn.linear_model  # which takes a second

    model = sklearn.linear_model.LogisticRegression(max_iter=ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        model.fit(pixels, labels)
    return {NAME: float(model.score(val_pixels, val_labels))}


def _images(run: RunConfig, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pixels (N, values) of a split in 0..1, of grey images once, and the labels (N,)."""
    stream = in_order(replace(run, scale=replace(run.scale, workers=1, ep=1)), split)
    batches = list(in_process(stream, stream.steps()))
    valid = torch.cat([batch.valid for batch in batches]) > 0
    images = torch.cat([batch["image"] for batch in batches])[valid]
    if (images == images[:, :1]).all():
        images = images[:, :1]
    return images.flatten(1) / 255, torch.cat([batch["label"][:, 0] for batch in batches])[valid]
