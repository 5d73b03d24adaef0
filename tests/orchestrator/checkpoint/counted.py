"""A state whose every number is known from the step, so that any checkpoint of it can be checked."""

import logging
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orchestrator.checkpoint.files import state_of
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.checkpoint.manifest import CheckpointManifest
from orchestrator.config import CheckpointConfig

IN_STEP = CheckpointConfig(asynchronous=False, keep_last=9)


class Odd(nn.Module):
    """Tensors of many shapes and types."""

    def __init__(self, rows: int = 40) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(rows, 33))
        self.cube = nn.Parameter(torch.zeros(2, 3, 5))
        self.scalar = nn.Parameter(torch.zeros(()))
        for name, like in {
            "of_counter": torch.zeros((), dtype=torch.int64),
            "of_mask": torch.zeros(7, dtype=torch.bool),
            "of_half": torch.zeros(3, 5, dtype=torch.bfloat16),
            "of_double": torch.zeros(1, 1, 4, dtype=torch.float64),
            "of_bytes": torch.zeros(3, dtype=torch.uint8),
            "of_no_rows": torch.zeros(0, 4),
            "of_columns": torch.zeros(4, 6).T,
        }.items():
            self.register_buffer(name, like)


def odd(rows: int = 40) -> tuple[Odd, torch.optim.Optimizer]:
    model = Odd(rows)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def expected(name: str, step: int, like: Tensor) -> Tensor:
    """Returns numbers below 251, which all types hold exactly, different at every step."""
    first = zlib.crc32(f"{name} {step}".encode())
    numbers = (torch.arange(like.numel()) * 2654435761 + first) % 251
    return (numbers % 2 == 1 if like.dtype == torch.bool else numbers.to(like.dtype)).reshape(like.shape)


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the state to that of `step`."""
    for name, tensor in state_of(model, optimizer).items():
        tensor.copy_(expected(name, step, tensor))


def wrong(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """Returns the names of tensors that differ from the state of `step`."""
    state = state_of(model, optimizer)
    return [name for name, tensor in state.items() if not torch.equal(tensor, expected(name, step, tensor))]


def save(checkpoints: Checkpoints, step: int, *, rows: int = 40, quality: float | None = None) -> None:
    """Saves the state of `step`, with a report of this quality."""
    model, optimizer = odd(rows)
    fill(model, optimizer, step)
    metrics = {} if quality is None else {"val/acc1": quality}
    progress = {"reported": step, "metrics": metrics}
    checkpoints.save(step, model, optimizer, images=8 * step, progress=progress, config={"name": "odd"})


def saved(directory: Path | str, *steps: int, config: CheckpointConfig = IN_STEP) -> Path:
    checkpoints = Checkpoints(str(directory), config)
    for step in steps:
        save(checkpoints, step)
    checkpoints.finish()
    return Path(directory)


def restored(directory: Path | str, *, rows: int = 40) -> CheckpointManifest | None:
    """Returns the checkpoint that a run resumes from, after comparing every number."""
    model, optimizer = odd(rows)
    manifest = Checkpoints(str(directory), IN_STEP).restore(model, optimizer)
    if manifest:
        assert manifest.images == 8 * manifest.step
        assert wrong(model, optimizer, manifest.step) == []
    return manifest


def step_restored(directory: Path | str) -> int | None:
    manifest = restored(directory)
    return manifest and manifest.step


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """Returns our log lines of this level, without those of torch."""
    ours = (record for record in caplog.records if record.name.startswith("orchestrator."))
    return [record.getMessage() for record in ours if record.levelno == level]


def folder(directory: Path | str, step: int) -> Path:
    return Path(directory, f"step-{step:08d}")


def file_of(path: Path, kind: str) -> Path:
    """Returns the only file of a kind in a checkpoint: ``weights``, ``optimizer`` or ``manifest``."""
    (file,) = path.glob(f"{kind}*")
    return file


def flip(file: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1 << bit
    file.write_bytes(content)
