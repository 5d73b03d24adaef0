"""SGD with momentum, by torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import nn

from moe.config import NonNegativeFloat
from orchestrator.optimizers.base import OptimizerConfig, decay_groups


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimizerConfig):
    """SGD with momentum. Source: the fine-tuning recipe of V-MoE.

    Attributes:
        momentum: fraction of the last update that is added to the next.
    """

    kind: Literal["sgd"] = "sgd"
    momentum: NonNegativeFloat = 0.9

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(decay_groups(self, model), lr=0.0, momentum=self.momentum)

    def state_bytes(self, shape: Sequence[int], held: Sequence[int], *, expert: bool) -> int:
        return 4 * prod(held) if self.momentum > 0 else 0
