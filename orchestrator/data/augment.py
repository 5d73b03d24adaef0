"""Augmentation after the crop: RandAugment of each image, mixup and CutMix of neighbours in a batch.

RandAugment (Cubuk et al. 2019) applies operations that are drawn evenly and with replacement from fourteen,
with one magnitude, 0 to 30; ranges are torchvision's for 31 bins. Pixels that an operation uncovers become
mid-grey, as in the authors' code, not black.

mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019) mix images 0 and 1, 2 and 3, .., so a batch may be cut
into even parts over workers and passes. A pair shares its draw: the weight of an image's own label, and the
box (top, left, bottom, right) in which the partner is shown. An empty box means mixup: pixels are mixed like
labels.
"""

import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

MAX_MAGNITUDE = 30
GREY = [128.0, 128.0, 128.0]
Operation = Callable[[Tensor, float], Tensor]  # (3, H, W) uint8, and a fraction of the range, -1 to 1
Draw = tuple[float, int, int, int, int]
UNMIXED: Draw = (1, 0, 0, 0, 0)


def randaugment(image: Tensor, operations: int, magnitude: int, rng: Random) -> Tensor:
    """Applies `operations` random operations to a (3, H, W) uint8 image, one after another."""
    for _ in range(operations):
        operation = rng.choice(OPERATIONS)
        sign = 1 if rng.random() < 0.5 else -1
        image = operation(image, sign * magnitude / MAX_MAGNITUDE)
    return image


def _moved(image: Tensor, *, x: float = 0, y: float = 0, shear_x: float = 0, shear_y: float = 0) -> Tensor:
    """Translates by pixels, and shears about the top left corner by a slope."""
    shear = [math.degrees(math.atan(shear_x)), math.degrees(math.atan(shear_y))]
    return tv.affine(
        image, angle=0, translate=[int(x), int(y)], scale=1, shear=shear, center=[0, 0], fill=GREY
    )


OPERATIONS: tuple[Operation, ...] = (
    lambda image, _: image,
    lambda image, part: _moved(image, shear_x=0.3 * part),
    lambda image, part: _moved(image, shear_y=0.3 * part),
    lambda image, part: _moved(image, x=150 / 331 * image.shape[2] * part),
    lambda image, part: _moved(image, y=150 / 331 * image.shape[1] * part),
    lambda image, part: tv.rotate(image, 30 * part, fill=GREY),
    lambda image, part: tv.adjust_brightness(image, 1 + 0.9 * part),
    lambda image, part: tv.adjust_saturation(image, 1 + 0.9 * part),
    lambda image, part: tv.adjust_contrast(image, 1 + 0.9 * part),
    lambda image, part: tv.adjust_sharpness(image, 1 + 0.9 * part),
    lambda image, part: tv.posterize(image, 8 - round(4 * abs(part))),  # bits
    lambda image, part: tv.solarize(image, 255 * (1 - abs(part))),
    lambda image, _: tv.autocontrast(image),
    lambda image, _: tv.equalize(image),
)


def draw(keys: Sequence[str], *, mixup: float, cutmix: float, size: int) -> NDArray[np.float32]:
    """Returns (B, 5): weight and box for images of side `size`, a function of the pairs' keys alone.

    `mixup` and `cutmix` are parameters of Beta distributions, 0 for never; with both, each is as frequent.
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
    """Mixes (B, 3, S, S) float32 images by (B, 5) draws -> (B, 3, S, S)."""
    weight, top, left, bottom, right = draws[..., None, None].unbind(1)  # (B, 1, 1) each
    position = torch.arange(images.shape[-1], device=images.device)
    rows = (position >= top) & (position < bottom)  # (B, 1, S)
    columns = (position >= left) & (position < right)
    inside = rows.transpose(1, 2) & columns  # (B, S, S)
    own = torch.where(bottom > top, (~inside).float(), weight)
    return torch.lerp(partners(images), images, own[:, None])


def partners(batch: Tensor) -> Tensor:
    """Returns (B, ..): for each entry of the batch the entry that it is mixed with."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def cross_entropy(logits: Tensor, label: Tensor, draws: Tensor) -> Tensor:
    """Returns the sum over the batch; an image's two labels are weighted like its pixels."""
    own = F.cross_entropy(logits, label, reduction="none")
    other = F.cross_entropy(logits, partners(label), reduction="none")
    return torch.lerp(other, own, draws[:, 0]).sum()


def dominant_label(label: Tensor, draws: Tensor) -> Tensor:
    """Returns (B,): the one of an image's two labels that weighs more."""
    return torch.where(draws[:, 0] < 0.5, partners(label), label)


def _cutmix(rng: Random, parameter: float, size: int) -> Draw:
    """Draws a box around a random pixel; the weight is the fraction of the area outside of the box."""
    half = int(size * math.sqrt(1 - rng.betavariate(parameter, parameter))) // 2
    row, column = rng.randrange(size), rng.randrange(size)
    top, left = max(0, row - half), max(0, column - half)
    bottom, right = min(size, row + half), min(size, column + half)
    return 1 - (bottom - top) * (right - left) / size**2, top, left, bottom, right
