"""Images of a batch mixed with their neighbours: mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019).

Partners are 0 and 1, 2 and 3, ..., so a batch may be cut into even parts over workers and passes. A pair
shares its draw: the weight of an image's own label, and the box (top, left, bottom, right) that shows the
partner. An empty box is mixup: all pixels are mixed as the labels are.
"""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Draw = tuple[float, int, int, int, int]
UNMIXED: Draw = (1, 0, 0, 0, 0)


def draw(keys: Sequence[str], *, mixup: float, cutmix: float, size: int) -> NDArray[np.float32]:
    """(B, 5): weight and box of images of side `size`, a function of the pairs' keys alone.

    `mixup` and `cutmix` are parameters of Beta distributions, 0: never; with both, either as often.
    """
    draws = np.array([UNMIXED] * len(keys), np.float32).reshape(-1, 5)
    if mixup or cutmix:
        for i in range(0, len(keys), 2):
            rng = Random(f"mix/{keys[i]}/{keys[i + 1]}")
            cut = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
            draws[i : i + 2] = (
                _cutmix(rng, cutmix, size) if cut else (rng.betavariate(mixup, mixup), 0, 0, 0, 0)
            )
    return draws


def mix(images: Tensor, draws: Tensor) -> Tensor:
    """(B, 3, S, S) float32 and (B, 5) -> (B, 3, S, S)."""
    weight, top, left, bottom, right = draws[..., None, None].unbind(1)  # (B, 1, 1) each
    place = torch.arange(images.shape[-1], device=images.device)
    rows = (place >= top) & (place < bottom)  # (B, 1, S)
    columns = (place >= left) & (place < right)
    inside = rows.transpose(1, 2) & columns  # (B, S, S)
    own = torch.where(bottom > top, (~inside).float(), weight)
    return torch.lerp(partners(images), images, own[:, None])


def partners(batch: Tensor) -> Tensor:
    """(B, ...): what each entry is mixed with."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def cross_entropy(logits: Tensor, label: Tensor, draws: Tensor) -> Tensor:
    """Sum over the batch, each image's two labels weighted as they are in it."""
    own = F.cross_entropy(logits, label, reduction="none")
    other = F.cross_entropy(logits, partners(label), reduction="none")
    return torch.lerp(other, own, draws[:, 0]).sum()


def heavier(label: Tensor, draws: Tensor) -> Tensor:
    """(B,): of an image's two labels the one that it shows more of."""
    return torch.where(draws[:, 0] < 0.5, partners(label), label)


def _cutmix(rng: Random, parameter: float, size: int) -> Draw:
    """A box of the drawn share of the area about any pixel; its weight is what is left of it in the image."""
    half = int(size * math.sqrt(1 - rng.betavariate(parameter, parameter))) // 2
    row, column = rng.randrange(size), rng.randrange(size)
    top, left = max(0, row - half), max(0, column - half)
    bottom, right = min(size, row + half), min(size, column + half)
    return 1 - (bottom - top) * (right - left) / size**2, top, left, bottom, right
