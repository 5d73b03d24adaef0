"""Images of every common kind, in files, tars and parquet files."""

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from orchestrator.data.images import BadImage, decode
from orchestrator.packing.pack import encode_for_shard
from orchestrator.packing.samples import Source

RNG = np.random.default_rng(0)
# A smooth image, about which decoders agree.
SMOOTH = np.asarray(Image.fromarray(RNG.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((56, 40), 2))
RGB = Image.fromarray(SMOOTH)
GREY = Image.fromarray(SMOOTH[..., 0])
ALPHA = Image.merge("RGBA", (*RGB.split(), GREY))
WORDS = SMOOTH[..., 0].astype("uint16") * 257 // np.uint16(2)  # 16 bits per sample


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image.astype("uint8"))
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def raw_png(*, width: int, height: int, bits: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + crc

    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[274] = orientation
    return found


KEPT = {  # stored as they are
    "plain.jpg": encoded(RGB, "JPEG"),
    "progressive.jpg": encoded(RGB, "JPEG", progressive=True),
    "unsubsampled.jpg": encoded(RGB, "JPEG", quality=95, subsampling=0),
    "grey.jpg": encoded(GREY, "JPEG"),
    "inverted-cmyk.jpg": encoded(RGB.convert("CMYK"), "JPEG"),  # like Adobe's and Pillow's
    "several.jpg": encoded(RGB, "MPO", save_all=True, append_images=[RGB.rotate(180)]),
    "turned.jpg": encoded(RGB, "JPEG", exif=exif(3)),
    "plain.png": encoded(RGB),
    "grey.png": encoded(GREY),
    "grey-alpha.png": encoded(ALPHA.convert("LA")),
    "alpha.png": encoded(ALPHA),
    "palette.png": encoded(RGB.quantize(16)),
    "transparent-palette.png": encoded(RGB.quantize(16), transparency=bytes(range(16))),
    "transparent-colour.png": encoded(RGB, transparency=(1, 2, 3)),
    "bits.png": encoded(GREY.convert("1")),
    "lossy.webp": encoded(RGB, "WEBP"),
    "lossless.webp": encoded(ALPHA, "WEBP", lossless=True),
    "without-extension": encoded(RGB),
}
CONVERTED = {  # stored as PNG
    "plain.bmp": encoded(RGB, "BMP"),
    "palette.gif": encoded(RGB, "GIF"),
    "several.gif": encoded(RGB, "GIF", save_all=True, append_images=[RGB.rotate(180)]),
    "plain.tiff": encoded(RGB, "TIFF"),
    "packed.tiff": encoded(RGB, "TIFF", compression="tiff_lzw"),
    "cmyk.tiff": encoded(RGB.convert("CMYK"), "TIFF"),
    "plain.ppm": encoded(RGB, "PPM"),
    "bits.pbm": encoded(GREY.convert("1"), "PPM"),
    "plain.avif": encoded(RGB, "AVIF"),
    "grey.avif": encoded(GREY, "AVIF"),
    "alpha.avif": encoded(ALPHA, "AVIF"),
    "turned.avif": encoded(RGB, "AVIF", exif=exif(3)),
    "several.avif": encoded(RGB, "AVIF", save_all=True, append_images=[RGB.rotate(180)]),
    "plain.jp2": encoded(RGB, "JPEG2000"),
    "grey.jp2": encoded(GREY, "JPEG2000"),
    "alpha.jpx": encoded(ALPHA, "JPEG2000"),
    "bare.j2k": encoded(RGB, "JPEG2000", no_jp2=True),
    "lossy.jpf": encoded(RGB, "JPEG2000", irreversible=True, quality_mode="dB", quality_layers=[40]),
}
IMAGES = KEPT | CONVERTED
PNG, JPEG = KEPT["plain.png"], KEPT["plain.jpg"]


def numbered(n: int) -> bytes:
    """Returns a PNG that differs for every number."""
    return encoded(np.full((4, 5), n % 256), dpi=(n + 1, 1))


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def files(folder: Path | str) -> dict[str, bytes]:
    """Reads all files of a folder: the inverse of `write`."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def tar(path: Path, members: Sequence[tuple[str, bytes]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def samples(first: int, count: int, classes: int = 2) -> list[tuple[str, bytes]]:
    """Returns members of a tar: images `numbered` from `first`, and their labels."""
    return [
        member
        for n in range(first, first + count)
        for member in ((f"{n:04d}.png", numbered(n)), (f"{n:04d}.cls", str(n % classes).encode()))
    ]


def parquet(path: Path, columns: Mapping[str, Any], *, names: Sequence[str] | None = None, **options) -> Path:
    """Writes columns, and the labels' `names` as Hugging Face's `datasets` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(columns))
    if names:
        features = {"label": {"names": list(names), "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, **options)
    return path


class Taken(NamedTuple):
    split: str
    label: int
    image: bytes


def everything(source: Source) -> tuple[dict[str, Taken], list[str]]:
    """Returns the samples that packing takes, by key, and the keys that it skips."""
    taken, skipped = {}, []
    for split, rows in source.splits.items():
        contents = source.fetch([sample.image for sample in rows])
        for sample, content in zip(rows, contents, strict=True):
            try:
                if isinstance(content, BadImage):
                    raise content
                taken[sample.key] = Taken(split, sample.label, encode_for_shard(content).image)
            except BadImage:
                skipped.append(sample.key)
    return taken, skipped


def pixels(image: bytes) -> np.ndarray:
    return decode(image).permute(1, 2, 0).numpy()
