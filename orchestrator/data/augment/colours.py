"""3-Augment and the jitter of colours of DeiT III, and erasing.

The first two are those of Touvron et al. 2022 (https://arxiv.org/abs/2204.07118, section 3): its code applies
them to Pillow images, from which torchvision's blur differs by up to 6 of 255. Erasing is Zhong et al. 2017
(https://arxiv.org/abs/1708.04896), with their noise.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

import torch
from torch import Tensor

from moe.config import Bound
from orchestrator.data.augment.base import AugmentationConfig, tv
from orchestrator.data.augment.randaugment import SIDE

Portion = Annotated[float, Bound(">", 0), Bound("<=", 1)]


@dataclass(frozen=True, kw_only=True)
class ThreeAugmentConfig(AugmentationConfig):
    """Makes an image grey, solarizes it at 128, or blurs it by 0.1 to 2 pixels of `SIDE`, evenly."""

    kind: Literal["three_augment"] = "three_augment"

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        match rng.randrange(3):
            case 0:
                return tv().rgb_to_grayscale(image, num_output_channels=3)
            case 1:
                return tv().solarize(image, 128)
            case _:
                height, width = image.shape[1:]
                # Reflected borders are narrower than the image.
                kernel = min(17, 2 * min(height, width) - 1)
                sigma = rng.uniform(0.1, 2) * width / SIDE
                return tv().gaussian_blur(image, [kernel, kernel], [sigma, sigma])


@dataclass(frozen=True, kw_only=True)
class ColorJitterConfig(AugmentationConfig):
    """Multiplies brightness, contrast and saturation by 1 - strength to 1 + strength, in random order."""

    kind: Literal["color_jitter"] = "color_jitter"
    strength: Portion = 0.3

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        for adjust in rng.sample((tv().adjust_brightness, tv().adjust_contrast, tv().adjust_saturation), 3):
            image = adjust(image, rng.uniform(1 - self.strength, 1 + self.strength))
        return image


@dataclass(frozen=True, kw_only=True)
class RandomErasingConfig(AugmentationConfig):
    """Replaces a rectangle of 2-33 % of the area, aspect 0.3 to 3.3, by noise; ten draws may not fit.

    Attributes:
        fraction: of the images.
    """

    kind: Literal["random_erasing"] = "random_erasing"
    fraction: Portion = 0.5

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        if rng.random() >= self.fraction:
            return image
        height, width = image.shape[1:]
        for _ in range(10):
            area = height * width * rng.uniform(0.02, 0.33)
            aspect = math.exp(rng.uniform(math.log(0.3), math.log(3.3)))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < h < height and 0 < w < width:
                noise = torch.frombuffer(bytearray(rng.randbytes(3 * h * w)), dtype=torch.uint8).view(3, h, w)
                return tv().erase(
                    image, rng.randrange(height - h + 1), rng.randrange(width - w + 1), h, w, noise
                )
        return image
