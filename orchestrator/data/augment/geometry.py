"""Crops, flips and shifts: the part of an image that is seen, and how it lies."""

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from orchestrator.data.augment.base import AugmentationConfig, Box, Stage


@dataclass(frozen=True, kw_only=True)
class FlipConfig(AugmentationConfig):
    """Mirrors half of the images."""

    kind: Literal["flip"] = "flip"

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        return _mirrored(image, rng)


@dataclass(frozen=True, kw_only=True)
class ShiftConfig(AugmentationConfig):
    """Moves an image by up to an eighth of its side along each axis, and fills with black.

    Source: He et al. 2016, section 4.2: 4 of 32 pixels.
    """

    kind: Literal["shift"] = "shift"

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        size = image.shape[-1]
        most = size // 8
        top, left = rng.randint(0, 2 * most), rng.randint(0, 2 * most)
        return F.pad(image, [most] * 4)[:, top : top + size, left : left + size]


@dataclass(frozen=True, kw_only=True)
class CropConfig(AugmentationConfig):
    """Draws a place of a box of six sevenths of both sides.

    Source: BiT and ViT in fine-tuning, which resize to 448 x 448 and crop 384 x 384.
    """

    kind: Literal["crop"] = "crop"
    stage: ClassVar[Stage] = "crop"

    def box(self, height: int, width: int, rng: Random) -> Box:
        return _six_sevenths(height, width, rng)


@dataclass(frozen=True, kw_only=True)
class CropFlipConfig(AugmentationConfig):
    """Crops six sevenths of both sides, and mirrors half of the images."""

    kind: Literal["crop_flip"] = "crop_flip"
    stage: ClassVar[Stage] = "crop"

    def box(self, height: int, width: int, rng: Random) -> Box:
        return _six_sevenths(height, width, rng)

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        return _mirrored(image, rng)


@dataclass(frozen=True, kw_only=True)
class InceptionConfig(AugmentationConfig):
    """Draws a box of 5-100 % of the area, aspect 3/4 to 4/3, or takes the whole image if ten draws do not
    fit; mirrors half of the images.

    Source: Szegedy et al. 2014, as in the pre-training recipe of Soft MoE.
    """

    kind: Literal["inception"] = "inception"
    stage: ClassVar[Stage] = "crop"

    def box(self, height: int, width: int, rng: Random) -> Box:
        for _ in range(10):
            area = height * width * rng.uniform(0.05, 1)
            aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return Box(rng.randrange(height - h + 1), rng.randrange(width - w + 1), h, w)
        return Box(0, 0, height, width)

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        return _mirrored(image, rng)


def _six_sevenths(height: int, width: int, rng: Random) -> Box:
    h, w = (max(1, round(side * 6 / 7)) for side in (height, width))
    return Box(rng.randrange(height - h + 1), rng.randrange(width - w + 1), h, w)


def _mirrored(image: Tensor, rng: Random) -> Tensor:
    return image.flip(-1) if rng.random() < 0.5 else image
