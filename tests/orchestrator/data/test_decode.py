"""Images of every kind that people have, upright and in 8 bits, and bytes that are none."""

import io
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from orchestrator.data.decode import BadImage, Picture, decode

RNG = np.random.default_rng(0)
SMOOTH = np.asarray(Image.fromarray(RNG.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((56, 40), 2))
RGB = Image.fromarray(SMOOTH)
GREY = Image.fromarray(SMOOTH[..., 0])
ALPHA = Image.merge("RGBA", (*RGB.split(), GREY))
WORDS = SMOOTH[..., 0].astype("uint16") * 257 // np.uint16(2)  # 16 bits per sample


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def raw_png(*, width: int, height: int, bits: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


IMAGES = {
    "plain.jpg": encoded(RGB, "JPEG"),
    "progressive.jpg": encoded(RGB, "JPEG", progressive=True),
    "unsubsampled.jpg": encoded(RGB, "JPEG", quality=95, subsampling=0),
    "grey.jpg": encoded(GREY, "JPEG"),
    "inverted-cmyk.jpg": encoded(RGB.convert("CMYK"), "JPEG"),  # as Adobe does, and Pillow
    "several.jpg": encoded(RGB, "MPO", save_all=True, append_images=[RGB.rotate(180)]),
    "plain.png": encoded(RGB, "PNG"),
    "grey.png": encoded(GREY, "PNG"),
    "grey-alpha.png": encoded(ALPHA.convert("LA"), "PNG"),
    "alpha.png": encoded(ALPHA, "PNG"),
    "palette.png": encoded(RGB.quantize(16), "PNG"),
    "transparent-palette.png": encoded(RGB.quantize(16), "PNG", transparency=bytes(range(16))),
    "transparent-colour.png": encoded(RGB, "PNG", transparency=(1, 2, 3)),
    "bits.png": encoded(GREY.convert("1"), "PNG"),
    "lossy.webp": encoded(RGB, "WEBP"),
    "lossless.webp": encoded(ALPHA, "WEBP", lossless=True),
    "plain.bmp": encoded(RGB, "BMP"),
    "palette.gif": encoded(RGB, "GIF"),
    "several.gif": encoded(RGB, "GIF", save_all=True, append_images=[RGB.rotate(180)]),
    "plain.tiff": encoded(RGB, "TIFF"),
    "packed.tiff": encoded(RGB, "TIFF", compression="tiff_lzw"),
    "cmyk.tiff": encoded(RGB.convert("CMYK"), "TIFF"),
    "plain.ppm": encoded(RGB, "PPM"),
    "bits.pbm": encoded(GREY.convert("1"), "PPM"),
}


def seen(content: bytes) -> np.ndarray:
    """(H, W, 3), by the definition."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).astype(int)


def pixels(image: torch.Tensor) -> np.ndarray:
    assert image.dtype == torch.uint8
    return image.permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize("name", IMAGES)
def test_every_kind_is_what_pillow_sees(name: str) -> None:
    found = pixels(decode(IMAGES[name]))
    assert found.shape == (40, 56, 3)
    # two builds of libjpeg round differently
    assert np.abs(found - seen(IMAGES[name])).max() <= (3 if name.endswith("jpg") else 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_of_grey_become_eight(kind: str) -> None:
    """Pillow's own conversion clips them to white."""
    found = pixels(decode(encoded(Image.fromarray(WORDS), kind)))
    np.testing.assert_array_equal(found, np.repeat(WORDS[..., None] // 256, 3, axis=2))


def test_sixteen_bits_of_colour_become_eight() -> None:
    values = RNG.integers(0, 2**16, (5, 4, 3))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    found = pixels(decode(raw_png(width=4, height=5, bits=16, rows=rows)))
    np.testing.assert_array_equal(found, values // 256)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_orientation(kind: str, orientation: int) -> None:
    """0 and 9 are no orientations."""
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(RGB, kind, exif=exif, **options)
    upright = (56, 40) if orientation in (5, 6, 7, 8) else (40, 56)
    picture = Picture(content)
    assert (picture.height, picture.width) == upright
    found = pixels(picture.pixels())
    assert found.shape == (*upright, 3)
    assert np.abs(found - seen(content)).max() <= (3 if kind == "JPEG" else 0)


def test_orientation_may_stand_after_the_pixels() -> None:
    """As the PNG specification allows."""
    exif = Image.Exif()
    exif[274] = 6
    content = encoded(RGB, "PNG", exif=exif)
    at = content.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(content[at : at + 4], "big")
    moved = content[:at] + content[end:-12] + content[at:end] + content[-12:]
    assert torch.equal(decode(moved), decode(content))
    assert decode(moved).shape == (3, 56, 40)


def test_damaged_exif_is_no_damage() -> None:
    content = encoded(RGB, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\xff" * 40)
    assert decode(content).shape == (3, 40, 56)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an image of a known format"),
        (b"no image", r"not an image of a known format \(JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM\)"),
        (IMAGES["plain.jpg"][:-100], "RuntimeError: Image is incomplete or truncated"),
        (IMAGES["plain.png"][:-100], "OSError: .*truncated"),
        (raw_png(width=60_000, height=60_000, bits=8, rows=b""), "3600000000 pixels"),
        (raw_png(width=0, height=4, bits=8, rows=b""), "."),
        (encoded(Image.fromarray(WORDS.astype("float32")), "TIFF"), r"32 bits \(mode F\)"),
        (encoded(Image.fromarray(WORDS.astype("int32")), "TIFF"), r"32 bits \(mode I\)"),
    ],
)
def test_reasons(content: bytes, reason: str) -> None:
    with pytest.raises(BadImage, match=f"^.*{reason}.*$"):
        decode(content)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in IMAGES if "several" not in name])
def test_truncated_images_are_bad(name: str) -> None:
    """Never half grey. Nothing but the end mark may be missing: 22 bytes in PNG, 2 in GIF."""
    content = IMAGES[name]
    for length in range(0, len(content) - 23, max(1, len(content) // 200)):
        with pytest.raises(BadImage):
            decode(content[:length])


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about what is damaged
def test_damaged_images_are_bad_or_images() -> None:
    rng = np.random.default_rng(1)
    good, reasons = 0, []
    for i in range(1500):
        damaged = bytearray(list(IMAGES.values())[i % len(IMAGES)])
        for _ in range(rng.choice([1, 2, 8])):
            place = rng.integers(min(len(damaged), rng.choice([60, 10_000])))
            damaged[place : place + rng.integers(3)] = rng.bytes(rng.integers(3))
        try:
            image = decode(bytes(damaged))
        except BadImage as error:
            reasons.append(str(error))
        else:
            good += 1
            assert image.dtype == torch.uint8
            assert image.shape[0] == 3
            assert image.numel()
    assert 100 < good < 1400
    assert all(len(reason.splitlines()) == 1 for reason in reasons)


LARGE = Image.fromarray(SMOOTH).resize((1008, 800), Image.Resampling.BILINEAR)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(("most", "scale"), [(0.3, 1), (1.9, 1), (2, 2), (3.9, 2), (4, 4), (7.9, 4), (99, 8)])
def test_large_jpegs_can_be_decoded_smaller(most: float, scale: int, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    content = encoded(LARGE, "JPEG", exif=exif, quality=95)
    picture = Picture(content)
    assert picture.scale(most) == scale
    found = pixels(picture.pixels(scale))
    small = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).reduce(scale)
    assert np.abs(found - np.asarray(small)).mean() < 1


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize(("height", "width"), [(801, 1001), (1015, 793), (15, 60_001)])
def test_sides_of_smaller_jpegs_are_rounded_up(height: int, width: int, scale: int) -> None:
    picture = Picture(encoded(LARGE.resize((width, height)), "JPEG"))
    assert picture.scale(scale) == scale
    assert picture.pixels(scale).shape == (3, -(-height // scale), -(-width // scale))


def test_small_images_and_other_formats_come_whole() -> None:
    assert Picture(encoded(LARGE, "PNG")).scale(9) == 1
    assert Picture(encoded(LARGE.convert("CMYK"), "JPEG")).scale(9) == 1
    assert Picture(encoded(RGB, "JPEG")).scale(9) == 1


def test_the_header_of_a_plain_jpeg_is_read_as_pillow_reads_it() -> None:
    """Damaged ones too: whatever decodes has the size that was promised for it."""
    rng = np.random.default_rng(2)
    content = encoded(RGB, "JPEG", comment=b"\xff\xc0" * 9, icc_profile=b"x" * 70)
    whole = 0
    for _ in range(1500):
        damaged = bytearray(content)
        damaged[rng.integers(len(damaged))] = rng.integers(256)
        try:
            picture = Picture(bytes(damaged))
            found = picture.pixels()
        except BadImage:
            continue
        whole += 1
        assert found.shape == (3, picture.height, picture.width)
    assert whole > 500


def test_threads_see_what_one_thread_sees() -> None:
    images = list(IMAGES.values()) * 8
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(decode, images))
    assert all(torch.equal(one, decode(content)) for one, content in zip(found, images, strict=True))


@pytest.mark.smoke
def test_decoding_warns_of_nothing() -> None:
    """In a process of its own, which no test runner has told what to ignore."""
    code = "import sys; from orchestrator.data.decode import decode; decode(sys.stdin.buffer.read())"
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], input=IMAGES["plain.jpg"], capture_output=True
    )
    assert ran.returncode == 0
    assert b"torchcodec" not in ran.stderr
