"""LAMB: Adam whose update of a layer is as long as the layer's weights, so that large batches train.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning", https://arxiv.org/abs/1904.00962,
algorithm 2; DeiT III trains with it. Where implementations differ, this one does as timm's: a parameter
without weight decay, as a bias, takes Adam's update as it is. A stack of experts is a layer for each expert,
which the paper does not have: with one ratio for all, a seldom chosen expert would get the steps of the
others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moe.config import Fraction, NonNegativeFloat
from moe.parallel import local_part
from orchestrator.optimizers.base import (
    OptimizerConfig,
    decay_groups,
    expert_stacks,
    shard_groups,
    sum_over_groups,
)

Updates = dict[nn.Parameter, Tensor]


@dataclass(frozen=True, kw_only=True)
class LambConfig(OptimizerConfig):
    """LAMB.

    Attributes:
        beta1, beta2, epsilon: as Adam's.
        bias_correction: whether moments are corrected for their start at zero; without, the first moment is
            a sum in place of a mean.
        always_adapt: whether parameters without weight decay are adapted too.
        trust_clip: whether an update is never made longer than Adam's.
    """

    kind: Literal["lamb"] = "lamb"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: NonNegativeFloat = 1e-6
    bias_correction: bool = True
    always_adapt: bool = False
    trust_clip: bool = False
    weight_decay: NonNegativeFloat = 0.02

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return Lamb(decay_groups(self, model), self, experts=expert_stacks(model))

    def state_bytes(self, shape: Sequence[int], held: Sequence[int], *, expert: bool) -> int:
        return 8 * prod(held)


class Lamb(torch.optim.Optimizer):
    """LAMB whose steps on sharded parameters are those on whole parameters.

    Ranks that share a layer add their squares, in one all-reduce for each group of ranks.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], config: LambConfig, experts: Iterable[nn.Parameter] = ()
    ) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})
        self.config, self.stacks = config, set(experts)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        updates: Updates = {}
        adapted: Updates = {}
        for group in self.param_groups:
            decay = group["weight_decay"]
            for param in (param for param in group["params"] if param.grad is not None):
                updates[param] = self._adam(param).add_(local_part(param), alpha=decay)
                if decay or self.config.always_adapt:
                    adapted[param] = updates[param]
        for param, ratio in self._ratios(adapted).items():
            updates[param].mul_(ratio)
        for group in self.param_groups:
            for param in (param for param in group["params"] if param in updates):
                local_part(param).add_(updates[param], alpha=-group["lr"])

    def _adam(self, param: nn.Parameter) -> Tensor:
        """Updates the moments, and returns the update of Adam."""
        config, state = self.config, self.state[param] or self._start(param)
        state["step"] += 1
        assert param.grad is not None
        grad, mean, square = map(local_part, (param.grad, state["exp_avg"], state["exp_avg_sq"]))
        square.mul_(config.beta2).addcmul_(grad, grad, value=1 - config.beta2)
        if not config.bias_correction:
            mean.mul_(config.beta1).add_(grad)
            return mean / (square.sqrt() + config.epsilon)
        mean.mul_(config.beta1).add_(grad, alpha=1 - config.beta1)
        step = state["step"].item()
        root = (square / (1 - config.beta2**step)).sqrt_()
        return (mean / (1 - config.beta1**step)).div_(root.add_(config.epsilon))

    def _start(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state before the first update."""
        self.state[param] = {
            "step": torch.zeros((), dtype=torch.float32),  # on the host, where reading it waits for no device
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
        return self.state[param]

    def _ratios(self, updates: Updates) -> Updates:
        """Returns the norm of weights by that of the update: one number for a layer, or one for each expert
        that this rank holds, in the dimensions of the parameter. It is 1 where either norm is 0.
        """
        squares: Updates = {}
        for param, update in updates.items():
            dims = tuple(range(param in self.stacks, update.ndim))
            both = (local_part(param), update)
            squares[param] = torch.stack([values.square().sum(dims, keepdim=True) for values in both])
        sum_over_groups((part, self._shared_by(param)) for param, part in squares.items())
        ratios: Updates = {}
        for param, (weight, update) in squares.items():
            ratio = torch.where((weight > 0) & (update > 0), (weight / update).sqrt(), 1.0)
            ratios[param] = ratio.clamp(max=1.0) if self.config.trust_clip else ratio
        return ratios

    def _shared_by(self, param: nn.Parameter) -> list[Any]:
        """Returns the groups of ranks that hold parts of the same layers: whole experts lie on one rank, or
        on ranks that split their other dimensions.
        """
        return [
            group for dim in range(param in self.stacks, param.ndim) for group in shard_groups(param, dim)
        ]
