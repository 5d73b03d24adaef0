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
from moe.layout import local_part, shard_groups
from orchestrator.optimizers.base import (
    FOREACH,
    OptimizerConfig,
    alike,
    chunks,
    count_steps,
    decay_groups,
    empty_stack,
    expert_stacks,
    sum_over_groups,
    with_gradients,
)


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
        groups = with_gradients(self)
        if not groups:
            return
        count_steps(self.state[param] or self._start(param) for param in groups)
        decays = {param: group["weight_decay"] for param, group in groups.items()}
        adapted = alike((p for p in groups if decays[p] or self.config.always_adapt), self.stacks)
        stacks = [empty_stack(params) for params in adapted]
        updates = dict[nn.Parameter, Tensor]()
        for params, stack in zip(adapted, stacks, strict=True):
            updates |= zip(params, stack.unbind(0), strict=True)
        updates |= {p: torch.empty_like(local_part(p)) for p in groups if p not in updates}
        for params in chunks(groups):
            self._adam(params, [updates[param] for param in params], [decays[param] for param in params])
        if stacks:
            self._adapt(adapted, stacks)
        changes = [updates[param] for param in groups]
        FOREACH._foreach_mul_(changes, [-group["lr"] for group in groups.values()])
        FOREACH._foreach_add_([local_part(param) for param in groups], changes)

    def _adam(self, params: list[nn.Parameter], updates: list[Tensor], decays: list[float]) -> None:
        """Updates the moments, and sets `updates` to those of Adam."""
        config, states = self.config, [self.state[param] for param in params]
        weights = [local_part(param) for param in params]
        grads = [local_part(param.grad) for param in params if param.grad is not None]
        means, squares = ([local_part(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        FOREACH._foreach_mul_(squares, config.beta2)
        FOREACH._foreach_addcmul_(squares, grads, grads, 1 - config.beta2)
        FOREACH._foreach_mul_(means, config.beta1)
        FOREACH._foreach_add_(means, grads, alpha=1 - config.beta1 if config.bias_correction else 1.0)
        corrections = [
            [1 - beta ** state["step"].item() if config.bias_correction else 1.0 for state in states]
            for beta in (config.beta1, config.beta2)
        ]
        roots = FOREACH._foreach_div(squares, corrections[1])
        FOREACH._foreach_sqrt_(roots)
        FOREACH._foreach_add_(roots, config.epsilon)
        FOREACH._foreach_copy_(updates, means)
        FOREACH._foreach_div_(updates, corrections[0])
        FOREACH._foreach_div_(updates, roots)
        FOREACH._foreach_add_(updates, FOREACH._foreach_mul(weights, decays))

    def _start(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state before the first update."""
        self.state[param] = {
            "step": torch.zeros((), dtype=torch.float32),  # on the host, where reading it waits for no device
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
        return self.state[param]

    def _adapt(self, adapted: list[list[nn.Parameter]], stacks: list[Tensor]) -> None:
        """Multiplies each layer's update by the norm of its weights over the update's own, or by 1 if one
        is 0. A stack of experts has a ratio for each expert that this rank holds.
        """
        params = [param for each in adapted for param in each]
        weights = self._layers(params, map(local_part, params))
        updates = self._layers(params, (update for stack in stacks for update in stack.unbind(0)))
        squares_2L = torch.stack(FOREACH._foreach_norm(weights + updates)).square().view(2, -1)
        by_layer = [
            stack.flatten(0, int(each[0] in self.stacks)) for each, stack in zip(adapted, stacks, strict=True)
        ]
        counts = [len(each) for each in by_layer]
        parts = squares_2L.split(counts, dim=1)
        sum_over_groups((part, self._shared_by(each[0])) for each, part in zip(adapted, parts, strict=True))
        weight_L, update_L = squares_2L
        ratio_L = torch.where((weight_L > 0) & (update_L > 0), (weight_L / update_L).sqrt(), 1.0)
        if self.config.trust_clip:
            ratio_L.clamp_(max=1.0)
        for stack, ratio in zip(by_layer, ratio_L.split(counts), strict=True):
            stack.mul_(ratio.view(-1, *[1] * (stack.ndim - 1)))

    def _layers(self, params: Iterable[nn.Parameter], tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns the tensors of the parameters, and of a stack of experts that of each expert."""
        return [
            layer
            for param, tensor in zip(params, tensors, strict=True)
            for layer in (tensor.unbind(0) if param in self.stacks else [tensor])
        ]

    def _shared_by(self, param: nn.Parameter) -> list[Any]:
        """Returns the groups of ranks that hold parts of the same layers: whole experts lie on one rank, or
        on ranks that split their other dimensions.
        """
        return [
            group for dim in range(param in self.stacks, param.ndim) for group in shard_groups(param, dim)
        ]
