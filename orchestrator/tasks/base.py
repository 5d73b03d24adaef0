"""The contract of tasks: what a model is trained for, and how its quality is measured.

A task is a file that defines a config. It joins by being imported: in `orchestrator.tasks`, or anywhere
before its kind is named. It knows torch and batches, not Ray.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from moe.config import Family, members
from moe.model import Model, ModelConfig
from moe.overrides import RoutingOverrides
from orchestrator.data.batch import Batch, normalize
from orchestrator.data.fields import Field
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError

Heads = Mapping[str, Tensor]


def not_finite(heads: Heads, batch: Batch, beside: Heads | None = None) -> Tensor:
    """Returns how many valid samples of a batch have an output that is not finite: all of them, if it is one
    of `beside`, which `TaskConfig.before_scores` returned. Their scores would mean nothing.
    """
    is_finite = torch.ones_like(batch.valid, dtype=torch.bool)
    for output in heads.values():
        is_finite &= output.isfinite().reshape(len(output), -1).all(1)
    for tensor in (beside or {}).values():
        is_finite &= tensor.isfinite().all()
    return (~is_finite * batch.valid).sum()


@dataclass(frozen=True, kw_only=True)
class ClassNames:
    """Names of classes, by label, and the templates that make texts of them, with ``{}`` for a name."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]

    def for_data(self, path: str) -> "ClassNames":
        """Returns the names in the order of the labels of a data set: as they are, unless they are its own
        names in another order. Raises UsageError if the data set has more or fewer classes.
        """
        known = open_manifest(path).classes
        if len(known) != len(self.classes):
            raise UsageError(f"{len(self.classes)} classes are named, and {path} has {len(known)}")
        return replace(self, classes=known) if {*known} == {*self.classes} else self


class TaskConfig(Family, ABC, default="classification"):
    """The settings of a task.

    Attributes:
        qualities: metrics in 0..1 of which more is better; the first is the task's `quality`, by which runs
            end early, checkpoints are kept and models are compared.
        needs: heads of the model's output that the task reads.
        scope: ``sample``: the loss of a sample depends on that sample alone, and microbatches add up;
            ``batch``: the loss is one of the global batch (`moe.parallel.gather`), exact under microbatches
            by a second forward pass.
        classifies: whether ``logits`` are of the classes of the field ``label``, so that labels can be mixed,
            classes named, answers ranked, and a linear classifier compared.
        described: metric -> unit and meaning.
    """

    qualities: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[str, ...]] = ("logits",)
    scope: ClassVar[Literal["sample", "batch"]] = "sample"
    classifies: ClassVar[bool] = False
    described: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @property
    def quality(self) -> str:
        return self.qualities[0]

    @property
    def output(self) -> Literal["softmax", "sigmoid", "embedding", "tokens", "values"]:
        """The meaning of an output, as `Signature` has it."""
        return "softmax" if self.classifies else "values"

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probabilities of classes, (B, C) float32."""
        return logits.float().sigmoid() if self.output == "sigmoid" else logits.float().softmax(-1)

    def fields(self, model: ModelConfig) -> Mapping[str, Field]:
        """Returns the fields of samples that batches have beside ``image`` and ``label``."""
        return {}

    def check(self, model: ModelConfig) -> None:
        """Raises ValueError if the model does not give what the task needs."""
        if missing := [head for head in self.needs if head not in model.gives]:
            fit = [task.kind for task in members(TaskConfig) if {*task.needs} <= {*model.gives}]
            hint = f": set task.kind={' or '.join(fit)}" if fit else ""
            raise ValueError(
                f"a task of kind {self.kind!r} reads {', '.join(missing)}, and a model of kind {model.kind!r}"
                f" gives {', '.join(model.gives)}{hint}"
            )

    @abstractmethod
    def chance(self, model: ModelConfig) -> float:
        """Returns the quality of guessing."""

    def inputs(self, batch: Batch) -> Any:
        """Returns the model's input: by default images, (B, 3, H, W) float32 in -1..1."""
        return normalize(batch["image"])

    def for_data(self, model: ModelConfig, path: str) -> Mapping[str, Any]:
        """Returns the fields of a run that its data set decides, in dotted form. Raises UsageError if it
        cannot.
        """
        return {}

    def without_data(self, model: ModelConfig) -> Mapping[str, Any]:
        """Returns fields of any value for those of `for_data` that a step cannot do without, in dotted form:
        for a step whose numbers nobody reads.
        """
        return {}

    def class_names(self, classes: tuple[str, ...], templates: tuple[str, ...]) -> ClassNames | None:
        """Returns the names by which a trained model classifies: those given, else the task's own; None where
        its own head does. They are checked by `by_names`.
        """
        return ClassNames(classes=classes, templates=templates) if classes or templates else None

    def by_names(self, model: ModelConfig, names: ClassNames) -> Callable[[Model], nn.Module]:
        """Returns what makes a classifier of a trained model, whose classes are those that are named. Raises
        ValueError if such a model cannot classify by names, or these cannot tell classes apart.
        """
        raise ValueError(f"a model of kind {model.kind!r} reads no text")

    def before_scores(self, model: Model) -> Heads:
        """Returns tensors that `scores` and `details` find among the heads, computed once before an
        evaluation. All workers call it together.
        """
        return {}

    @abstractmethod
    def loss_share(self, heads: Heads, batch: Batch, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns this worker's share of the loss, and of further metrics: over workers, and with the scope
        ``sample`` over microbatches, shares add up to the value for the global batch of `batch_size`.
        """

    @abstractmethod
    def scores(self, heads: Heads, batch: Batch) -> dict[str, Tensor]:
        """Returns sums over the valid samples of a batch, which add up over batches and workers. ``samples``
        is their number.
        """

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns means by their names in `qualities` and `described`, without ``val/``, from summed scores
        or details. Without any sample they are NaN.
        """

    def details(self, heads: Heads, batch: Batch) -> dict[str, Tensor]:
        """Returns the scores of an evaluation after training, which may be more than `scores`."""
        return self.scores(heads, batch)

    def of_model(self, model: Model, batch: Batch, point: RoutingOverrides) -> dict[str, float]:
        """Returns further figures of an evaluation after training, which take forward passes of their own on
        a batch, at an operating point.
        """
        return {}

    def table(self, sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns a table of summed details, with a row for each named class: column -> values."""
        return {}
