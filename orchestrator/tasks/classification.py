"""Classification of images with one label or several, which may be mixed with their neighbours' labels.

Source: the released code of V-MoE and Soft MoE, whose pre-training sums a sigmoid cross-entropy over classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.config import Bound, NonNegativeFloat
from moe.model import ModelConfig
from orchestrator.data.batch import Batch, normalize
from orchestrator.data.manifest import class_counts
from orchestrator.errors import UsageError
from orchestrator.tasks.base import Heads, TaskConfig

Loss = Literal["softmax", "sigmoid", "sigmoid_mean"]
TOP = 5


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    """Classification.

    Attributes:
        loss: cross-entropy over the softmax of the classes, or the sum of a binary one for each class
            (``sigmoid``), as the papers pre-train; then let model.head_bias start at -ln(classes) or so. The
            mean over classes (``sigmoid_mean``) is that of DeiT III.
        smoothing: part of a target that all classes share (Szegedy et al. 2016); in training alone.
        binarised: targets of mixed images are 1 for all labels of both, as in DeiT III (Touvron et al. 2022).
        class_weights: factors of a class's part of a softmax loss in training, a number for each class, or
            ``balanced``: inverse to the class's training images, with a mean of 1 over these images.
    """

    kind: Literal["classification"] = "classification"
    loss: Loss = "softmax"
    smoothing: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.0
    binarised: bool = False
    class_weights: Literal["none", "balanced"] | tuple[NonNegativeFloat, ...] = "none"

    qualities: ClassVar = ("val/acc1", "train/acc1")
    classifies: ClassVar = True
    described: ClassVar = {
        "train/loss_class": ("nats", "the part of the training loss from the classes"),
        "train/acc1": ("fraction", "training images of the batch that the model classifies correctly"),
        "val/acc1": ("fraction", "validation images that the model classifies correctly"),
        "val/loss": ("nats", "mean loss over the validation images, without auxiliary losses"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.binarised and (self.smoothing or self.loss == "softmax"):
            wrong = f"smoothing={self.smoothing}" if self.smoothing else "loss='softmax'"
            raise ValueError(f"binarised targets are 0 or 1 for a sigmoid loss, got {wrong}")
        if self.class_weights != "none" and self.loss != "softmax":
            raise ValueError(f"class_weights are of a softmax loss, got loss={self.loss!r}")

    @property
    def output(self) -> Literal["softmax", "sigmoid"]:
        return "softmax" if self.loss == "softmax" else "sigmoid"

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if isinstance(self.class_weights, tuple) and len(self.class_weights) != model.num_outputs():
            raise ValueError(
                f"{len(self.class_weights)} class_weights, but {model.num_outputs()} num_classes"
            )

    def chance(self, model: ModelConfig) -> float:
        return 1 / model.num_outputs()

    def for_data(self, model: ModelConfig, path: str) -> Mapping[str, Any]:
        if self.class_weights != "balanced":
            return {}
        counts = class_counts(path, "train")
        counts = np.pad(counts, (0, max(0, model.num_outputs() - len(counts))))
        if without := np.flatnonzero(counts == 0).tolist():
            raise UsageError(
                f"class_weights='balanced': {len(without)} of {len(counts)} classes, such as number"
                f" {without[0]}, have no training images in {path}: give a number for each class instead"
            )
        return {"task.class_weights": (counts.sum() / (len(counts) * counts)).tolist()}

    def without_data(self, model: ModelConfig) -> Mapping[str, Any]:
        balanced = self.class_weights == "balanced"
        return {"task.class_weights": [1.0] * model.num_outputs()} if balanced else {}

    def inputs(self, batch: Batch) -> Tensor:
        images = normalize(batch["image"])
        return mix_images(images, batch["mix"]) if "mix" in batch.fields else images

    def loss_share(self, heads: Heads, batch: Batch, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        logits, labels, weights = heads["logits"], batch["label"], self._weights(heads["logits"])
        if self.smoothing or self.binarised:
            targets = soft_targets(labels, logits.shape[-1], self.smoothing).to(logits.dtype)
            if "mix" in batch.fields:
                targets = torch.lerp(partners(targets), targets, batch["mix"][:, :1].to(logits.dtype))
                labels = dominant_labels(labels, batch["mix"])
            targets = binarised(targets) if self.binarised else targets
            loss_B = target_losses(self.loss, logits, targets, weights)
        elif "mix" in batch.fields:
            loss_B = mixed_losses(self.loss, logits, labels, batch["mix"], weights)
            labels = dominant_labels(labels, batch["mix"])
        else:
            loss_B = image_losses(self.loss, logits, labels, weights)
        loss = loss_B.sum() / batch_size
        correct = hits(logits.detach(), labels).float().mean() * (len(batch) / batch_size)
        return loss, {"train/loss_class": loss.detach(), "train/acc1": correct}

    def _weights(self, logits: Tensor) -> Tensor | None:
        if isinstance(self.class_weights, str):
            if self.class_weights == "balanced":
                raise UsageError("class_weights='balanced' are known with the training images (`for_data`)")
            return None
        return logits.new_tensor(self.class_weights)

    def scores(self, heads: Heads, batch: Batch) -> dict[str, Tensor]:
        logits, labels = heads["logits"], batch["label"]
        loss, correct = image_losses(self.loss, logits, labels), hits(logits, labels).float()
        sums = torch.stack([correct, loss, torch.ones_like(loss)]) @ batch.valid
        return dict(zip(("correct", "loss", "samples"), sums, strict=True))

    def details(self, heads: Heads, batch: Batch) -> dict[str, Tensor]:
        """Returns ``classes``, (C, 6) float64: images of a class, how many of them have a right best answer
        or one among the best five, how many images of any class have the class as best answer, the sum of
        cross-entropies in nats, and for how many images of any class the class is a right best answer.

        An answer is right if it is one of the image's labels: accuracy is then V-MoE's precision@1, and ReaL
        accuracy on ReaL's labels (Beyer et al. 2020). An image with several labels counts in the row of its
        first label, and its loss is the softmax cross-entropy of that label, whatever the training's loss.

        Raises UsageError if the model has no output for the class of an image.
        """
        logits, labels = heads["logits"], batch["label"]
        num_classes, first = logits.shape[-1], labels[:, 0]
        if (highest := int(labels.max())) >= num_classes:
            raise UsageError(f"class {highest} in the data, but the model has {num_classes} outputs")
        top5 = logits.topk(min(TOP, num_classes), dim=-1).indices
        # The first of equal logits counts, as in the validation during training.
        best = logits.argmax(-1)
        hit = hits(logits, labels)
        hit5 = hit | (top5.unsqueeze(2) == labels.unsqueeze(1)).any((1, 2))
        loss = F.cross_entropy(logits.float(), first, reduction="none")
        zero = torch.zeros_like(loss)
        rows = torch.stack([torch.ones_like(loss), hit, hit5, zero, loss, zero], 1)
        # Float64 holds whole numbers exactly up to 2^53, more than any data set has images.
        counts = logits.new_zeros(num_classes, 6, dtype=torch.float64)
        counts.index_add_(0, first, (rows * batch.valid.unsqueeze(1)).double())
        counts[:, 3].index_add_(0, best, batch.valid.double())
        counts[:, 5].index_add_(0, best, (hit * batch.valid).double())
        return {"classes": counts, "samples": counts[:, 0].sum()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns the fraction of images whose best answer is right, ``acc1``, and the mean ``loss`` in nats;
        from details also ``acc5``, of the best five answers, and ``prec1``, V-MoE's name of ``acc1``.
        """
        if "classes" in sums:
            images, correct, top5, _, loss, _ = sums["classes"].sum(0).cpu()
            found = {"acc1": correct, "acc5": top5, "prec1": correct, "loss": loss}
        else:
            images, found = sums["samples"], {"acc1": sums["correct"], "loss": sums["loss"]}
        return {name: float(total / images) for name, total in found.items()}

    def table(self, sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns a row for each named class: its images and means over them, None over no images.

        ``precision`` is the fraction of right answers among the answers that name the class.
        """
        images, correct, top5, answers, loss, right = sums["classes"][: len(names)].cpu().T
        found: dict[str, list[Any]] = {"class": list(names), "images": images.long().tolist()}
        totals = {"acc1": correct, "acc5": top5, "precision": right, "loss": loss}
        for name, total in totals.items():
            mean = total / (answers if name == "precision" else images)
            found[name] = [value if math.isfinite(value) else None for value in mean.tolist()]
        return found


def image_losses(kind: Loss, logits: Tensor, labels: Tensor, weights_C: Tensor | None = None) -> Tensor:
    """Returns the loss of each image, (B,), for (B, M) labels, of which -1 stands for none.

    ``softmax`` is the cross-entropy, summed over the labels of an image, each times the weight of its class;
    ``sigmoid`` is the binary cross-entropy, summed over all classes, and ``sigmoid_mean`` its mean.
    """
    if kind == "softmax" and labels.shape[1] == 1:
        return F.cross_entropy(logits, labels[:, 0], weights_C, reduction="none")
    targets = soft_targets(labels, logits.shape[-1]).to(logits.dtype)
    return target_losses(kind, logits, targets, weights_C)


def soft_targets(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """Returns the targets of (B, M) labels, (B, C): y (1 - s) + s / C, where y is 1 at the labels."""
    # One more class collects the places without a label and is then cut off.
    places = torch.where(labels < 0, num_classes, labels)
    zeros = torch.zeros(len(labels), num_classes + 1, device=labels.device)
    return zeros.scatter(1, places, 1.0)[:, :-1] * (1 - smoothing) + smoothing / num_classes


def binarised(targets: Tensor, threshold: float = 0.0) -> Tensor:
    """Returns 1 where a target is greater than the threshold, else 0."""
    return (targets > threshold).to(targets.dtype)


def target_losses(kind: Loss, logits: Tensor, targets: Tensor, weights_C: Tensor | None = None) -> Tensor:
    """Returns the loss of each image, (B,), for (B, C) targets, which a softmax weighs."""
    if kind == "softmax":
        weighed = targets if weights_C is None else targets * weights_C
        return -(weighed * logits.log_softmax(-1)).sum(-1)
    each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return each.sum(-1) if kind == "sigmoid" else each.mean(-1)


def mixed_losses(
    kind: Loss, logits: Tensor, labels: Tensor, draws: Tensor, weights_C: Tensor | None = None
) -> Tensor:
    """Returns the losses (B,) of images that `mix_images` has mixed by (B, 5) draws: an image's and its
    partner's labels are weighted like their pixels. Both losses are affine in the labels.
    """
    own, other = (image_losses(kind, logits, each, weights_C) for each in (labels, partners(labels)))
    return torch.lerp(other, own, draws[:, 0])


def dominant_labels(labels: Tensor, draws: Tensor) -> Tensor:
    """Returns (B, M): the labels of the one of two mixed images that weighs more."""
    return torch.where(draws[:, :1] < 0.5, partners(labels), labels)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns whether the answer is one of the image's labels, (B,) bool, whose mean is precision@1."""
    return (logits.argmax(-1, keepdim=True) == labels).any(-1)


def mix_images(images: Tensor, draws: Tensor) -> Tensor:
    """Mixes (B, 3, S, S) float32 images by (B, 5) draws of `augment.base.draw` -> (B, 3, S, S)."""
    weight, top, left, bottom, right = draws[..., None, None].unbind(1)  # (B, 1, 1) each
    position = torch.arange(images.shape[-1], device=images.device)
    rows = (position >= top) & (position < bottom)  # (B, 1, S)
    columns = (position >= left) & (position < right)
    inside = rows.transpose(1, 2) & columns  # (B, S, S)
    own = torch.where(bottom > top, (~inside).float(), weight)
    return torch.lerp(partners(images), images, own[:, None])


def partners(batch: Tensor) -> Tensor:
    """Returns (B, ..): for each entry of the batch the entry that it is mixed with."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
