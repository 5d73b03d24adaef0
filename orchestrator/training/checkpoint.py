"""Checkpoints: sharded by DCP, committed by a manifest; without one that verifies, it does not count.

    checkpoints/step-00000100/   *.distcp, .metadata (each rank writes its share, loadable at any world size)
                                 manifest.json: progress, the run's config, SHA-256 of every file

It is written under a temporary name and renamed when the manifest is in it, so a crash at any moment leaves
either a whole checkpoint or none.
"""

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
MANIFEST = "manifest.json"


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config: Mapping[str, Any],
    progress: Mapping[str, Any],
    keep: int,
) -> None:
    """Writes ``step-<step>`` below `directory`, all ranks together, and deletes all but the `keep` newest."""
    final, partial = directory / f"step-{step:08d}", directory / f"step-{step:08d}.tmp"
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
    _barrier()
    weights, moments = get_state_dict(model, optimizer)
    state_dict_saver.save(
        {"model": weights, "optim": moments}, checkpoint_id=partial, no_dist=not dist.is_initialized()
    )
    if first:
        manifest = {"step": step, "progress": dict(progress), "config": config, "files": _hashes(partial)}
        _write_durably(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        if final.exists():  # left by a run that was interrupted between saving and going on
            shutil.rmtree(final)
        os.rename(partial, final)
        steps = _steps(directory)
        later = [path for path in steps if path.name > final.name]  # damaged, or this run would not be here
        for old in later + [path for path in steps if path not in later][:-keep]:
            shutil.rmtree(old)
    _barrier()


def newest(directory: Path) -> Path | None:
    """The newest checkpoint whose every file is as its manifest says; damaged ones are named in a warning."""
    for path in reversed(_steps(directory)):
        if damaged := _damaged(path):
            log.warning("checkpoint %s is damaged (%s); trying the one before it", path, damaged)
        else:
            return path
    return None


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fills model and optimiser in place, whatever layout wrote the checkpoint; returns its manifest."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    state_dict_loader.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return json.loads((path / MANIFEST).read_text())


def load_weights(path: Path, model: nn.Module) -> None:
    """Fills an unsharded model in place, in one process."""
    state = {"model": get_model_state_dict(model)}
    state_dict_loader.load(state, checkpoint_id=path, no_dist=True)
    set_model_state_dict(model, state["model"])


def agree(path: Path | None) -> Path | None:
    """Rank 0's choice, on every rank."""
    choice = [path]
    if dist.is_initialized():
        dist.broadcast_object_list(choice, src=0)
    return choice[0]


def _steps(directory: Path) -> list[Path]:
    return sorted(p for p in directory.glob("step-*") if p.name.removeprefix("step-").isdigit())


def _damaged(path: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        found = _hashes(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return repr(error)
    return ", ".join(sorted(name for name in files if files[name] != found.get(name)))


def _hashes(path: Path) -> dict[str, str]:
    files = (p for p in sorted(path.iterdir()) if p.name != MANIFEST)
    return {p.name: _sha256(p) for p in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
