"""Keyed initialisation: every tensor is drawn from a generator seeded by its own name.

The numbers depend on (seed, parameter name, expert) alone, so a model starts from the same weights however
it is split over ranks, and a rank draws only the experts it holds. Full contiguous float32 rows are drawn
and then sliced and cast, because `Tensor.normal_` gives other numbers for other dtypes, strides and
lengths.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

Region = tuple[slice, ...]  # which part of the whole tensor a rank holds


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How one parameter starts. `scale`: standard deviation, half-width or the constant itself."""

    distribution: Literal["normal", "uniform", "constant"]
    scale: float
    rows: bool = False  # one generator per row of dim 0, so that a rank draws only its own experts

    def per_row(self) -> "Draw":
        return replace(self, rows=True)


def normal(std: float) -> Draw:
    return Draw(distribution="normal", scale=std)


def constant(value: float) -> Draw:
    return Draw(distribution="constant", scale=value)


def zeros() -> Draw:
    return constant(0.0)


def xavier_uniform(fan_in: int, fan_out: int) -> Draw:
    return Draw(distribution="uniform", scale=math.sqrt(6 / (fan_in + fan_out)))


def lecun_normal(fan_in: int) -> Draw:
    return normal(fan_in**-0.5)


def init_weights(
    module: nn.Module, seed: int, local: Callable[[Tensor], tuple[Tensor, Region]] | None = None
) -> None:
    """Sets every parameter and buffer of `module` in place.

    Our own modules say how in `draws()`; `nn.Linear`, `nn.Conv2d` and `nn.LayerNorm` have the usual rules.
    `local` maps a sharded parameter to this rank's tensor and the region of the whole that it covers.
    """
    for prefix, owner in module.named_modules():
        draws = _draws(owner)
        for name, param in owner.named_parameters(recurse=False):
            tensor, region = local(param) if local else (param, tuple(slice(0, n) for n in param.shape))
            fqn = f"{prefix}.{name}" if prefix else name
            with torch.no_grad():
                _fill(tensor, draws[name], seed, fqn, tuple(param.shape), region)
        for name, buffer in owner.named_buffers(recurse=False):  # buffers are never sharded
            _fill(buffer, draws[name], seed, name, tuple(buffer.shape), (slice(None),))


def _draws(owner: nn.Module) -> dict[str, Draw]:
    if hasattr(owner, "draws"):
        return owner.draws()  # pyright: ignore[reportCallIssue]  # nn.Module types every attribute as a Module
    if isinstance(owner, nn.LayerNorm):
        return {"weight": constant(1.0), "bias": zeros()}
    if isinstance(owner, nn.Linear):
        return {"weight": xavier_uniform(owner.in_features, owner.out_features), "bias": zeros()}
    if isinstance(owner, nn.Conv2d):
        return {"weight": lecun_normal(owner.weight[0].numel()), "bias": zeros()}
    return {}


def _fill(tensor: Tensor, draw: Draw, seed: int, fqn: str, shape: tuple[int, ...], region: Region) -> None:
    if draw.distribution == "constant":
        tensor.fill_(draw.scale)
    elif draw.rows:
        for i, row in enumerate(range(*region[0].indices(shape[0]))):
            tensor[i].copy_(_numbers(draw, f"{seed}/{fqn}/{row}", shape[1:])[region[1:]])
    else:
        tensor.copy_(_numbers(draw, f"{seed}/{fqn}", shape)[region])


def _numbers(draw: Draw, key: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    )
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    if draw.distribution == "normal":
        return values.normal_(0, draw.scale, generator=generator)
    return values.uniform_(-draw.scale, draw.scale, generator=generator)
