"""Classes of images by the numbers that a trained model has for them."""

from typing import NamedTuple

from orchestrator.config import UsageError
from orchestrator.data.manifest import open_manifest
from orchestrator.evaluation.trained import Trained


class Classes(NamedTuple):
    """Attributes:
    names: by label, as the model is judged.
    labels: label in the shards -> that of the model; None: they are taken as they are.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...] | None


def classes_of(model: Trained, path: str) -> Classes:
    """Matched by name where the model learned all of them: some of its classes, or in another order. By
    number where it learned none, or nobody knows what it learned.

    Raises:
        UsageError: if it learned some of them under other numbers, and others not.
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
            f"{path}: {model.name} learned class {moved[0]!r} under another number, and {unknown!r} not at"
            " all: labels fit neither by name nor by number; pack the images without what it did not learn"
        )
    return Classes(names=here, labels=None)
