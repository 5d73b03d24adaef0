"""RandAugment's operations against torchvision's, and how they are drawn."""

from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandAugment

from orchestrator.data.randaugment import GREY, OPERATIONS, randaugment

NAMES = [  # torchvision's, in our order
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
]
SIGNED = {*NAMES[1:10]}
COARSE = Image.fromarray(np.random.default_rng(0).integers(30, 200, (6, 7, 3), dtype=np.uint8))
IMAGE = torch.from_numpy(np.array(COARSE.resize((48, 40), Image.Resampling.BICUBIC))).permute(2, 0, 1)


def published(name: str, magnitude: int, sign: int) -> Tensor:
    """What torchvision makes of the image with this operation."""
    theirs = RandAugment(interpolation=InterpolationMode.NEAREST, fill=GREY)
    magnitudes, signed = theirs._AUGMENTATION_SPACE[name]
    values = magnitudes(31, *IMAGE.shape[1:])
    value = 0.0 if values is None else float(values[magnitude]) * (sign if signed else 1)
    return theirs._apply_image_or_video_transform(
        IMAGE, name, value, interpolation=theirs.interpolation, fill=theirs._fill
    )


def drawn(calls: int, operations: int = 1, magnitude: int = 15) -> list[bytes]:
    rng = Random(0)
    return [randaugment(IMAGE, operations, magnitude, rng).numpy().tobytes() for _ in range(calls)]


@pytest.mark.parametrize("magnitude", [0, 1, 9, 15, 22, 30])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", NAMES)
def test_operations_are_torchvisions(name: str, sign: int, magnitude: int) -> None:
    found = OPERATIONS[NAMES.index(name)](IMAGE, sign * magnitude / 30)
    assert found.dtype == torch.uint8
    assert found.shape == IMAGE.shape
    difference = (found.int() - published(name, magnitude, sign).int()).abs()
    # what lies within a rounding error of a pixel's border may be taken from either side of it
    assert (difference > 1).float().mean() < 0.01


@pytest.mark.parametrize("name", NAMES[1:])
def test_operations_do_something(name: str) -> None:
    assert not torch.equal(OPERATIONS[NAMES.index(name)](IMAGE, 0.5), IMAGE)


def test_all_are_drawn_with_both_signs_and_evenly() -> None:
    found = drawn(3000)
    possible = {
        OPERATIONS[i](IMAGE, sign * 0.5).numpy().tobytes(): len(NAMES) * (2 if name in SIGNED else 1)
        for i, name in enumerate(NAMES)
        for sign in (1, -1)
    }
    assert {*found} == {*possible}
    for outcome, one_in in possible.items():
        expected = 3000 / one_in
        assert abs(found.count(outcome) - expected) < 5 * expected**0.5


def test_no_operations_are_the_image_itself() -> None:
    assert drawn(1, operations=0) == [IMAGE.numpy().tobytes()]


def test_operations_follow_one_another() -> None:
    rng, same = Random(3), Random(3)
    twice = randaugment(randaugment(IMAGE, 1, 9, rng), 1, 9, rng)
    assert torch.equal(randaugment(IMAGE, 2, 9, same), twice)


def test_one_pixel() -> None:
    for n in range(60):
        image = randaugment(torch.full((3, 1, 1), 200, dtype=torch.uint8), 3, 30, Random(n))
        assert image.shape == (3, 1, 1)
