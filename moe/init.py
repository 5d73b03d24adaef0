"""Random numbers from keys: initial weights by parameter name, noise by image.

Nothing depends on the number of ranks, the microbatch or the device, and the global generator is not used.

Weights: each tensor is drawn from a generator seeded with (seed, parameter name, expert), so a model starts
from the same weights however it is split, and a rank draws only the experts it holds. Whole contiguous
float32 rows are drawn, then sliced and cast, because `Tensor.normal_` gives other numbers for other dtypes,
strides and lengths.

Noise: an image has an int64 key (a hash of the run's seed, the step and its place in the global batch), which
layers, tokens and experts split into keys of their own. Source: SplitMix64 (Steele et al. 2014, "Fast
splittable pseudorandom number generators"), its state update and finaliser in wrapping int64 arithmetic.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

# The part of a whole tensor that a rank holds.
Region = tuple[slice, ...]

_GAMMA = -7046029254386353131  # 0x9e3779b97f4a7c15
_MIX = (-4658895280553007687, -7723592293110705685)  # 0xbf58476d1ce4e5b9, 0x94d049bb133111eb


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The initial distribution of a parameter; `scale`: standard deviation, half-width or constant."""

    distribution: Literal["normal", "uniform", "constant"]
    scale: float
    # Each row of dim 0 has its own generator, so that a rank draws only its own experts; or all have one's.
    rows: Literal["no", "own", "equal"] = "no"

    def per_row(self, *, equal: bool = False) -> "Draw":
        return replace(self, rows="equal" if equal else "own")


def normal(std: float) -> Draw:
    return Draw(distribution="normal", scale=std)


def constant(value: float) -> Draw:
    """Fills with one value, whatever the draw."""
    return Draw(distribution="constant", scale=value)


def zeros() -> Draw:
    return constant(0.0)


def xavier_uniform(fan_in: int, fan_out: int) -> Draw:
    return Draw(distribution="uniform", scale=math.sqrt(6 / (fan_in + fan_out)))


def lecun_normal(fan_in: int) -> Draw:
    """A normal distribution of variance 1 / fan_in."""
    return normal(fan_in**-0.5)


def init_weights(
    module: nn.Module,
    seed: int,
    local: Callable[[Tensor], tuple[Tensor, Region]] | None = None,
    *,
    inside: str = "",
) -> None:
    """Sets every parameter and buffer of `module` in place.

    Modules of this package define their distributions in `draws()`; torch's linear, convolution and norm
    layers have the usual rules. `local` maps a sharded parameter to this rank's tensor and to the
    region of the whole that it covers. `inside` is the name of `module` in its model, e.g. ``blocks.1.mlp``.
    """
    for prefix, owner in module.named_modules(prefix=inside):
        for name, param in owner.named_parameters(recurse=False):
            tensor, region = local(param) if local else (param, tuple(slice(0, n) for n in param.shape))
            fqn = _joined(prefix, name)
            with torch.no_grad():
                _fill(tensor, _draw(owner, prefix, name), seed, fqn, tuple(param.shape), region)
        # Buffers are never sharded.
        for name, buffer in owner.named_buffers(recurse=False):
            _fill(buffer, _draw(owner, prefix, name), seed, name, tuple(buffer.shape), (slice(None),))


def set_unsaved(module: nn.Module, device: torch.device | str | None = None) -> None:
    """Replaces every buffer of `module` that checkpoints do not hold by one with its first value, on `device`
    (None: where the buffer is). It belongs wherever a model gets its memory, before weights are drawn or
    read.

    Raises ValueError if `draws` does not give such a buffer a constant: other first values depend on a seed,
    which checkpoints do not hold.
    """
    for prefix, owner in module.named_modules():
        for name in owner._non_persistent_buffers_set:
            if (buffer := owner._buffers[name]) is not None:
                draw = _draw(owner, prefix, name)
                if draw.distribution != "constant":
                    raise ValueError(
                        f"{_joined(prefix, name)} is a buffer that checkpoints do not hold, and begins with"
                        " random numbers: save it (persistent=True)"
                    )
                setattr(owner, name, torch.full_like(buffer, draw.scale, device=device))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _draw(owner: nn.Module, prefix: str, name: str) -> Draw:
    """Raises ValueError if the first value of a parameter or buffer is unknown."""
    draws = _draws(owner)
    if name not in draws:
        kind = type(owner).__name__
        raise ValueError(
            f"{_joined(prefix, name)} has no first value: give {kind} a method draws() that says it"
            " (a Draw for each parameter and buffer; numbers that are computed belong into forward)"
        )
    return draws[name]


def _draws(owner: nn.Module) -> dict[str, Draw]:
    if hasattr(owner, "draws"):
        return owner.draws()  # pyright: ignore[reportCallIssue]  # nn.Module types every attribute as a Module
    if isinstance(owner, (nn.LayerNorm, nn.GroupNorm)):
        return {"weight": constant(1.0), "bias": zeros()}
    if isinstance(owner, nn.Linear):
        return {"weight": xavier_uniform(owner.in_features, owner.out_features), "bias": zeros()}
    if isinstance(owner, nn.Conv2d):
        return {"weight": lecun_normal(owner.weight[0].numel()), "bias": zeros()}
    return {}


def _fill(tensor: Tensor, draw: Draw, seed: int, fqn: str, shape: tuple[int, ...], region: Region) -> None:
    if draw.distribution == "constant":
        tensor.fill_(draw.scale)
    elif draw.rows != "no":
        for i, row in enumerate(range(*region[0].indices(shape[0]))):
            number = 0 if draw.rows == "equal" else row
            tensor[i].copy_(_numbers(draw, f"{seed}/{fqn}/{number}", shape[1:])[region[1:]])
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


def mix(keys: Tensor, salt: int | Tensor) -> Tensor:
    """Returns a new int64 key for each key; different salts give independent keys."""
    # keys + (salt + 1) * _GAMMA. An arange may be a key or a salt, and Inductor would compute its sums and
    # products in int32, which such constants exceed; it computes ~arange, and what is made of it, in int64.
    if isinstance(salt, Tensor):
        z = keys + ~salt * -_GAMMA
    else:
        z = ((salt + 1) * _GAMMA - 1 + 2**63) % 2**64 - 2**63 - ~keys  # the constant wraps
    z = (z ^ _shifted(z, 30)) * _MIX[0]
    z = (z ^ _shifted(z, 27)) * _MIX[1]
    return z ^ _shifted(z, 31)


def split(keys: Tensor, count: int) -> Tensor:
    """Makes independent keys of each key, (...) -> (..., count); the i-th does not depend on `count`."""
    return mix(keys.unsqueeze(-1), torch.arange(count, device=keys.device))


def uniform(keys: Tensor) -> Tensor:
    """Returns a float32 in (0, 1) per key: odd multiples of 2**-24, which float32 represents exactly."""
    return (_shifted(keys, 41).float() + 0.5) * 2**-23


def gaussian(keys: Tensor) -> Tensor:
    """Returns a standard normal float32 per key, by inversion; its magnitude never exceeds 5.3."""
    return math.sqrt(2) * torch.erfinv(2 * uniform(keys) - 1)


def dropout(x: Tensor, p: float | Tensor, keys: Tensor) -> Tensor:
    """Zeroes entries of the last dimension with probability `p` and scales the rest; one key per row."""
    return x * (uniform(split(keys, x.shape[-1])) >= p).to(x.dtype) / (1 - p)


def _shifted(z: Tensor, bits: int) -> Tensor:
    # A shift of int64 copies the sign, which the mask removes.
    return (z >> bits) & ((1 << (64 - bits)) - 1)
