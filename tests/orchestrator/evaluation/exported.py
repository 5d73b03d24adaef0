"""A model of random weights, in an exported file."""

import json
from pathlib import Path

import torch

from moe.models.vit import ViT
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.weights import write_file
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig

SOFT = {"model.moe.router.kind": "soft", "model.width": 16}


def exported(path: Path, changes: dict | None = None, seed: int = 0) -> ModelRef:
    """As `checkpoint.export.export` writes one; its head is not at its zero start."""
    run = override(RunConfig(), {"name": path.stem, **(SOFT if changes is None else changes)})
    model = ViT(run.model, seed=seed)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed))
    metadata = {"version": "1", "config": json.dumps(to_dict(run)), "step": "7"}
    write_file(str(path), model.state_dict(), metadata)
    return read_model(str(path))
