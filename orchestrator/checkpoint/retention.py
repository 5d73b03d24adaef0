"""Which checkpoints stay, and what a run that was killed left lying about."""

import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manifest import MANIFEST, DamagedError, Manifest
from orchestrator.config import CheckpointConfig

log = logging.getLogger(__name__)
BEST_BY = "val/acc1"
FILE = re.compile(r"(weights|optimizer)(-\d{5,})?\.[0-9a-f]{8}\.(bin|json)|manifest\.json\.[0-9a-f]{32}\.tmp")
TEMPORARY = re.compile(r"(step-\d+)\.[0-9a-f]{8}\.tmp")


def staying(found: Mapping[int, float | None], keep: CheckpointConfig) -> set[int]:
    """Steps that stay: the newest, the best, and multiples of `keep.keep_every`.

    Args:
        found: step -> its quality, higher is better; None or NaN where it was not measured at that step. Of
            equals the earliest is the best, as in the run's progress.
    """
    newest = sorted(found)[-keep.keep_last :]
    measured = {s: quality for s, quality in found.items() if quality is not None and not math.isnan(quality)}
    best = sorted(measured, key=lambda step: (-measured[step], step))[: keep.keep_best]
    trunk = [step for step in found if keep.keep_every and step % keep.keep_every == 0]
    return {*newest, *best, *trunk}


def retain(directory: str, step: int, keep: CheckpointConfig, passed_over: Collection[int] = ()) -> None:
    """After `step` was saved: removes what need not stay.

    Those that were `passed_over` when the run resumed, and those without a readable manifest, are damaged:
    they go, and push out no whole one. Others that are later than `step` are none of our business.
    """
    ours = {s for s in manifests.steps(directory) if s <= step or s in passed_over}
    found: dict[int, float | None] = {}
    for s in ours - set(passed_over):
        try:
            found[s] = _quality(manifests.read(manifests.folder_of(directory, s)))
        except (DamagedError, FileNotFoundError):
            continue
    for old in ours - staying(found, keep):
        manifests.remove(manifests.folder_of(directory, old))


def quality_of(directory: str, step: int) -> float | None:
    """`BEST_BY`, if it was measured at that very step and the manifest can be read."""
    try:
        return _quality(manifests.read(manifests.folder_of(directory, step)))
    except (DamagedError, FileNotFoundError):
        return None


def collect_garbage(directory: str) -> None:
    """Removes what saving and removing left when they were interrupted: files of ours that belong to no
    checkpoint. Only while nobody writes to `directory`.
    """
    storage.abort_uploads(directory)
    for name in storage.names(directory):
        folder = storage.join(directory, name)
        if TEMPORARY.fullmatch(name):
            log.warning("removing %s: its saving was interrupted", folder)
            storage.delete(folder)
        elif manifests.step_of(folder) is not None:
            sweep(folder)


def discard(temporary: str, token: str) -> None:
    """Removes what is left in `temporary` of an attempt that failed."""
    if storage.is_local(temporary):
        storage.delete(temporary)
    else:
        storage.abort_uploads(temporary, f".{token}.")
        sweep(temporary, f".{token}.")


def sweep(folder: str, containing: str = "") -> None:
    """Removes files that we named, and that the manifest in `folder` does not vouch for."""
    try:
        vouched = manifests.read(folder).files.keys()
    except DamagedError:
        return  # it cannot say what it vouches for
    except (FileNotFoundError, NotADirectoryError):
        vouched = set()
    for name in storage.names(folder):
        if FILE.fullmatch(name) and containing in name and name not in vouched:
            log.warning("removing %s/%s: it belongs to no checkpoint", folder, name)
            storage.delete(storage.join(folder, name))
    storage.delete_empty_folder(folder)


def drop_optimizer(directory: str) -> int:
    """Leaves the weights alone of every checkpoint in `directory`: bytes that were freed. A run that is
    complete needs no more, unless somebody wants to continue it.
    """
    freed = 0
    for folder in (manifests.folder_of(directory, step) for step in manifests.steps(directory)):
        try:
            before = manifests.read(folder)
        except DamagedError:
            continue
        after = _weights_only(before)
        if after.files.keys() != before.files.keys():
            # the manifest first: at no moment does it vouch for a file that is gone
            storage.write_bytes(storage.join(folder, MANIFEST), manifests.encode(after))
            storage.flush(folder)
            freed += before.size() - after.size()
            for name in before.files.keys() - after.files.keys():
                storage.delete(storage.join(folder, name))
        sweep(folder)
    return freed


def _quality(manifest: Manifest) -> float | None:
    progress = manifest.progress
    return progress.get("metrics", {}).get(BEST_BY) if progress.get("reported") == manifest.step else None


def _weights_only(manifest: Manifest) -> Manifest:
    files = {name: file for name, file in manifest.files.items() if name.startswith("weights")}
    return replace(manifest, files=files)
