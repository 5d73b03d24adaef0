"""Losses and hits of images with one label or several, which may be mixed with their neighbours' labels.

Source: the released code of V-MoE and Soft MoE, whose pre-training sums a sigmoid cross-entropy over classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from orchestrator.config import Loss
from orchestrator.data.augment import partners


def image_losses(kind: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each image, (B,), for (B, M) labels, of which -1 stands for none.

    ``softmax`` is the cross-entropy, summed over the labels of an image; ``sigmoid`` is the binary
    cross-entropy, summed over all classes.
    """
    if kind == "softmax" and labels.shape[1] == 1:
        return F.cross_entropy(logits, labels[:, 0], reduction="none")
    num_classes = logits.shape[-1]
    # One more class collects the places without a label and is then cut off.
    places = torch.where(labels < 0, num_classes, labels)
    targets = logits.new_zeros(len(logits), num_classes + 1).scatter(1, places, 1.0)[:, :-1]
    if kind == "softmax":
        return -(targets * logits.log_softmax(-1)).sum(-1)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(-1)


def mixed_losses(kind: Loss, logits: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
    """Returns the losses (B,) of images that `augment.mix` has mixed by (B, 5) draws: an image's and its
    partner's labels are weighted like their pixels. Both losses are affine in the labels.
    """
    own, other = (image_losses(kind, logits, each) for each in (labels, partners(labels)))
    return torch.lerp(other, own, draws[:, 0])


def dominant_labels(labels: Tensor, draws: Tensor) -> Tensor:
    """Returns (B, M): the labels of the one of two mixed images that weighs more."""
    return torch.where(draws[:, :1] < 0.5, partners(labels), labels)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns whether the answer is one of the image's labels, (B,) bool, whose mean is precision@1."""
    return (logits.argmax(-1, keepdim=True) == labels).any(-1)
