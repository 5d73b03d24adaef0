"""From encoded bytes to the model's input: decode, crop, flip in uint8; normalise on the device."""

import math
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from orchestrator.data.decode import Picture
from orchestrator.data.randaugment import randaugment


class Box(NamedTuple):
    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Attributes:
    size: side of the square that comes out.
    augment, eval_crop, randaugment, randaugment_magnitude: as in `DataConfig`.
    """

    size: int
    augment: Literal["none", "inception"] = "none"
    eval_crop: float = 0.875
    randaugment: int = 0
    randaugment_magnitude: int = 9

    def __call__(self, encoded: bytes, key: str = "") -> Tensor:
        """One image as (3, size, size) uint8. Randomness is a function of `key` alone, never of the worker.

        Python's generator, which is seeded with the SHA-512 of `key`: numpy's takes 50 us longer to start.
        The order is that of the papers' code: crop, flip, RandAugment.

        Raises:
            BadImage: for bytes that are no whole image.
        """
        picture, rng = Picture(encoded), Random(key)
        if self.augment == "inception":
            box = inception_box(picture.height, picture.width, rng)
            flip = rng.random() < 0.5
        else:
            box = self._central_box(picture.height, picture.width)
            flip = False
        image = _cropped(picture, box, self.size)
        image = tv.horizontal_flip(image) if flip else image
        return randaugment(image, self.randaugment, self.randaugment_magnitude, rng)

    def _central_box(self, height: int, width: int) -> Box:
        """What is kept of an image whose shorter side becomes size / eval_crop, then cropped to size."""
        if height == width == self.size:
            return Box(0, 0, height, width)
        side = max(1, round(min(height, width) * self.eval_crop))
        return Box((height - side) // 2, (width - side) // 2, side, side)


def normalize(images: Tensor) -> Tensor:
    """uint8 -> float in -1..1, as the papers' code has it."""
    return images.float() / 127.5 - 1


def inception_box(height: int, width: int, rng: Random) -> Box:
    """A random part of 5-100 % of the area, aspect 3/4 to 4/3; after ten that do not fit, all of the image.

    Source: Szegedy et al. 2014, as in the pre-training recipe of Soft MoE.
    """
    for _ in range(10):
        area = height * width * rng.uniform(0.05, 1)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Box(rng.randrange(height - h + 1), rng.randrange(width - w + 1), h, w)
    return Box(0, 0, height, width)


def _cropped(picture: Picture, box: Box, size: int) -> Tensor:
    """(3, size, size); decoded no larger than that needs."""
    scale = picture.scale(min(box.height, box.width) / size)

    def reduced(place: int) -> int:
        return (place + scale // 2) // scale  # halves always up: what is `scale` long stays 1 long

    top, left = reduced(box.top), reduced(box.left)
    height, width = reduced(box.top + box.height) - top, reduced(box.left + box.width) - left
    crop = picture.pixels(scale)[None, :, top : top + height, left : left + width]
    crop = crop.contiguous(memory_format=torch.channels_last)  # which is resized in half the time
    return tv.resize(crop, [size, size], antialias=True)[0]
