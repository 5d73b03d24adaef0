"""RandAugment (Cubuk et al. 2019): some of sixteen operations on each image.

It applies operations that are drawn evenly and with replacement from sixteen,
all of one magnitude. Source: the authors' code (tensorflow/tpu, efficientnet/autoaugment.py), which V-MoE and
big_vision run. A magnitude of 10 is the full range, V-MoE's recipes take 10 to 20; 0 is not the identity,
because darkening, posterizing and solarizing run from strong to weak. Operations are what that code does to
images of 224 pixels, also where its text means something else: Contrast blends with one grey for all images,
and a threshold of 256 overflows to 0. At other sizes ranges in pixels scale with the image.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

import torch
from torch import Tensor

from moe.config import Bound
from orchestrator.data.augment.base import AugmentationConfig, tv

SIDE = 224  # pixels of the images that the published ranges are for
GREY = 128
# The source takes height * width / 256, a count of pixels, for their mean.
CONTRAST_GREY = SIDE * SIDE / 256
Operation = Callable[[Tensor, float, Random], Tensor]  # (3, H, W) uint8, and the part of the full range


@dataclass(frozen=True, kw_only=True)
class RandAugmentConfig(AugmentationConfig):
    """Applies random operations, one after another.

    Attributes:
        operations: per image.
        magnitude: their strength; the papers' recipes take 10, 15 and 20.
    """

    kind: Literal["randaugment"] = "randaugment"
    operations: Annotated[int, Bound(">=", 1), Bound("<=", 16)] = 2
    magnitude: Annotated[int, Bound(">=", 0), Bound("<=", 30)] = 10

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        for _ in range(self.operations):
            image = rng.choice(tuple(OPERATIONS.values()))(image, self.magnitude / 10, rng)
        return image


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, part, rng: tv().autocontrast(image),
    "Equalize": lambda image, part, rng: tv().equalize(image),
    "Invert": lambda image, part, rng: tv().invert(image),
    "Rotate": lambda image, part, rng: tv().rotate(image, _signed(30 * part, rng), fill=[GREY]),
    # A shift by all eight bits is a shift by seven in TensorFlow.
    "Posterize": lambda image, part, rng: tv().posterize(image, min(8, max(1, int(4 * part)))),
    "Solarize": lambda image, part, rng: tv().solarize(image, int(256 * part) % 256),
    "Color": lambda image, part, rng: tv().adjust_saturation(image, _factor(part)),
    "Contrast": lambda image, part, rng: _contrasted(image, _factor(part)),
    "Brightness": lambda image, part, rng: tv().adjust_brightness(image, _factor(part)),
    "Sharpness": lambda image, part, rng: tv().adjust_sharpness(image, _factor(part)),
    "ShearX": lambda image, part, rng: _moved(image, shear_x=_signed(0.3 * part, rng)),
    "ShearY": lambda image, part, rng: _moved(image, shear_y=_signed(0.3 * part, rng)),
    "TranslateX": lambda image, part, rng: _moved(image, x=_signed(100 * part, rng)),
    "TranslateY": lambda image, part, rng: _moved(image, y=_signed(100 * part, rng)),
    "Cutout": lambda image, part, rng: _cut_out(image, 40 * part, rng),
    "SolarizeAdd": lambda image, part, rng: _brightened_shadows(image, int(110 * part)),
}


def _signed(value: float, rng: Random) -> float:
    return value if rng.random() < 0.5 else -value


def _factor(part: float) -> float:
    """Returns the share of the image in a blend with its degenerate form; 1 leaves the image as it is."""
    return 0.1 + 1.8 * part


def _contrasted(image: Tensor, factor: float) -> Tensor:
    return (CONTRAST_GREY + factor * (image - CONTRAST_GREY)).clamp(0, 255).to(torch.uint8)


def _moved(image: Tensor, *, x: float = 0, y: float = 0, shear_x: float = 0, shear_y: float = 0) -> Tensor:
    """Translates by pixels of an image of side `SIDE`, and shears about the top left corner by a slope."""
    height, width = image.shape[1:]
    translate: list[float] = [round(x * width / SIDE), round(y * height / SIDE)]
    shear = [math.degrees(math.atan(shear_x)), math.degrees(math.atan(shear_y))]
    return tv().affine(image, angle=0, translate=translate, scale=1, shear=shear, center=[0, 0], fill=[GREY])


def _cut_out(image: Tensor, half: float, rng: Random) -> Tensor:
    """Greys a square around a random pixel; `half` its side in pixels of an image of side `SIDE`."""
    height, width = image.shape[1:]
    top, left, bottom, right = square(rng, int(half * width / SIDE), height, width)
    image = image.clone()
    image[:, top:bottom, left:right] = GREY
    return image


def _brightened_shadows(image: Tensor, addition: int) -> Tensor:
    return torch.where(image < 128, (image.int() + addition).clamp(max=255), image).to(torch.uint8)


def square(rng: Random, half: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Draws (top, left, bottom, right) of a square around a random pixel, as the image's border cuts it."""
    row, column = rng.randrange(height), rng.randrange(width)
    return max(0, row - half), max(0, column - half), min(height, row + half), min(width, column + half)
