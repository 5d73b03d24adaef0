"""A plugin: AdamW whose steps take $PACE_S seconds more: runs last, and leave the processors to others."""

import os
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from orchestrator.optimizers import AdamWConfig


@dataclass(frozen=True, kw_only=True)
class PacedConfig(AdamWConfig):
    """AdamW, slowly."""

    kind: Literal["paced"] = "paced"  # pyright: ignore[reportIncompatibleVariableOverride]

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build(model)
        pace_s = float(os.environ.get("PACE_S", "0"))
        optimizer.register_step_post_hook(lambda *_: time.sleep(pace_s))
        return optimizer
