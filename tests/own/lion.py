"""Lion: each number moves by the learning rate in the direction of a mean of gradients.

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import nn

from moe import Fraction
from orchestrator import OptimizerConfig, decay_groups


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimizerConfig):
    """Lion.

    Attributes:
        beta1: fraction of the mean in the direction of an update; the gradient is the rest.
        beta2: fraction of the mean that stays in it.
    """

    kind: Literal["lion"] = "lion"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99

    def build(self, model: nn.Module) -> "Lion":
        return Lion(decay_groups(self, model), self)

    def state_bytes(self, shape: Sequence[int], held: Sequence[int], *, expert: bool) -> int:
        return 4 * prod(held)


class Lion(torch.optim.Optimizer):
    def __init__(self, groups: list, config: LionConfig) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        beta1, beta2 = self.config.beta1, self.config.beta2
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                if not self.state[param]:
                    self.state[param]["mean"] = torch.zeros_like(param)
                mean = self.state[param]["mean"]
                direction = (beta1 * mean + (1 - beta1) * param.grad).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                mean.mul_(beta2).add_(param.grad, alpha=1 - beta2)
