"""The newest whole checkpoint, found by one process or by all workers of a group together.

Every function here is called by all workers of `group` in the same order, and returns or raises the same on
each of them. Without a group the caller is alone.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manifest import MANIFEST, DamagedError, Manifest
from orchestrator.errors import UsageError

log = logging.getLogger(__name__)
T = TypeVar("T")


def located(location: str, group: dist.ProcessGroup | None = None) -> tuple[str, Manifest]:
    """The checkpoint that `location` means, whose weights are whole: this very folder, or the newest of a
    directory.

    Raises:
        UsageError: if the folder is damaged.
        FileNotFoundError: if the directory holds no whole checkpoint.
    """
    if not agreed(lambda: storage.size(storage.join(location, MANIFEST)) is not None, group):
        return newest(location, group, weights_only=True)
    try:
        return location, verified(location, group, weights_only=True)
    except DamagedError as error:
        raise UsageError(f"checkpoint {location} is damaged: {error}") from None


def newest(
    directory: str, group: dist.ProcessGroup | None = None, *, weights_only: bool = False
) -> tuple[str, Manifest]:
    """The folder of the newest checkpoint that passes `verified`, and its manifest; damaged ones are named in
    a warning.

    Raises:
        FileNotFoundError: if there is none.
        OSError: if storage does not answer: that is no damage.
    """
    for step in reversed(agreed(lambda: manifests.steps(directory), group)):
        folder = manifests.folder_of(directory, step)
        try:
            return folder, verified(folder, group, weights_only=weights_only)
        except (DamagedError, FileNotFoundError) as error:  # or removed meanwhile, by a run that goes on
            if _is_first(group):
                log.warning("checkpoint %s is damaged (%s); trying the one before", folder, error)
    raise FileNotFoundError(f"{directory} holds no whole checkpoint")


def verified(folder: str, group: dist.ProcessGroup | None = None, *, weights_only: bool = False) -> Manifest:
    """The manifest, after every file was hashed, or every one of the weights; each worker takes its share.

    Raises:
        DamagedError: naming the files that are not as they were written.
        FileNotFoundError: if there is no manifest.
    """
    manifest = agreed(lambda: manifests.read(folder), group)
    kind = "weights" if weights_only else ""
    files = sorted(item for item in manifest.files.items() if item[0].startswith(kind))
    rank, workers = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    per_worker = _gathered(lambda: manifests.damaged(folder, files[rank::workers]), group)
    if bad := sorted(name for names in per_worker for name in names):
        raise DamagedError(", ".join(bad))
    return manifest


def agreed(ask: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What the first worker finds, on every one; so is its error."""
    return _gathered(lambda: ask() if _is_first(group) else None, group)[0]  # pyright: ignore[reportReturnType]


def _gathered(ask: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Every worker's answer. Raises what any of them met, on all: none may wait for one that left."""
    answer: T | Exception
    try:
        answer = ask()
    except (OSError, ValueError, DamagedError) as error:
        answer = error
    answers: list[T | Exception] = [answer]
    if group:
        answers = [answer] * dist.get_world_size(group)
        dist.all_gather_object(answers, answer, group=group)
    for found in answers:
        if isinstance(found, Exception):
            raise found
    return answers  # pyright: ignore[reportReturnType]


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0
