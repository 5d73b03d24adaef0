"""Images of every kind that people have, in files, and what becomes of them when they are packed."""

import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from orchestrator.data.decode import BadImage, decode
from orchestrator.data.sources.source import Source
from orchestrator.data.sources.stored import stored

RNG = np.random.default_rng(0)
RGB = Image.fromarray(RNG.integers(0, 256, (12, 16, 3), dtype=np.uint8))
GREY = Image.fromarray(RNG.integers(0, 256, (12, 16), dtype=np.uint8))


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def raw_png(*, width: int, height: int, bits: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PNG, JPEG = encoded(RGB, "PNG"), encoded(RGB, "JPEG", quality=90)

KEPT = {
    "plain.png": PNG,
    "plain.jpg": JPEG,
    "progressive.jpeg": encoded(RGB, "JPEG", progressive=True),
    "turned.jpg": encoded(RGB, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
    "plain.webp": encoded(RGB, "WEBP", lossless=True),
    "grey.png": encoded(GREY, "PNG"),
    "grey.jpg": encoded(GREY, "JPEG"),
    "palette.png": encoded(RGB.quantize(16), "PNG"),
    "alpha.png": encoded(Image.merge("RGBA", (*RGB.split(), GREY)), "PNG"),
    "grey-alpha.png": encoded(Image.merge("LA", (GREY, GREY)), "PNG"),
    "bits.png": encoded(GREY.convert("1"), "PNG"),
    "sixteen.png": encoded(Image.fromarray(RNG.integers(0, 2**16, (5, 4), dtype=np.uint16)), "PNG"),
    "print.jpg": encoded(RGB.convert("CMYK"), "JPEG"),
    "without extension": PNG,
}
CONVERTED = {
    "plain.gif": encoded(RGB, "GIF"),
    "plain.bmp": encoded(RGB, "BMP"),
    "plain.tif": encoded(RGB, "TIFF"),
    "plain.ppm": encoded(RGB, "PPM"),
}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def numbered(n: int) -> bytes:
    """A PNG that differs from the others."""
    return encoded(Image.fromarray(np.full((4, 5), n % 256, dtype=np.uint8)), "PNG", dpi=(n + 1, 1))


class Taken(NamedTuple):
    split: str
    label: int
    image: bytes


def everything(source: Source) -> tuple[dict[str, Taken], list[str]]:
    """What packing takes, by key, and the keys that it skips."""
    taken, skipped = {}, []
    for split, samples in source.splits.items():
        contents = source.fetch([sample.image for sample in samples])
        for sample, content in zip(samples, contents, strict=True):
            try:
                if isinstance(content, BadImage):
                    raise content
                taken[sample.key] = Taken(split, sample.label, stored(content))
            except BadImage:
                skipped.append(sample.key)
    return taken, skipped


def pixels(image: bytes) -> np.ndarray:
    return decode(image).permute(1, 2, 0).numpy()
