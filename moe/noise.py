"""Random numbers as a pure function of integer keys.

A step's noise must not depend on the number of ranks, the microbatch or the device, so nothing is drawn from
a generator: an image has a key (a hash of the run's seed, the step and its place in the global batch), and
layers, tokens and experts split it. Source: SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom
number generators"), its state update and finaliser in wrapping int64 arithmetic.
"""

import math

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9e3779b97f4a7c15
_MIX = (-4658895280553007687, -7723592293110705685)  # 0xbf58476d1ce4e5b9, 0x94d049bb133111eb


def mix(keys: Tensor, salt: int | Tensor) -> Tensor:
    """New keys for the purpose `salt`, as many; int64."""
    step = (salt + 1) * _GAMMA
    z = keys + (step if isinstance(step, Tensor) else (step + 2**63) % 2**64 - 2**63)  # wraps, as tensors do
    z = (z ^ _shifted(z, 30)) * _MIX[0]
    z = (z ^ _shifted(z, 27)) * _MIX[1]
    return z ^ _shifted(z, 31)


def split(keys: Tensor, count: int) -> Tensor:
    """(...) -> (..., count): independent keys, the i-th the same whatever `count` is."""
    return mix(keys.unsqueeze(-1), torch.arange(count, device=keys.device))


def uniform(keys: Tensor) -> Tensor:
    """One float32 in (0, 1) per key: odd multiples of 2**-24, which float32 holds exactly."""
    return (_shifted(keys, 41).float() + 0.5) * 2**-23


def normal(keys: Tensor) -> Tensor:
    """One standard normal float32 per key, by inversion; never beyond 5.3."""
    return math.sqrt(2) * torch.erfinv(2 * uniform(keys) - 1)


def dropout(x: Tensor, p: float, keys: Tensor) -> Tensor:
    """Zeroes each of the last dimension's entries with probability `p`, scales the rest; a key per row."""
    return x * (uniform(split(keys, x.shape[-1])) >= p).to(x.dtype) / (1 - p)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts copy the sign
