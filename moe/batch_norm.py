"""Batch norm over the images of all ranks: a step does not depend on how the batch is split over them.

Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167; epsilon and momentum are torch's. Torch's
own synchronised batch norm runs on GPUs alone, and counts padding.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from moe.init import Draw, constant, zeros
from moe.routing import at_least_fp32

EPSILON, MOMENTUM = 1e-5, 0.1
OVER = (0, 2, 3)  # images and places


class BatchNorm(nn.Module):
    """Normalises each channel of (B, C, H, W) over the valid images of the batch in training, and by the
    running averages of their means and variances in evaluation, or if its weights are frozen.
    """

    uncompiled: ClassVar = ("normalize",)  # it waits for other ranks

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight_C = nn.Parameter(torch.empty(channels))
        self.bias_C = nn.Parameter(torch.empty(channels))
        self.register_buffer("mean_C", torch.empty(channels))
        self.register_buffer("variance_C", torch.empty(channels))
        self.seen: tuple[Tensor, Tensor] | None = None
        self.momentum = MOMENTUM

    def draws(self) -> dict[str, Draw]:
        return {
            name: zeros() if name in ("bias_C", "mean_C") else constant(1.0) for name in self.state_dict()
        }

    def forward(self, x: Tensor, valid_B: Tensor) -> Tensor:
        self.seen = None
        if self.training and self.weight_C.requires_grad:
            y, mean_C, variance_C = self.normalize(x, valid_B)
            self.seen = mean_C, variance_C
            return y
        scale_C = at_least_fp32(self.weight_C) * (self.get_buffer("variance_C") + EPSILON).rsqrt()
        shift_C = at_least_fp32(self.bias_C) - self.get_buffer("mean_C") * scale_C
        return (x * _channels(scale_C) + _channels(shift_C)).to(x.dtype)

    def normalize(self, x: Tensor, valid_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _BatchNorm.apply(x, valid_B, self.weight_C, self.bias_C)  # pyright: ignore[reportReturnType]

    def follow(self) -> None:
        """Moves the running averages towards the last batch. The model calls it after its forward pass,
        because activation checkpointing repeats that of a block."""
        if self.seen:
            for name, value in zip(("mean_C", "variance_C"), self.seen, strict=True):
                self.get_buffer(name).lerp_(value, self.momentum)
            self.seen = None


def follow_batch(model: nn.Module) -> None:
    """Moves the running averages of all batch norms of a model after a forward pass."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.follow()


@torch.no_grad()
def renew_statistics(model: nn.Module, batches: Iterable[tuple[Any, Tensor]]) -> None:
    """Sets the running averages of all batch norms that are trained to the plain means over some batches,
    (inputs, valid_B) of `model`: weights that no step of training has had, as an average of weights, need
    statistics of their own. Source: Izmailov et al. 2018, https://arxiv.org/abs/1803.05407, section 3.2.
    """
    norms, training = [m for m in model.modules() if isinstance(m, BatchNorm)], model.training
    model.train()
    for seen, (inputs, valid_B) in enumerate(batches):
        for norm in norms:
            norm.momentum = 1 / (seen + 1)
        model(inputs, valid_B)
    for norm in norms:
        norm.momentum = MOMENTUM
    model.train(training)


class _BatchNorm(Function):
    """Returns the normalised numbers, and the mean and unbiased variance of each channel. Of x, nothing but x
    itself is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, valid_B: Tensor, weight_C: Tensor, bias_C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, valid = at_least_fp32(x), at_least_fp32(valid_B).view(-1, 1, 1, 1)
        count = valid.sum() * x[0, 0].numel()
        mean_C = (wide * valid).sum(OVER) / count.clamp(min=1)
        squares_C = ((wide - _channels(mean_C)).square() * valid).sum(OVER)
        # One exchange, and no difference of large numbers: means of ranks are combined with their squares.
        parts_R3C = _of_all_ranks(torch.stack([count.expand_as(mean_C), mean_C, squares_C]))
        counts_RC, means_RC, squares_RC = parts_R3C.unbind(1)
        total_C = counts_RC.sum(0).clamp(min=1)
        mean_C = (counts_RC * means_RC).sum(0) / total_C
        squares_C = (squares_RC + counts_RC * (means_RC - mean_C).square()).sum(0)
        deviation_C = (squares_C / total_C + EPSILON).rsqrt()
        ctx.save_for_backward(x, valid, weight_C, mean_C, deviation_C, total_C)
        y = (wide - _channels(mean_C)) * _channels(deviation_C * weight_C) + _channels(at_least_fp32(bias_C))
        variance_C = squares_C / (total_C - 1).clamp(min=1)
        ctx.mark_non_differentiable(mean_C, variance_C)
        return y.to(x.dtype), mean_C, variance_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        x, valid, weight_C, mean_C, deviation_C, total_C = ctx.saved_tensors
        gradient = at_least_fp32(gradients[0])
        normal = (at_least_fp32(x) - _channels(mean_C)) * _channels(deviation_C)
        own_2C = torch.stack([gradient.sum(OVER), (gradient * normal).sum(OVER)])
        # Through mean and variance, an image reaches the outputs of all ranks.
        bias_C, slope_C = _of_all_ranks(own_2C).sum(0) / total_C
        gradient = gradient - valid * (_channels(bias_C) + normal * _channels(slope_C))
        grad_x = (gradient * _channels(deviation_C * weight_C)).to(x.dtype)
        return grad_x, None, own_2C[1].to(weight_C.dtype), own_2C[0].to(weight_C.dtype)


def _channels(values_C: Tensor) -> Tensor:
    return values_C.view(1, -1, 1, 1)


def _of_all_ranks(values: Tensor) -> Tensor:
    """Returns the values of all ranks, (R, ..); on the meta device, where costs are measured, its own."""
    if not dist.is_initialized() or values.is_meta:
        return values.unsqueeze(0)
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return torch.stack(every)
