"""Classes of images by the numbers that a trained model has for them."""

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.evaluation.trained import Trained


class Classes(NamedTuple):
    """The classes of images as a model is judged on them.

    Attributes:
        names: by label.
        labels: the model's label for each label of the shards; None if they are the same.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...] | None


def classes_of(model: Trained, path: str) -> Classes:
    """The classes that a model's answers for the images of `path` are compared with.

    Labels are matched by name if the model learned all classes of the images: some of its classes, or in
    another order. If it learned none of them, or its classes are unknown, labels are taken by number.

    Raises:
        UsageError: if the model learned only some of them, under other numbers, or has too few outputs.
    """
    here, learned = open_manifest(path).classes, model.classes or ()
    if here == learned[: len(here)]:
        return Classes(names=here, labels=None)
    if set(here) <= set(learned):
        return Classes(names=learned, labels=tuple(map(learned.index, here)))
    moved = [name for number, name in enumerate(here) if name in learned and learned.index(name) != number]
    if moved:
        unknown = next(name for name in here if name not in learned)
        raise UsageError(
            f"{path}: {model.name} learned class {moved[0]!r} under another number, and did not learn"
            f" {unknown!r}: labels fit neither by name nor by number. Pack the images without the classes"
            " that it did not learn"
        )
    if len(here) > (outputs := model.run.model.num_classes):
        why = "their names do not match those that it learned" if learned else "what it learned is unknown"
        raise UsageError(
            f"{path} has {len(here)} classes ({few(here)}), but {model.name} has {outputs} outputs; {why}, so"
            " labels are compared by number. Evaluate on data with the same classes, or fine-tune the model"
            " on this data: jobs/finetune.py"
        )
    return Classes(names=here, labels=None)


def few(names: Sequence[str]) -> str:
    """The first names, and how many there are."""
    return ", ".join(names[:3]) + (f", .. {len(names)}" if len(names) > 3 else "")
