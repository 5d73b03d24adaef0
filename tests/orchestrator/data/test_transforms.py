"""Decoding and cropping, on images whose colours are their coordinates."""

import hashlib
import io
import math
import random
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from orchestrator.data.decode import BadImage, Picture, decode
from orchestrator.data.randaugment import randaugment
from orchestrator.data.transforms import Transform, inception_box, normalize


def encoded(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype("uint8")).save(buffer, format=kind, **options)
    return buffer.getvalue()


def coordinates(height: int, width: int) -> np.ndarray:
    """Red is x, green is y."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y, 0 * x], axis=-1)


def white(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 255)


def noise(height: int, width: int) -> np.ndarray:
    """Coarse, so that it survives being made smaller."""
    coarse = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


INCEPTION = Transform(size=16, augment="inception")
SQUARE = encoded(coordinates(256, 256))


@pytest.mark.parametrize(("height", "width", "top", "left"), [(8, 20, 0, 6), (20, 8, 6, 0), (8, 8, 0, 0)])
def test_without_augmentation_the_middle_is_seen(height: int, width: int, top: int, left: int) -> None:
    image = Transform(size=8, eval_crop=1)(encoded(coordinates(height, width)))
    middle = coordinates(height, width)[top : top + 8, left : left + 8]
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), middle)


def test_resizing_averages() -> None:
    """Half the size with antialiasing: no pixel of the fine stripes survives alone."""
    stripes = np.zeros((16, 16, 3))
    stripes[:, ::2] = 200
    image = Transform(size=8, eval_crop=1)(encoded(stripes))
    assert 60 < image.float().min() <= image.float().max() < 140


@pytest.mark.parametrize("augment", ["none", "inception"])
@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 90), (90, 1), (7, 200), (200, 7), (33, 32), (5, 5)]
)
def test_crops_stay_inside(height: int, width: int, augment: str) -> None:
    """Whatever lies outside an image would be black."""
    content = encoded(white(height, width))
    transform = Transform(size=6, augment=augment)
    for n in range(30):
        image = transform(content, str(n))
        assert tuple(image.shape) == (3, 6, 6)
        assert image.min() == 255


def test_the_key_alone_decides() -> None:
    image = encoded(coordinates(100, 120))
    first, again, other = (INCEPTION(image, key) for key in ("a", "a", "b"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({INCEPTION(image, str(n)).numpy().tobytes() for n in range(50)}) == 50


def box(key: str) -> tuple[float, float, bool]:
    """Height and width of the crop from a 256x256 image as parts of it, and whether it is mirrored."""
    red, green, _ = INCEPTION(SQUARE, key).double()
    per_pixel_x, per_pixel_y = (red[:, 12] - red[:, 3]).mean() / 9, (green[12] - green[3]).mean() / 9
    return float(per_pixel_y) * 16 / 256, abs(float(per_pixel_x)) * 16 / 256, bool(per_pixel_x < 0)


def simulated(rng: np.random.Generator) -> float:
    """The area that the definition gives for a square."""
    for _ in range(10):
        area, aspect = rng.uniform(0.05, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        if area * aspect <= 1 and area / aspect <= 1:
            return area
    return 1.0


def test_statistics_of_the_inception_crop() -> None:
    heights, widths, mirrored = map(np.array, zip(*(box(str(n)) for n in range(500)), strict=True))
    areas, aspects = heights * widths, widths / heights
    assert areas.min() > 0.045
    assert areas.max() < 1.02
    assert areas.min() < 0.1  # small crops do occur
    rng = np.random.default_rng(0)
    expected = np.array([simulated(rng) for _ in range(20_000)])
    assert abs(areas.mean() - expected.mean()) < 4 * expected.std() / math.sqrt(500)
    assert aspects.min() > 3 / 4 * 0.97
    assert aspects.max() < 4 / 3 * 1.03
    assert abs(np.log(aspects).mean()) < 0.04
    assert 0.42 < mirrored.mean() < 0.58


def test_randomness_is_the_same_in_every_process() -> None:
    """Not Python's hash of the key, which differs between them."""
    rng = Random(int.from_bytes(b"key" + hashlib.sha512(b"key").digest(), "big"))
    assert box("key")[1] == pytest.approx(inception_box(256, 256, rng).width / 256, rel=0.02)


def test_normalize() -> None:
    assert normalize(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


@pytest.mark.parametrize(("height", "width"), [(320, 480), (480, 320), (16, 24)])
def test_evaluation_is_resizing_and_then_cropping(height: int, width: int) -> None:
    """The definition, in two steps: shorter side to size / eval_crop, then the middle."""
    content = encoded(noise(height, width))
    resized = tv.resize(decode(content), [32], antialias=True)  # 28 / 0.875
    expected = tv.center_crop(resized, [28, 28]).int()
    found = Transform(size=28, eval_crop=0.875)(content).int()
    difference = (found - expected)[:, 1:-1, 1:-1].abs()
    assert difference.float().mean() < 1.5
    assert found.float().std() > 10  # of which there is enough to see


def test_an_image_of_the_right_size_stays_as_it_is() -> None:
    content = encoded(noise(28, 28))
    assert torch.equal(Transform(size=28)(content), decode(content))
    assert not torch.equal(Transform(size=28)(encoded(noise(28, 29))), decode(content))


@pytest.mark.parametrize("augment", ["none", "inception"])
def test_large_jpegs_show_the_same_as_when_decoded_whole(
    augment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for up to half a pixel, since the box is rounded to the smaller image's."""
    content = encoded(noise(1203, 1601), kind="JPEG")
    transform = Transform(size=32, augment=augment)
    reduced = [transform(content, str(n)).int() for n in range(8)]
    monkeypatch.setattr("orchestrator.data.decode.SCALED_FROM", math.inf)
    whole = [transform(content, str(n)).int() for n in range(8)]
    assert not torch.equal(torch.stack(reduced), torch.stack(whole))
    assert max((a - b).abs().float().mean() for a, b in zip(reduced, whole, strict=True)) < 2.5


def test_nothing_is_decoded_smaller_than_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Picture, "scale", lambda _, most: asked.append(most) or 1)
    Transform(size=20, eval_crop=0.5)(encoded(noise(100, 160)))
    assert asked == [50 / 20]


def test_one_pixel_of_a_large_jpeg() -> None:
    """Rows 12 to 20 are rows 1.5 to 2.5 of the image at an eighth of its size, and must not become none."""
    content = encoded(white(32, 60_000), kind="JPEG")
    assert Transform(size=1, eval_crop=0.25)(content).flatten().tolist() == [255, 255, 255]


def test_exif_turns_before_the_crop() -> None:
    """The left half of what is stored is the upper half of what is seen."""
    pixels = coordinates(8, 20)
    exif = Image.Exif()
    exif[274] = 6
    image = Transform(size=8, eval_crop=1)(encoded(pixels, exif=exif))
    turned = np.rot90(pixels, -1)[6:14]
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), turned)


def test_global_generators_are_left_alone() -> None:
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    content = encoded(noise(40, 40))
    for n in range(40):
        Transform(size=16, augment="inception", randaugment=4)(content, str(n))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    np.testing.assert_array_equal(np.random.get_state()[1], before[2])


def test_bad_images_are_told_as_such() -> None:
    with pytest.raises(BadImage):
        Transform(size=8)(b"no image")


def test_randaugment_comes_after_crop_and_flip() -> None:
    content = encoded(noise(90, 120))
    plain, changed = (
        INCEPTION(content, "a"),
        Transform(size=16, augment="inception", randaugment=2)(content, "a"),
    )
    assert changed.shape == plain.shape
    rng = Random("a")
    inception_box(90, 120, rng)
    rng.random()
    assert torch.equal(changed, randaugment(plain, 2, 9, rng))
