"""Decoding images of every common kind, upright and in 8 bits; bytes that are not an image; crops."""

import base64
import gzip
import hashlib
import io
import itertools
import lzma
import math
import struct
import subprocess
import sys
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import AvifImagePlugin, Image, ImageOps, WebPImagePlugin, features
from torchvision.transforms.v2 import functional as tv

from orchestrator.data.augment import (
    AugmentationConfig,
    ColorJitterConfig,
    CropConfig,
    CropFlipConfig,
    FlipConfig,
    InceptionConfig,
    RandAugmentConfig,
    RandomErasingConfig,
    ShiftConfig,
    ThreeAugmentConfig,
)
from orchestrator.data.batch import normalize
from orchestrator.data.images import BadImage, Picture, Transform, decode, may_be_image
from tests.orchestrator.data.images import IMAGES, JPEG, RGB, WORDS, encoded, exif, pixels, raw_png

LARGE = RGB.resize((1008, 800), Image.Resampling.BILINEAR)


def seen(content: bytes) -> np.ndarray:
    """Returns (H, W, 3) as Pillow decodes it."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).astype(int)


@pytest.mark.parametrize("name", IMAGES)
def test_every_kind_is_what_pillow_sees(name: str) -> None:
    found = pixels(IMAGES[name])
    assert found.shape == (40, 56, 3)
    assert found.dtype == np.uint8
    # Two builds of libjpeg round differently.
    assert np.abs(found - seen(IMAGES[name])).max() <= (3 if name.endswith("jpg") else 0)


def test_sixteen_bits_become_eight() -> None:
    """Pillow's own conversion clips grey to white."""
    for kind in ("PNG", "TIFF", "PPM", "JPEG2000"):
        found = pixels(encoded(Image.fromarray(WORDS), kind))
        np.testing.assert_array_equal(found, np.repeat(WORDS[..., None] // 256, 3, axis=2))
    values = np.random.default_rng(0).integers(0, 2**16, (5, 4, 3))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    np.testing.assert_array_equal(pixels(raw_png(width=4, height=5, bits=16, rows=rows)), values // 256)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation(kind: str) -> None:
    """0 and 9 are not orientations."""
    for orientation in range(10):
        options = {"lossless": True} if kind == "WEBP" else {}
        content = encoded(RGB, kind, exif=exif(orientation), **options)
        upright = (56, 40) if orientation in (5, 6, 7, 8) else (40, 56)
        picture = Picture(content)
        assert (picture.height, picture.width) == upright
        assert pixels(content).shape == (*upright, 3)
        assert np.abs(pixels(content) - seen(content)).max() <= (3 if kind == "JPEG" else 0)


def test_orientation_after_the_pixels_and_damaged_exif() -> None:
    """The PNG specification allows this place; damaged EXIF is not a damaged image."""
    content = encoded(RGB, exif=exif(6))
    at = content.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(content[at : at + 4], "big")
    moved = content[:at] + content[end:-12] + content[at:end] + content[-12:]
    assert torch.equal(decode(moved), decode(content))
    assert decode(moved).shape == (3, 56, 40)
    content = encoded(RGB, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\xff" * 40)
    assert decode(content).shape == (3, 40, 56)


def resized(jpeg: bytes, width: int, height: int) -> bytes:
    """Returns a JPEG whose header has another size."""
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an image of a known format"),
        (
            b"no image",
            r"not an image of a known format \(JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM, AVIF, JPEG2000\)",
        ),
        (JPEG[:-100], "RuntimeError: Image is incomplete or truncated"),
        (IMAGES["plain.png"][:-100], "OSError: .*truncated"),
        (raw_png(width=60_000, height=60_000, bits=8, rows=b""), "3600000000 pixels"),
        (raw_png(width=8001, height=8000, bits=8, rows=b""), "8001 x 8000 pixels, more than 64 million"),
        (resized(JPEG, 4000, 3000), rf"4000 x 3000 pixels in a JPEG of {len(JPEG)} bytes, .* 512 per byte"),
        (raw_png(width=0, height=4, bits=8, rows=b""), "."),
        (encoded(Image.fromarray(WORDS.astype("float32")), "TIFF"), r"32 bits \(mode F\)"),
        (encoded(Image.fromarray(WORDS.astype("int32")), "TIFF"), r"32 bits \(mode I\)"),
    ],
)
def test_reasons(content: bytes, reason: str) -> None:
    with pytest.raises(BadImage, match=f"^.*{reason}.*$"):
        Transform(size=8)(content)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
DENIED = b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>'
NO_IMAGES = {
    "LFS": (LFS, 'a Git LFS pointer: "git lfs pull" fetches the image'),
    "HTML": (b"<!DOCTYPE html><html><body>404 <svg></svg>", "an HTML page"),
    "HTML in capitals": (b"\n<HTML><HEAD>", "an HTML page"),
    "HTML with a comment": (b"\xef\xbb\xbf<!-- x --><html lang='en'>", "an HTML page"),
    "XHTML": (b'<?xml version="1.0"?><!DOCTYPE html PUBLIC "-"><html>', "an HTML page"),
    "SVG": (SVG, "an SVG drawing"),
    "SVG after its type": (
        b'<?xml version="1.0"?>\n<!-- by hand -->\n<!DOCTYPE svg>\n' + SVG,
        "an SVG drawing",
    ),
    "XML": (DENIED, 'XML, .*<[?]xml version="1.0"[?]> <Error><Code>AccessDenied</Code></Error>'),
    "bare XML": (b"<Error><Code>NoSuchKey</Code></Error>", "XML, .*NoSuchKey"),
    "JSON": (b' {"message":\n "Not Found"}', 'JSON, .*{"message": "Not Found"}'),
    "a list in JSON": (b"[]", r"JSON, .*\[\]"),
    "data URL": (b"data:image/png;base64,iVBORw0KGgo", "a data URL"),
    "base64": (base64.b64encode(IMAGES["plain.png"]), "base64 text"),
    "base64 of JPEG": (base64.b64encode(JPEG), "base64 text"),
    "gzip": (gzip.compress(JPEG), "compressed by gzip"),
    "xz": (lzma.compress(JPEG), "compressed by bzip2, xz or zstd"),
    "zip": (b"PK\3\4" + bytes(99), "a zip archive"),
    "DICOM": (bytes(128) + b"DICM" + bytes(99), "DICOM"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "HEIC"),
    "HEIC of another brand": (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(99), "HEIC"),
    "JPEG XL": (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(99), "JPEG XL"),
    "bare JPEG XL": (b"\xff\x0a" + bytes(99), "JPEG XL"),
    "video": (b"\0\0\0\x18ftypisom" + bytes(99), "a video"),
    "PDF": (b"%PDF-1.7\n", "a PDF"),
    "numpy": (b"\x93NUMPY\1\0" + bytes(99), "an array of numpy"),
}


@pytest.mark.parametrize(("content", "what"), NO_IMAGES.values(), ids=NO_IMAGES)
def test_what_is_no_image_is_named(content: bytes, what: str) -> None:
    with pytest.raises(BadImage, match=f"^not an image that is decoded, but {what}[^\n]*$") as raised:
        decode(content)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("plain.avif", "AVIF, which this Pillow cannot decode: install one with its feature avif"),
        ("bare.j2k", "JPEG 2000, which this Pillow cannot decode: install one with its feature jpg_2000"),
        ("plain.jp2", "JPEG 2000, which"),
        ("lossy.webp", "WebP, which"),
    ],
)
def test_decoders_that_pillow_was_built_without(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it says so itself, fails while it decodes, or does not know the format at all."""
    has = features.check
    monkeypatch.setattr(features, "check", lambda feature: has(feature) and feature == "jpg")
    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    monkeypatch.setattr(WebPImagePlugin, "SUPPORTED", False)
    monkeypatch.delattr(Image.core, "jpeg2k_decoder")
    for _ in range(2):
        with pytest.raises(BadImage, match=f"^{reason}"):
            decode(IMAGES[name])
        for known in ("AVIF", "JPEG2000", "WEBP"):
            monkeypatch.delitem(Image.OPEN, known, raising=False)
    assert decode(IMAGES["plain.png"]).shape == (3, 40, 56)


@pytest.mark.parametrize(
    ("name", "may"),
    [(f"a.{kind}", True) for kind in ("avif", "AVIF", "avifs", "jp2", "j2k", "jpx", "jpf", "jpc", "j2c")]
    + [(f"a.{kind}", False) for kind in ("heic", "heif", "jxl", "svg", "dcm", "jp", "j2", "gz")],
)
def test_images_by_name(name: str, may: bool) -> None:
    assert may_be_image(name) == may


@pytest.mark.parametrize(
    "options", [("JPEG", {"optimize": True}), ("JPEG", {"progressive": True}), ("WEBP", {"lossless": True})]
)
def test_one_colour_is_an_image(options: tuple[str, dict[str, Any]]) -> None:
    """As few bytes as encoders can make of so many pixels."""
    kind, how = options
    for mode in ("L", "RGB"):
        content = encoded(Image.new(mode, (2000, 2000), "white"), kind, **how)
        assert Transform(size=8)(content).min() == 255


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in IMAGES if "several" not in name])
def test_truncated_images_are_bad(name: str) -> None:
    """Only the end mark may be missing: 22 bytes in PNG, 2 in GIF."""
    content = IMAGES[name]
    for length in range(0, len(content) - 23, max(1, len(content) // 100)):
        with pytest.raises(BadImage):
            decode(content[:length])


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damage
def test_damaged_images_are_bad_or_have_the_size_of_their_header() -> None:
    rng = np.random.default_rng(1)
    contents = [*IMAGES.values(), encoded(RGB, "JPEG", comment=b"\xff\xc0" * 9, icc_profile=b"x" * 70)]
    good, reasons = 0, []
    for i in range(500):
        damaged = bytearray(contents[i % len(contents)])
        for _ in range(rng.choice([1, 2, 8])):
            place = rng.integers(min(len(damaged), rng.choice([60, 10_000])))
            damaged[place : place + rng.integers(3)] = rng.bytes(rng.integers(3))
        try:
            picture = Picture(bytes(damaged))
            image = picture.pixels()
        except BadImage as error:
            reasons.append(str(error))
        else:
            good += 1
            assert image.dtype == torch.uint8
            assert image.shape == (3, picture.height, picture.width)
    assert 30 < good < 470
    assert all(len(reason.splitlines()) == 1 for reason in reasons)


@pytest.mark.parametrize(("most", "scale"), [(0.3, 1), (1.9, 1), (2, 2), (3.9, 2), (4, 4), (99, 8)])
def test_large_jpegs_can_be_decoded_smaller(most: float, scale: int) -> None:
    content = encoded(LARGE, "JPEG", exif=exif(6), quality=95)
    picture = Picture(content)
    assert picture.scale(most) == scale
    found = picture.pixels(scale).permute(1, 2, 0).numpy().astype(int)
    small = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).reduce(scale)
    assert np.abs(found - np.asarray(small)).mean() < 1


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_sides_of_smaller_jpegs_are_rounded_up(scale: int) -> None:
    for height, width in ((801, 1001), (15, 60_001)):
        picture = Picture(encoded(LARGE.resize((width, height)), "JPEG"))
        assert picture.scale(scale) == scale
        assert picture.pixels(scale).shape == (3, -(-height // scale), -(-width // scale))


def test_small_images_and_other_formats_are_not_scaled() -> None:
    for image in (encoded(LARGE), encoded(LARGE.convert("CMYK"), "JPEG"), JPEG):
        assert Picture(image).scale(9) == 1


@pytest.mark.smoke
def test_decoding_does_not_warn() -> None:
    """Checked in a process of its own, where warnings are not ignored."""
    code = "import sys; from orchestrator.data.images import decode; decode(sys.stdin.buffer.read())"
    ran = subprocess.run([sys.executable, "-W", "always", "-c", code], input=JPEG, capture_output=True)
    assert ran.returncode == 0
    assert b"torchcodec" not in ran.stderr


def coordinates(height: int, width: int) -> np.ndarray:
    """Returns an image whose red is x and whose green is y."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y, 0 * x], axis=-1)


def noise(height: int, width: int, kind: str = "PNG") -> bytes:
    """Returns noise that is coarse, so that it survives scaling down."""
    coarse = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return encoded(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), kind)


def white(height: int, width: int, kind: str = "PNG") -> bytes:
    return encoded(np.full((height, width, 3), 255), kind)


INCEPTION = Transform(size=16, augment=(InceptionConfig(),))
SQUARE = encoded(coordinates(256, 256))


@pytest.mark.parametrize(("height", "width", "top", "left"), [(8, 20, 0, 6), (20, 8, 6, 0), (8, 8, 0, 0)])
def test_without_augmentation_the_middle_is_cropped(height: int, width: int, top: int, left: int) -> None:
    image = Transform(size=8, eval_crop=1)(encoded(coordinates(height, width)))
    middle = coordinates(height, width)[top : top + 8, left : left + 8]
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), middle)


def test_exif_turns_before_the_crop() -> None:
    """The left half of the stored image is the upper half of the upright image."""
    image = Transform(size=8, eval_crop=1)(encoded(coordinates(8, 20), exif=exif(6)))
    turned = np.rot90(coordinates(8, 20), -1)[6:14]
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), turned)


@pytest.mark.parametrize("augment", [(), (CropConfig(),), (InceptionConfig(),)])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 90), (90, 1), (7, 200), (33, 32)])
def test_crops_stay_inside(height: int, width: int, augment: tuple[AugmentationConfig, ...]) -> None:
    """Pixels outside of the image would be black."""
    content, transform = white(height, width), Transform(size=6, augment=augment)
    for n in range(30):
        image = transform(content, str(n))
        assert tuple(image.shape) == (3, 6, 6)
        assert image.min() == 255


def test_randomness_depends_only_on_the_key() -> None:
    """It is the same in every process: Python's hash of the key, which differs between them, is not used."""
    image = encoded(coordinates(100, 120))
    assert torch.equal(INCEPTION(image, "a"), INCEPTION(image, "a"))
    assert len({INCEPTION(image, str(n)).numpy().tobytes() for n in range(50)}) == 50
    rng = Random(int.from_bytes(b"key" + hashlib.sha512(b"key").digest(), "big"))
    assert box("key")[1] == pytest.approx(InceptionConfig().box(256, 256, rng).width / 256, rel=0.02)


def box(key: str) -> tuple[float, float, bool]:
    """Returns height and width of the crop as fractions of the image, and whether it is mirrored."""
    red, green, _ = INCEPTION(SQUARE, key).double()
    per_pixel_x, per_pixel_y = (red[:, 12] - red[:, 3]).mean() / 9, (green[12] - green[3]).mean() / 9
    return float(per_pixel_y) * 16 / 256, abs(float(per_pixel_x)) * 16 / 256, bool(per_pixel_x < 0)


def simulated(rng: np.random.Generator) -> float:
    """Draws the area of a crop of a square, by the definition."""
    for _ in range(10):
        area, aspect = rng.uniform(0.05, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        if area * aspect <= 1 and area / aspect <= 1:
            return area
    return 1.0


def test_statistics_of_the_inception_crop() -> None:
    heights, widths, mirrored = map(np.array, zip(*(box(str(n)) for n in range(300)), strict=True))
    areas, aspects = heights * widths, widths / heights
    assert 0.045 < areas.min() < 0.1
    assert areas.max() < 1.02
    rng = np.random.default_rng(0)
    expected = np.array([simulated(rng) for _ in range(20_000)])
    assert abs(areas.mean() - expected.mean()) < 4 * expected.std() / math.sqrt(300)
    assert 3 / 4 * 0.97 < aspects.min() < aspects.max() < 4 / 3 * 1.03
    assert abs(np.log(aspects).mean()) < 0.05
    assert 0.4 < mirrored.mean() < 0.6


@pytest.mark.parametrize(("height", "width"), [(320, 480), (480, 320), (16, 32)])
@pytest.mark.parametrize(("resize", "to"), [("shorter", [32]), ("square", [32, 32])])
def test_evaluation_is_resizing_and_then_cropping(
    resize: Literal["shorter", "square"], to: list[int], height: int, width: int
) -> None:
    """The definition has two steps: the shorter side, or both, to size / eval_crop, then the middle."""
    content = noise(height, width)
    resized = tv.resize(decode(content), to, antialias=True)  # 28 / 0.875
    expected = tv.center_crop(resized, [28, 28]).int()
    found = Transform(size=28, eval_resize=resize, eval_crop=0.875)(content).int()
    difference = (found - expected)[:, 1:-1, 1:-1].abs()
    assert difference.float().mean() < 1.5
    assert found.float().std() > 10


def test_a_whole_image_becomes_a_square() -> None:
    """Fine-tuning evaluates so; red is x and green is y, and both reach from border to border."""
    image = Transform(size=16, eval_resize="square", eval_crop=1)(encoded(coordinates(64, 240)))
    expected = coordinates(16, 16) * [15, 4, 0] + [7, 1.5, 0]
    np.testing.assert_allclose(image.permute(1, 2, 0).numpy(), expected, atol=1.5)


def test_an_image_of_the_right_size_stays_as_it_is() -> None:
    content = noise(28, 28)
    assert torch.equal(Transform(size=28)(content), decode(content))
    assert not torch.equal(Transform(size=28)(noise(28, 29)), decode(content))
    assert normalize(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


@pytest.mark.parametrize("augment", [(), (InceptionConfig(),)])
def test_large_jpegs_show_the_same_as_when_decoded_whole(
    augment: tuple[AugmentationConfig, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ by up to half a pixel, because the box is rounded to the smaller image's pixels."""
    content, transform = noise(1203, 1601, "JPEG"), Transform(size=40, augment=augment)
    reduced = [transform(content, str(n)).int() for n in range(8)]
    monkeypatch.setattr("orchestrator.data.images.SCALED_FROM", math.inf)
    whole = [transform(content, str(n)).int() for n in range(8)]
    assert not torch.equal(torch.stack(reduced), torch.stack(whole))
    assert max((a - b).abs().float().mean() for a, b in zip(reduced, whole, strict=True)) < 2.5


def test_one_pixel_of_a_large_jpeg() -> None:
    """Rows 12 to 20 are rows 1.5 to 2.5 of the image at an eighth of its size, and one row must stay."""
    assert Transform(size=1, eval_crop=0.25)(white(32, 60_000, "JPEG")).flatten().tolist() == [255] * 3


def test_randaugment_comes_after_crop_and_flip() -> None:
    content = noise(90, 120)
    changed = Transform(size=16, augment=(InceptionConfig(), RandAugmentConfig()))(content, "a")
    rng = Random("a")
    InceptionConfig().box(90, 120, rng)
    rng.random()
    assert torch.equal(changed, RandAugmentConfig().apply(INCEPTION(content, "a"), rng))


def test_the_recipe_of_deit_comes_in_its_order() -> None:
    content = noise(90, 120)
    deit = ThreeAugmentConfig(), ColorJitterConfig(strength=0.3), RandomErasingConfig(fraction=1.0)
    changed = Transform(size=16, augment=(InceptionConfig(), *deit))(content, "a")
    rng = Random("a")
    InceptionConfig().box(90, 120, rng)
    rng.random()
    expected = INCEPTION(content, "a")
    for member in deit:
        expected = member.apply(expected, rng)
    assert torch.equal(changed, expected)
    half = Transform(size=16, augment=(RandomErasingConfig(fraction=0.5),))
    found = [torch.equal(half(noise(16, 16), str(n)), decode(noise(16, 16))) for n in range(300)]
    assert 0.4 < sum(found) / 300 < 0.6
    assert all(Transform(size=16, augment=(member,)).varies() for member in deit)


def test_flips_are_half_of_the_images() -> None:
    content = encoded(coordinates(16, 16))
    plain, mirrored = decode(content), decode(content).flip(2)
    found = [Transform(size=16, augment=(FlipConfig(),))(content, str(n)) for n in range(300)]
    assert all(torch.equal(image, plain) or torch.equal(image, mirrored) for image in found)
    assert 0.4 < sum(torch.equal(image, mirrored) for image in found) / 300 < 0.6


def test_crops_of_fine_tuning_keep_six_sevenths_of_both_sides() -> None:
    """From 14 x 28 pixels it cuts 12 x 24 at any of 3 x 5 places, and makes a square; flips mirror half."""
    content = encoded(coordinates(14, 28))
    boxes = [coordinates(14, 28)[y : y + 12, x : x + 24] for y in range(3) for x in range(5)]
    whole = Transform(size=12, eval_resize="square", eval_crop=1)
    expected = {whole(encoded(box)).numpy().tobytes(): box for box in boxes}
    found = [Transform(size=12, augment=(CropConfig(),))(content, str(n)) for n in range(300)]
    assert {image.numpy().tobytes() for image in found} == expected.keys()
    both = [Transform(size=12, augment=(CropFlipConfig(),))(content, str(n)) for n in range(300)]
    mirrored = sum(image.flip(2).numpy().tobytes() in expected for image in both)
    assert mirrored + sum(image.numpy().tobytes() in expected for image in both) == 300
    assert 0.4 < mirrored / 300 < 0.6


def test_shifts_are_every_one_of_up_to_an_eighth_of_the_side() -> None:
    content = noise(16, 16)
    plain, found = decode(content), set()
    for n in range(400):
        shifted = Transform(size=16, augment=(ShiftConfig(),))(content, str(n))
        for down, right in itertools.product(range(-2, 3), repeat=2):
            expected = tv.affine(plain, 0, [right, down], 1, [0])
            if torch.equal(shifted, expected):
                found.add((down, right))
                break
        else:
            raise AssertionError(f"image {n} is not the plain one, shifted")
    assert len(found) == 25


def test_kept_images_are_not_changed() -> None:
    content, transform = noise(16, 16), Transform(size=16, augment=(RandAugmentConfig(),))
    transform(content, "a")
    assert torch.equal(Transform(size=16)(content), decode(content))
