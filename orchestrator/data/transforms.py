"""From encoded bytes to the model's input: decode, crop, flip in uint8; normalise on the device."""

import hashlib
import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import functional as tv

Augment = Literal["none", "inception"]


def prepare(encoded: bytes, size: int, *, augment: Augment = "none", key: str = "") -> Tensor:
    """One image as (3, size, size) uint8. Randomness is a function of `key` alone, never of the worker."""
    image = decode(encoded)
    if augment == "inception":
        return _inception_crop_flip(image, size, _generator(key))
    if image.shape[1:] == (size, size):
        return image
    short = min(image.shape[1:])
    return tv.resize(tv.center_crop(image, [short, short]), [size, size], antialias=True)


def decode(encoded: bytes) -> Tensor:
    """JPEG or PNG as (3, height, width)."""
    return decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.RGB)


def normalize(images: Tensor) -> Tensor:
    """uint8 -> float in -1..1, as the papers' code has it."""
    return images.float() / 127.5 - 1


def _generator(key: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big"))


def _inception_crop_flip(image: Tensor, size: int, rng: np.random.Generator) -> Tensor:
    """A random part of 5-100 % of the area, aspect 3/4 to 4/3; mirrored half of the time.

    Source: Szegedy et al. 2014, as in the pre-training recipe of Soft MoE.
    """
    height, width = image.shape[1:]
    top, left, h, w = 0, 0, height, width
    for _ in range(10):
        area = height * width * rng.uniform(0.05, 1)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w_try, h_try = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w_try <= width and 0 < h_try <= height:
            h, w = h_try, w_try
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            break
    crop = tv.resized_crop(image, top, left, h, w, [size, size], antialias=True)
    return tv.horizontal_flip(crop) if rng.random() < 0.5 else crop
