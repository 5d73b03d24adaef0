"""The scores of a model at one or many operating points, in one pass over the images."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe.model import Model
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.parallel import first_row, sum_over_ranks
from orchestrator.data.batch import Batch
from orchestrator.errors import UsageError
from orchestrator.tasks import TaskConfig
from orchestrator.tasks.base import Heads, not_finite


class Scores:
    """A task's scores in detail, summed while images come in, on the device.

    Attributes:
        sums: as `TaskConfig.details` returns them; empty before the first batch.
        unread: images that could not be decoded. They count nowhere else.
        not_finite: images of which an output is not finite.
    """

    def __init__(self, task: TaskConfig) -> None:
        self.task = task
        self.sums: dict[str, Tensor] = {}
        self.unread = 0
        self.not_finite = torch.zeros(())

    def add(self, heads: Heads, batch: Batch, beside: Heads | None = None) -> None:
        """Adds a batch's scores. `beside`: what `TaskConfig.before_scores` returned."""
        for name, value in self.task.details({**heads, **(beside or {})}, batch).items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.unread += len(batch.bad)
        self.not_finite = self.not_finite + not_finite(heads, batch, beside)

    def of_all_ranks(self) -> "Scores":
        """Sums over ranks, and moves to the CPU. All ranks call it together.

        Raises:
            UsageError: if no image can be decoded, or an output is not finite.
        """
        self.sums = {name: sum_over_ranks(value).cpu() for name, value in self.sums.items()}
        self.unread = int(sum_over_ranks(torch.tensor(self.unread)))
        if not (count := self.images()):
            raise UsageError("none of the images of the split can be decoded")
        refuse_not_finite(int(sum_over_ranks(self.not_finite)), count)
        return self

    def images(self) -> int:
        return int(self.sums["samples"])

    def metrics(self) -> dict[str, float]:
        return self.task.metrics(self.sums)

    def table(self, names: Sequence[str]) -> dict[str, list[Any]]:
        return self.task.table(self.sums, names)


def refuse_not_finite(lost: int, count: int) -> None:
    """Raises UsageError if the outputs of `lost` of `count` images are not finite."""
    if lost:
        raise UsageError(
            f"the model's outputs are not finite for {lost} of {count} images: its weights overflow or are"
            " damaged, and scores would mean nothing"
        )


def evaluate_at(
    model: Model,
    task: TaskConfig,
    batches: Iterable[Batch],
    points: Sequence[RoutingOverrides] = (AS_TRAINED,),
    also: Callable[[Heads, Batch], None] = lambda heads, batch: None,
) -> list[Scores]:
    """The scores at each operating point, in one pass over the images that computes shared parts once. All
    ranks call it together, and have the same scores. `also` gets the heads of each batch at the first point.

    Raises:
        UsageError: if the task refuses the images, the model has no such routing, none of the images can be
            decoded, or an output is not finite.
    """
    scores, beside = [Scores(task) for _ in points], task.before_scores(model)
    for batch in batches:
        try:
            here = [on_this_rank(point, model, len(batch)) for point in points]
            at_points = model.at_points(task.inputs(batch), batch.valid, here)
        except ValueError as error:
            raise UsageError(str(error)) from None
        for point_scores, heads in zip(scores, at_points, strict=True):
            point_scores.add(heads, batch, beside)
        also(at_points[0], batch)
    return [point_scores.of_all_ranks() for point_scores in scores]


def on_this_rank(point: RoutingOverrides, model: Model, images: int) -> RoutingOverrides:
    """Returns the point for this rank's `images` of a batch, so that it draws what one process would draw."""
    if not point.random_blocks and point.subset_seed is None:
        return point
    group = point.images_per_group or model.config.images_per_group
    return replace(point, first_group=first_row(images) // group)
