"""RandAugment: some of fourteen operations, drawn evenly and with replacement, all of one magnitude 0 to 30.

Source: Cubuk et al. 2019; ranges as torchvision's `RandAugment` with 31 bins has them. What an operation
moves out of the image leaves mid-grey behind, as the authors' code does, and not black.
"""

import math
from collections.abc import Callable
from random import Random

from torch import Tensor
from torchvision.transforms.v2 import functional as tv

MOST = 30
GREY = [128.0, 128.0, 128.0]
Operation = Callable[[Tensor, float], Tensor]  # (3, H, W) uint8 and the part of the range, -1 to 1


def randaugment(image: Tensor, operations: int, magnitude: int, rng: Random) -> Tensor:
    """(3, H, W) uint8 -> the same shape, changed by `operations` of them."""
    for _ in range(operations):
        operation = rng.choice(OPERATIONS)
        sign = 1 if rng.random() < 0.5 else -1
        image = operation(image, sign * magnitude / MOST)
    return image


def _moved(image: Tensor, *, x: float = 0, y: float = 0, shear_x: float = 0, shear_y: float = 0) -> Tensor:
    """By pixels, and sheared about the top left corner by a slope."""
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
