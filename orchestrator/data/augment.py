"""Augmentation after the crop: operations on each image, mixup and CutMix of neighbours in a batch.

RandAugment (Cubuk et al. 2019) applies operations that are drawn evenly and with replacement from sixteen,
all of one magnitude. Source: the authors' code (tensorflow/tpu, efficientnet/autoaugment.py), which V-MoE and
big_vision run. A magnitude of 10 is the full range, V-MoE's recipes take 10 to 20; 0 is not the identity,
because darkening, posterizing and solarizing run from strong to weak. Operations are what that code does to
images of 224 pixels, also where its text means something else: Contrast blends with one grey for all images,
and a threshold of 256 overflows to 0. At other sizes ranges in pixels scale with the image.

3-Augment and the jitter of colours are those of DeiT III (Touvron et al. 2022, https://arxiv.org/abs/2204.07118,
section 3): its code applies them to Pillow images, from which torchvision's blur differs by up to 6 of 255.
Erasing is Zhong et al. 2017 (https://arxiv.org/abs/1708.04896), with their noise.

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
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

SIDE = 224  # pixels of the images that the published ranges are for
GREY = 128
# The source takes height * width / 256, a count of pixels, for their mean.
CONTRAST_GREY = SIDE * SIDE / 256
Operation = Callable[[Tensor, float, Random], Tensor]  # (3, H, W) uint8, and the part of the full range
Mixing = tuple[float, int, int, int, int]
UNMIXED: Mixing = (1, 0, 0, 0, 0)


def randaugment(image: Tensor, operations: int, magnitude: int, rng: Random) -> Tensor:
    """Applies `operations` random operations to a (3, H, W) uint8 image, one after another."""
    for _ in range(operations):
        image = rng.choice(tuple(OPERATIONS.values()))(image, magnitude / 10, rng)
    return image


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, part, rng: tv.autocontrast(image),
    "Equalize": lambda image, part, rng: tv.equalize(image),
    "Invert": lambda image, part, rng: tv.invert(image),
    "Rotate": lambda image, part, rng: tv.rotate(image, _signed(30 * part, rng), fill=[GREY]),
    # A shift by all eight bits is a shift by seven in TensorFlow.
    "Posterize": lambda image, part, rng: tv.posterize(image, min(8, max(1, int(4 * part)))),
    "Solarize": lambda image, part, rng: tv.solarize(image, int(256 * part) % 256),
    "Color": lambda image, part, rng: tv.adjust_saturation(image, _factor(part)),
    "Contrast": lambda image, part, rng: _contrasted(image, _factor(part)),
    "Brightness": lambda image, part, rng: tv.adjust_brightness(image, _factor(part)),
    "Sharpness": lambda image, part, rng: tv.adjust_sharpness(image, _factor(part)),
    "ShearX": lambda image, part, rng: _moved(image, shear_x=_signed(0.3 * part, rng)),
    "ShearY": lambda image, part, rng: _moved(image, shear_y=_signed(0.3 * part, rng)),
    "TranslateX": lambda image, part, rng: _moved(image, x=_signed(100 * part, rng)),
    "TranslateY": lambda image, part, rng: _moved(image, y=_signed(100 * part, rng)),
    "Cutout": lambda image, part, rng: _cut_out(image, 40 * part, rng),
    "SolarizeAdd": lambda image, part, rng: _brightened_shadows(image, int(110 * part)),
}


def three_augment(image: Tensor, rng: Random) -> Tensor:
    """Makes a (3, H, W) uint8 image grey, solarizes it at 128, or blurs it by 0.1 to 2 pixels of `SIDE`."""
    match rng.randrange(3):
        case 0:
            return tv.rgb_to_grayscale(image, num_output_channels=3)
        case 1:
            return tv.solarize(image, 128)
        case _:
            height, width = image.shape[1:]
            # Reflected borders are narrower than the image.
            kernel = min(17, 2 * min(height, width) - 1)
            sigma = rng.uniform(0.1, 2) * width / SIDE
            return tv.gaussian_blur(image, [kernel, kernel], [sigma, sigma])


def color_jitter(image: Tensor, strength: float, rng: Random) -> Tensor:
    """Multiplies brightness, contrast and saturation by 1 - strength to 1 + strength, in random order."""
    for adjust in rng.sample((tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation), 3):
        image = adjust(image, rng.uniform(1 - strength, 1 + strength))
    return image


def erase(image: Tensor, rng: Random) -> Tensor:
    """Replaces a rectangle of 2-33 % of the area, aspect 0.3 to 3.3, by noise; ten draws may not fit."""
    height, width = image.shape[1:]
    for _ in range(10):
        area = height * width * rng.uniform(0.02, 0.33)
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(3.3)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            noise = torch.frombuffer(bytearray(rng.randbytes(3 * h * w)), dtype=torch.uint8).view(3, h, w)
            return tv.erase(image, rng.randrange(height - h + 1), rng.randrange(width - w + 1), h, w, noise)
    return image


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
    return tv.affine(image, angle=0, translate=translate, scale=1, shear=shear, center=[0, 0], fill=[GREY])


def _cut_out(image: Tensor, half: float, rng: Random) -> Tensor:
    """Greys a square around a random pixel; `half` its side in pixels of an image of side `SIDE`."""
    height, width = image.shape[1:]
    top, left, bottom, right = _box(rng, int(half * width / SIDE), height, width)
    image = image.clone()
    image[:, top:bottom, left:right] = GREY
    return image


def _brightened_shadows(image: Tensor, addition: int) -> Tensor:
    return torch.where(image < 128, (image.int() + addition).clamp(max=255), image).to(torch.uint8)


def _box(rng: Random, half: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Draws (top, left, bottom, right) of a square around a random pixel, as the image's border cuts it."""
    row, column = rng.randrange(height), rng.randrange(width)
    return max(0, row - half), max(0, column - half), min(height, row + half), min(width, column + half)


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


def _cutmix(rng: Random, parameter: float, size: int) -> Mixing:
    """Draws a box around a random pixel; the weight is the fraction of the area outside of the box."""
    half = int(size * math.sqrt(1 - rng.betavariate(parameter, parameter))) // 2
    top, left, bottom, right = _box(rng, half, size, size)
    return 1 - (bottom - top) * (right - left) / size**2, top, left, bottom, right
