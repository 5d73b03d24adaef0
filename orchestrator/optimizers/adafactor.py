"""Adafactor as it trained V-MoE-15B: Adam that holds the means of rows and columns of its second moment.

Sources: Shazeer and Stern 2018, algorithms 4 and 5, for the factored second moment, its decay 1 - t^-0.8 and
epsilon; Zhai et al. 2021, section 3.4, for the changes: a first moment in bfloat16, a decay of at most 0.999,
and learning rates that are not relative to the weights. As in big_vision and vmoe, the first moment is not
corrected for its start at zero, updates are not clipped, and weight decay is decoupled. torch.optim.Adafactor
has none of this. A difference: Flax factors the queries of each head, and here they are rows of one matrix.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from moe.config import Fraction, NonNegativeFloat, PositiveInt
from moe.layout import local_part, shard_groups, zeros_without
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

DECAY_EXPONENT = 0.8
EPSILON = 1e-30


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


class Sums(NamedTuple):
    """Sums of squared gradients over columns and over rows, of parameters that are alike: (params, *shape)
    with 1 where they were summed. Then their means, which are the factors of second moments.

    row, column: dimensions of the parameters.
    """

    params: list[nn.Parameter]
    row: int
    column: int
    rows: Tensor
    columns: Tensor

    def counts(self) -> tuple[int, int]:
        """Returns how many numbers the sums are of."""
        shape = self.params[0].shape
        return shape[self.column], shape[self.row]

    def views(self) -> tuple[Tensor, ...]:
        """Returns those of each parameter, over columns and then over rows."""
        return (*self.rows.squeeze(1 + self.column).unbind(0), *self.columns.squeeze(1 + self.row).unbind(0))


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
        self.beta1, self.beta2_cap, self.stacks = beta1, beta2_cap, set(experts)
        self.dims = {
            param: factored_dims(param.shape, min_dim_to_factor, expert=param in self.stacks)
            for group in self.param_groups
            for param in group["params"]
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = with_gradients(self)
        count_steps(self.state[param] or self._start(param) for param in groups)
        together = [param for params in alike(groups, self.stacks) for param in params]
        batches = [(params, self._sums_of_squares(params)) for params in chunks(together)]
        sum_over_groups(
            (each.columns, shard_groups(each.params[0], each.row)) for _, sums in batches for each in sums
        )
        for params, sums in batches:
            self._update(params, sums, groups)

    def _sums_of_squares(self, params: list[nn.Parameter]) -> list[Sums]:
        """Returns the sums of squared gradients of the factored parameters, on this rank."""
        factored = [(each, dims) for each in alike(params, self.stacks) if (dims := self.dims[each[0]])]
        if not factored:
            return []
        squares = [empty_stack(each) for each, _ in factored]
        FOREACH._foreach_copy_(_each(squares), _gradients(param for each, _ in factored for param in each))
        FOREACH._foreach_mul_(squares, squares)
        return [
            Sums(each, *dims, *(square.sum(1 + dim, keepdim=True) for dim in reversed(dims)))
            for (each, dims), square in zip(factored, squares, strict=True)
        ]

    def _update(
        self, params: list[nn.Parameter], sums: list[Sums], groups: Mapping[nn.Parameter, Any]
    ) -> None:
        whole = [param for param in params if not self.dims[param]]
        params = [*(param for each in sums for param in each.params), *whole]
        updates = self._scaled(params, whole, sums)
        weights = [local_part(param) for param in params]
        kept = [local_part(self.state[param]["exp_avg"]) for param in params]
        means = [torch.empty_like(update) for update in updates]
        FOREACH._foreach_copy_(means, kept)
        FOREACH._foreach_lerp_(means, updates, 1 - self.beta1)
        # The first moment is rounded after the update has used it.
        FOREACH._foreach_copy_(kept, means)
        FOREACH._foreach_mul_(means, [-groups[param]["lr"] for param in params])
        FOREACH._foreach_mul_(weights, [1 - groups[p]["lr"] * groups[p]["weight_decay"] for p in params])
        FOREACH._foreach_add_(weights, means)

    def _scaled(
        self, params: list[nn.Parameter], whole: list[nn.Parameter], sums: list[Sums]
    ) -> list[Tensor]:
        """Updates the second moments, and returns this rank's gradients divided by their roots."""
        own = _gradients(whole)
        squares = list(FOREACH._foreach_mul(own, own)) if own else []
        means = [mean for each in sums for mean in (each.rows, each.columns)]
        if means:
            FOREACH._foreach_div_(means, [float(count) for each in sums for count in each.counts()])
        FOREACH._foreach_add_(means + squares, EPSILON)
        new = [*(view for each in sums for view in each.views()), *squares]
        old = [self.state[p][name] for each in sums for name in ("row_var", "col_var") for p in each.params]
        old = [local_part(moment) for moment in (*old, *(self.state[param]["variance"] for param in whole))]
        of = [*(p for each in sums for p in each.params * 2), *whole]
        FOREACH._foreach_lerp_(old, new, self._weights_of_new(of))
        FOREACH._foreach_copy_(new, old)
        for each in sums:
            # The mean of all is that of the column means, which every rank has.
            each.rows.div_(each.columns.mean(1 + each.column, keepdim=True))
        FOREACH._foreach_rsqrt_(means + squares)
        updates = [*_each(each.rows * each.columns for each in sums), *squares]
        FOREACH._foreach_mul_(updates, _gradients(params))
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
            state["row_var"], state["col_var"] = (zeros_without(dim, param) for dim in reversed(dims))
        else:
            state["variance"] = torch.zeros_like(param)
        self.state[param] = state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            # torch has converted it to the parameter's dtype, which is exact.
            state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)


def _each(stacks: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for stack in stacks for tensor in stack.unbind(0)]


def _gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns this rank's parts."""
    return [local_part(param.grad) for param in params if param.grad is not None]
