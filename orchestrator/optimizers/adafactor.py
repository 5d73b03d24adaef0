"""Adafactor as it trained V-MoE-15B: Adam that holds the means of rows and columns of its second moment.

Sources: Shazeer and Stern 2018, algorithms 4 and 5, for the factored second moment, its decay 1 - t^-0.8 and
epsilon; Zhai et al. 2021, section 3.4, for the changes: a first moment in bfloat16, a decay of at most 0.999,
and learning rates that are not relative to the weights. As in big_vision and vmoe, the first moment is not
corrected for its start at zero, updates are not clipped, and weight decay is decoupled. torch.optim.Adafactor
has none of this. A difference: Flax factors the queries of each head, and here they are rows of one matrix.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

from moe.config import Fraction, NonNegativeFloat, PositiveInt
from moe.parallel import local_part
from orchestrator.optimizers.base import (
    OptimizerConfig,
    decay_groups,
    expert_stacks,
    shard_groups,
    sum_over_groups,
)

DECAY_EXPONENT = 0.8
EPSILON = 1e-30
# Operators on lists of tensors, with which torch's own optimisers take one launch; not in its public types.
FOREACH: Any = torch
Sums = dict[nn.Parameter, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor with a first moment in bfloat16, for models whose state is too large in AdamW.

    Sources: Zhai et al. 2021, section 3.4, for beta1 and beta2_cap; big_vision, whose Adafactor trained
    V-MoE-15B, for min_dim_to_factor (optax has 128); `AdamWConfig` for weight decay. What none of them
    changes is constant.

    Attributes:
        beta1: decay of the first moment.
        beta2_cap: the second moment decays by 1 - t^-0.8 at update t, and by at most this. big_vision takes
            0.95 where training is unstable.
        min_dim_to_factor: matrices with fewer rows or columns keep their whole second moment.
    """

    kind: Literal["adafactor"] = "adafactor"
    beta1: Fraction = 0.9
    beta2_cap: Fraction = 0.999
    min_dim_to_factor: PositiveInt = 32
    weight_decay: NonNegativeFloat = 0.03

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return Adafactor(
            decay_groups(self, model),
            beta1=self.beta1,
            beta2_cap=self.beta2_cap,
            min_dim_to_factor=self.min_dim_to_factor,
            experts=expert_stacks(model),
        )

    def state_bytes(self, shape: Sequence[int], held: Sequence[int], *, expert: bool) -> int:
        numbers = prod(held)
        dims = factored_dims(shape, self.min_dim_to_factor, expert=expert)
        # Columns are not sharded.
        second = sum(numbers // held[dim] for dim in dims) if dims else numbers
        return 2 * numbers + 4 * second


def factored_dims(shape: Sequence[int], min_dim: int, *, expert: bool) -> tuple[int, int] | None:
    """Returns the two largest dimensions of a parameter in their order, or None if one is below `min_dim`.

    As in optax, but never the first dimension of `expert` parameters: V-MoE does not factor across experts.
    """
    largest = sorted(range(expert, len(shape)), key=lambda dim: shape[dim])[-2:]
    if len(largest) < 2 or shape[largest[0]] < min_dim:
        return None
    return min(largest), max(largest)


class Adafactor(torch.optim.Optimizer):
    """Adafactor whose steps on sharded parameters are those on whole parameters.

    A second moment is the outer product of `row_var` and `col_var`, means of squared gradients over columns
    and over rows, divided by the mean of all; a small parameter has its whole `variance`. Rows are sharded,
    columns are not: a rank has the row means of its rows, and all column means, whose sums over ranks are one
    all-reduce for all dense parameters and one for experts.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        beta1: float,
        beta2_cap: float,
        min_dim_to_factor: int,
        experts: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})
        self.beta1, self.beta2_cap, stacks = beta1, beta2_cap, set(experts)
        self.dims = {
            param: factored_dims(param.shape, min_dim_to_factor, expert=param in stacks)
            for group in self.param_groups
            for param in group["params"]
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        sums = self._sums_of_squares()
        largest = max(local_part(param).numel() for param in self.dims)
        for group in self.param_groups:
            present = [param for param in group["params"] if param.grad is not None]
            for params in _batches(present, numel=largest):
                self._update(params, sums, lr=group["lr"], weight_decay=group["weight_decay"])

    def _update(self, params: list[nn.Parameter], sums: Sums, *, lr: float, weight_decay: float) -> None:
        """Updates a batch of parameters, whose operators are one launch each where shapes allow it."""
        for param in params:
            state = self.state[param] or self._start(param)
            state["step"] += 1
        factored = [param for param in params if self.dims[param]]
        whole = [param for param in params if not self.dims[param]]
        updates = self._scaled_by_factors(factored, sums) + self._scaled(whole)
        weights = [local_part(param) for param in factored + whole]
        means = [local_part(self.state[param]["exp_avg"]) for param in factored + whole]
        before = [torch.empty_like(update) for update in updates]
        FOREACH._foreach_copy_(before, means)
        FOREACH._foreach_mul_(updates, 1 - self.beta1)
        FOREACH._foreach_add_(updates, before, alpha=self.beta1)
        # The first moment is rounded after the update has used it.
        FOREACH._foreach_copy_(means, updates)
        FOREACH._foreach_mul_(weights, 1 - lr * weight_decay)
        FOREACH._foreach_add_(weights, updates, alpha=-lr)

    def _sums_of_squares(self) -> Sums:
        """Returns for factored parameters the sums of the squared gradient over columns and over rows."""
        sums: Sums = {}
        for param, dims in self.dims.items():
            if param.grad is not None and dims:
                row, column = dims
                assert not shard_groups(param, column)
                square = local_part(param.grad).square()
                sums[param] = square.sum(column), square.sum(row)
        sum_over_groups(
            (columns, shard_groups(param, dims[0]))
            for param, (_, columns) in sums.items()
            if (dims := self.dims[param])
        )
        return sums

    def _scaled(self, params: list[nn.Parameter]) -> list[Tensor]:
        """Updates whole second moments, and returns this rank's gradients divided by their roots."""
        if not params:
            return []
        grads = [local_part(param.grad) for param in params if param.grad is not None]
        variances = [local_part(self.state[param]["variance"]) for param in params]
        squares = FOREACH._foreach_mul(grads, grads)
        FOREACH._foreach_add_(squares, EPSILON)
        FOREACH._foreach_lerp_(variances, squares, self._weights_of_new(params))
        updates = FOREACH._foreach_rsqrt(variances)
        FOREACH._foreach_mul_(updates, grads)
        return list(updates)

    def _scaled_by_factors(self, params: list[nn.Parameter], sums: Sums) -> list[Tensor]:
        """Does the same for factored second moments."""
        if not params:
            return []
        dims = [dims for param in params if (dims := self.dims[param])]
        row_means = [local_part(self.state[param]["row_var"]) for param in params]
        col_means = [local_part(self.state[param]["col_var"]) for param in params]
        for axis, means in ((0, row_means), (1, col_means)):
            new = FOREACH._foreach_div(
                [sums[param][axis] for param in params],
                [float(param.shape[dim[1 - axis]]) for param, dim in zip(params, dims, strict=True)],
            )
            FOREACH._foreach_add_(new, EPSILON)
            FOREACH._foreach_lerp_(means, new, self._weights_of_new(params))
        updates = []
        for param, (row, column), row_mean, col_mean in zip(params, dims, row_means, col_means, strict=True):
            assert param.grad is not None
            rows, columns = row_mean.unsqueeze(column), col_mean.unsqueeze(row)
            # The mean of all is that of the column means, which every rank has.
            rows = rows / columns.mean(column, keepdim=True)
            updates.append((local_part(param.grad) * rows.rsqrt()).mul_(columns.rsqrt()))
        return updates

    def _weights_of_new(self, params: list[nn.Parameter]) -> list[float]:
        """Returns 1 - beta2 of each parameter's update."""
        steps = [self.state[param]["step"].item() for param in params]
        return [max(1 - self.beta2_cap, step**-DECAY_EXPONENT) for step in steps]

    def _start(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state before the first update."""
        step = torch.zeros((), dtype=torch.float32)  # on the host, where reading it waits for no device
        state = {"step": step, "exp_avg": torch.zeros_like(param, dtype=torch.bfloat16)}
        if dims := self.dims[param]:
            state["row_var"], state["col_var"] = (_zeros_without(dim, param) for dim in reversed(dims))
        else:
            state["variance"] = torch.zeros_like(param)
        self.state[param] = state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            # torch has converted it to the parameter's dtype, which is exact.
            state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)


def _batches(params: list[nn.Parameter], *, numel: int) -> Iterator[list[nn.Parameter]]:
    """Yields the parameters in batches of at most `numel` numbers of this rank, so that an update's copies
    take no more memory than those of the largest parameter.
    """
    batch, size = list[nn.Parameter](), 0
    for param in params:
        own = local_part(param).numel()
        if batch and size + own > numel:
            yield batch
            batch, size = [], 0
        batch.append(param)
        size += own
    if batch:
        yield batch


def _zeros_without(dim: int, param: nn.Parameter) -> Tensor:
    """Returns zeros of the parameter's shape without `dim`, sharded as its other dimensions are."""
    shape = param.shape[:dim] + param.shape[dim + 1 :]
    if not isinstance(param, DTensor):
        return param.new_zeros(shape)
    placements = [_without(dim, placement) for placement in param.placements]
    return zeros(shape, dtype=param.dtype, device_mesh=param.device_mesh, placements=placements)


def _without(dim: int, placement: Placement) -> Placement:
    if not isinstance(placement, Shard) or placement.dim < dim:
        return placement
    return Replicate() if placement.dim == dim else Shard(placement.dim - 1)
