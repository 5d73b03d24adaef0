"""Classes of images by the numbers that a trained model has for them."""

from typing import NamedTuple

from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.training.checkpoint.weights import class_names


class Classes(NamedTuple):
    """Attributes:
    names: by label, as the model is judged.
    labels: label in the shards -> that of the model; None: they are taken as they are.
    learned: what the model learned, by label; None: nobody knows any more.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...] | None
    learned: tuple[str, ...] | None


def classes_of(run: RunConfig, path: str) -> Classes:
    """Matched by name where the model learned all of them: some of its classes, or in another order."""
    here, learned = open_manifest(path).classes, class_names(run)
    if not learned or here == learned[: len(here)] or not set(here) <= set(learned):
        return Classes(names=here, labels=None, learned=learned)
    return Classes(names=learned, labels=tuple(map(learned.index, here)), learned=learned)
