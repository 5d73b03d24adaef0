"""AdamW by torch, and the same with its first moment in another data type, which torch itself refuses.

Source: `mu_dtype` of optax's Adam, as big_vision sets it. An update uses the first moment as it was computed;
the next update starts from the rounded one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from moe.config import Fraction, NonNegativeFloat
from moe.layout import local_part
from orchestrator.optimizers.base import FOREACH, OptimizerConfig, chunks, decay_groups


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay. Source: the Soft MoE recipe (betas .9 / .999, kernels .03).

    Attributes:
        beta1, beta2: decay of the first and of the second moment.
        state_dtype: data type in which the first moment is held, as `mu_dtype` of big_vision and optax. The
            second moment stays float32: in bfloat16 it could not fall, because an update lowers it by at most
            1 - beta2 = 1e-3 of itself, and rounding to 8 bits undoes that.
    """

    kind: Literal["adamw"] = "adamw"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: NonNegativeFloat = 0.03

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        params, betas = decay_groups(self, model), (self.beta1, self.beta2)
        if self.state_dtype == "bfloat16":
            return AdamW(params, betas=betas, moment_dtype=torch.bfloat16)
        # fused passes over memory once instead of a dozen times, on the CPU too
        return torch.optim.AdamW(params, lr=0.0, betas=betas, fused=True)

    def state_bytes(self, shape: Sequence[int], held: Sequence[int], *, expert: bool) -> int:
        return ((4 if self.state_dtype == "float32" else 2) + 4) * prod(held)


class AdamW(torch.optim.AdamW):
    """AdamW that holds its first moment in `moment_dtype`, and its second moment in the parameters' dtype.

    The kernel needs both in the parameters' dtype. To keep the copy of the first moment small, parameters are
    updated in `chunks`. The update is elementwise, so each rank updates its part of a sharded parameter. As
    in torch, gradients are divided by `grad_scale` if it is set.
    """

    grad_scale: Tensor | None = None

    def __init__(
        self, params: Iterable[dict[str, Any]], *, betas: tuple[float, float], moment_dtype: torch.dtype
    ) -> None:
        super().__init__(params, lr=0.0, betas=betas, fused=True)
        self.moment_dtype = moment_dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for params in chunks(param for param in group["params"] if param.grad is not None):
                self._update(params, group)

    def _update(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[param] or self._start(param) for param in params]
        weights = [local_part(param) for param in params]
        kept = [local_part(state["exp_avg"]) for state in states]
        means = [torch.empty_like(weight) for weight in weights]
        FOREACH._foreach_copy_(means, kept)
        adamw(
            weights,
            [local_part(param.grad) for param in params if param.grad is not None],
            means,
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=self.grad_scale,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        FOREACH._foreach_copy_(kept, means)

    def _start(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state before the first update."""
        self.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, dtype=self.moment_dtype),
            "exp_avg_sq": torch.zeros_like(param),
        }
        return self.state[param]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            # torch has converted it to the parameter's dtype, which is exact.
            state["exp_avg"] = state["exp_avg"].to(self.moment_dtype)
