"""How good predictions are: over all images, and class by class."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.operating import forward_at
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.vit import ViT
from orchestrator.data.batch import Batch
from orchestrator.data.images import normalize
from orchestrator.errors import UsageError

TOP = 5


@dataclass(frozen=True, kw_only=True)
class OfClass:
    """Attributes:
    images: that have the class.
    hits, hits5: those for which it is the best, or among the best five, answers.
    answers: images, of whatever class, for which it is the best answer.
    loss_sum: cross-entropy in nats, summed over its images.
    """

    images: int
    hits: int
    hits5: int
    answers: int
    loss_sum: float

    def recall(self) -> float:
        """Of its images the part that is recognised: the class's accuracy@1. NaN without images."""
        return self.hits / self.images if self.images else math.nan

    def precision(self) -> float:
        """Of the images that are taken for it the part that is. NaN where none is."""
        return self.hits / self.answers if self.answers else math.nan


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Attributes:
    classes: by label.
    unread: images that could not be decoded, and count nowhere.
    """

    classes: tuple[OfClass, ...]
    unread: int

    def images(self) -> int:
        return sum(one.images for one in self.classes)

    def metrics(self) -> dict[str, float]:
        """``acc1``, ``acc5``: images whose class is the best answer, or among the best five; ``prec1``: those
        whose best answer is one of their labels (V-MoE's precision@1): acc1, as each has one; ``loss``: nats.
        """
        acc1, acc5, loss = (
            sum(getattr(one, name) for one in self.classes) / self.images()
            for name in ("hits", "hits5", "loss_sum")
        )
        return {"acc1": acc1, "acc5": acc5, "prec1": acc1, "loss": loss}


class Tally:
    """Counts by class while images come in, on the device."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        # whole numbers are exact in float64, far beyond those of any data set
        self.counts = torch.zeros(num_classes, 5, dtype=torch.float64, device=device)
        self.unread = 0

    def add(self, logits: Tensor, label: Tensor, valid: Tensor) -> None:
        """Logits (B, classes); images with `valid` 0 do not count."""
        answers = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices
        best = logits.argmax(-1)  # the first of equals, as training's validation counts
        hit = best == label
        hit5 = hit | (answers == label.unsqueeze(-1)).any(-1)
        loss = F.cross_entropy(logits.float(), label, reduction="none")
        rows = torch.stack([torch.ones_like(loss), hit, hit5, torch.zeros_like(loss), loss], 1)
        self.counts.index_add_(0, label, (rows * valid.unsqueeze(1)).double())
        self.counts[:, 3].index_add_(0, best, valid.double())

    def scores(self) -> Scores:
        """Raises UsageError if no image could be read."""
        classes = tuple(
            OfClass(images=int(n), hits=int(hits), hits5=int(hits5), answers=int(answers), loss_sum=loss)
            for n, hits, hits5, answers, loss in self.counts.tolist()
        )
        if not any(one.images for one in classes):
            raise UsageError("no image of the split can be decoded")
        return Scores(classes=classes, unread=self.unread)


def evaluate_at(
    model: ViT, batches: Iterable[Batch], points: Sequence[RoutingOverrides] = (AS_TRAINED,)
) -> list[Scores]:
    """Of each operating point, in one pass over the images: what points share is computed once.

    Raises:
        UsageError: if an image has a class that the model has no output for, the model no such routing, or no
            image can be read.
    """
    tallies: list[Tally] = []
    for batch in batches:
        num_classes = model.config.num_classes
        tallies = tallies or [Tally(num_classes, batch.label.device) for _ in points]
        if (highest := int(batch.label.max())) >= num_classes:
            raise UsageError(f"class {highest} in the data, but the model has {num_classes} outputs")
        for tally, logits in zip(tallies, answers_at(model, batch, points), strict=True):
            tally.add(logits, batch.label, batch.valid)
            tally.unread += len(batch.bad)
    return [tally.scores() for tally in tallies]


def answers_at(model: ViT, batch: Batch, points: Sequence[RoutingOverrides]) -> list[Tensor]:
    """Logits of each point. Raises UsageError if the model has no such routing."""
    try:
        return forward_at(model, normalize(batch.image), batch.valid, points)
    except ValueError as error:
        raise UsageError(str(error)) from None
