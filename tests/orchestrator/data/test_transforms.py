"""Decoding and cropping, on images whose colours are their coordinates."""

import hashlib
import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from orchestrator.data.transforms import normalize, prepare


def encoded(pixels: np.ndarray, mode: str = "RGB", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels.astype("uint8"))
    (image.quantize(64) if mode == "P" else image.convert(mode)).save(buffer, format=kind)
    return buffer.getvalue()


def coordinates(height: int, width: int) -> np.ndarray:
    """Red is x, green is y."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y, 0 * x], axis=-1)


def flat_grey(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 255)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P"])
def test_png_of_every_mode(mode: str) -> None:
    pixels = np.repeat(np.arange(64).reshape(8, 8, 1) * 4, 3, axis=2)
    image = prepare(encoded(pixels, mode), 8)
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 8, 8))
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpeg(mode: str) -> None:
    pixels = np.full((8, 8, 3), 77)
    image = prepare(encoded(pixels, mode, "JPEG"), 8)
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 8, 8))
    np.testing.assert_allclose(image.permute(1, 2, 0).numpy(), pixels, atol=1)


@pytest.mark.parametrize(("height", "width", "top", "left"), [(8, 20, 0, 6), (20, 8, 6, 0), (8, 8, 0, 0)])
def test_without_augmentation_the_middle_is_seen(height: int, width: int, top: int, left: int) -> None:
    image = prepare(encoded(coordinates(height, width)), 8)
    middle = coordinates(height, width)[top : top + 8, left : left + 8]
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), middle)


def test_resizing_averages() -> None:
    """Half the size with antialiasing: no pixel of the fine stripes survives alone."""
    stripes = np.zeros((16, 16, 3))
    stripes[:, ::2] = 200
    image = prepare(encoded(stripes), 8)
    assert 60 < image.float().min() <= image.float().max() < 140


@pytest.mark.parametrize("augment", ["none", "inception"])
@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 90), (90, 1), (7, 200), (200, 7), (33, 32), (5, 5)]
)
def test_crops_stay_inside(height: int, width: int, augment: str) -> None:
    """Whatever lies outside an image would be black."""
    white = encoded(flat_grey(height, width))
    for n in range(30):
        image = prepare(white, 6, augment=augment, key=str(n))
        assert tuple(image.shape) == (3, 6, 6)
        assert image.min() == 255


def test_the_key_alone_decides() -> None:
    image = encoded(coordinates(100, 120))
    first, again, other = (prepare(image, 16, augment="inception", key=key) for key in ("a", "a", "b"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (
        len({prepare(image, 16, augment="inception", key=str(n)).numpy().tobytes() for n in range(50)}) == 50
    )


def box(key: str) -> tuple[float, float, bool]:
    """Height and width of the crop from a 256x256 image as parts of it, and whether it is mirrored."""
    red, green, _ = prepare(SQUARE, 16, augment="inception", key=key).double()
    per_pixel_x, per_pixel_y = (red[:, 12] - red[:, 3]).mean() / 9, (green[12] - green[3]).mean() / 9
    return float(per_pixel_y) * 16 / 256, abs(float(per_pixel_x)) * 16 / 256, bool(per_pixel_x < 0)


SQUARE = encoded(coordinates(256, 256))


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


def test_randomness_is_numpys_from_a_sha256() -> None:
    """The rule that makes workers agree: not Python's hash, which differs between processes."""
    digest = hashlib.sha256(b"key").digest()[:16]
    rng = np.random.default_rng(int.from_bytes(digest, "big"))
    area, log_aspect = 256**2 * rng.uniform(0.05, 1), rng.uniform(math.log(3 / 4), math.log(4 / 3))
    width = math.sqrt(area * math.exp(log_aspect)) / 256
    assert box("key")[1] == pytest.approx(width, rel=0.02)


def test_normalize() -> None:
    assert normalize(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]
