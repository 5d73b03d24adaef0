"""Photograph-like JPEGs, drawn once, in the format of every loader that is compared.

They show clouds of coloured noise, shapes in front of them and grain, 400 to 500 pixels a side, quality 90,
4:2:0: 91 KB on average, 75 to 105 from the 5th to the 95th percentile.
"""

import importlib
import io
import os
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from orchestrator.packing.pack import Sample, write_shards

CLASSES = 10
FIELD = 1024  # side of the noise that images are cut from
FIELDS = 8
TAR_IMAGES = 500


def prepare(folder: Path, count: int) -> None:
    """Writes `jpeg/CLASS/NUMBER.jpg`, `tars`, `litdata` and our `shards` below `folder`."""
    if (folder / "whole").exists():
        return
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, jpeg in enumerate(pool.map(draw, range(count), chunksize=50)):
            path = folder / "jpeg" / f"class{number % CLASSES}" / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg)
    files = jpegs(folder)
    pack(folder / "shards", [file.read_bytes() for file in files], count)
    _write_tars(folder / "tars", files)
    importlib.import_module("litdata").optimize(
        fn=_labelled,
        inputs=[str(file) for file in files],
        output_dir=str(folder / "litdata"),
        chunk_bytes="64MB",
        num_workers=1,
        verbose=False,
    )
    (folder / "whole").touch()


def jpegs(folder: Path) -> list[Path]:
    """Returns the images sorted by number, so that classes are mixed."""
    return sorted((folder / "jpeg").rglob("*.jpg"), key=lambda file: file.name)


def pack(path: Path, images: Sequence[bytes], count: int) -> None:
    """Packs `count` samples, which repeat `images`, into our shards."""
    samples = [Sample(images[i % len(images)], i % CLASSES, f"{i:06d}") for i in range(count)]
    splits: dict[str, Iterable[Sample]] = {"train": samples, "val": samples[:1]}
    write_shards(str(path), map(str, range(CLASSES)), splits)


def draw(number: int) -> bytes:
    rng = np.random.default_rng(number)
    height, width = (int(side) for side in rng.integers(400, 501, 2))
    light, red, blue = (_cut(rng, height, width) for _ in range(3))
    pixels = 128 + 46 * light[..., None] + 16 * np.stack([red, -(red + blue) / 2, blue], axis=-1)
    image = Image.fromarray(pixels.clip(0, 255).astype("uint8"))
    canvas = ImageDraw.Draw(image)
    for _ in range(rng.integers(2, 7)):
        left, top = int(rng.integers(0, width - 60)), int(rng.integers(0, height - 60))
        right, bottom = (int(start + rng.integers(20, 150)) for start in (left, top))
        shape = canvas.ellipse if rng.random() < 0.5 else canvas.rectangle
        shape((left, top, right, bottom), fill=tuple(int(c) for c in rng.integers(30, 226, 3)))
    grain = rng.standard_normal((height, width, 1), dtype=np.float32) * rng.uniform(4.0, 5.0)
    pixels = (np.asarray(image) + grain).clip(0, 255).astype("uint8")
    return _encoded(pixels, "JPEG", quality=90, subsampling="4:2:0")


def small_png(number: int, size: int = 32) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return _encoded(pixels, "PNG")


def _cut(rng: np.random.Generator, height: int, width: int) -> NDArray[np.float32]:
    """Cuts a part of the noise, with mean 0 and deviation 1."""
    top, left = rng.integers(0, FIELD - height), rng.integers(0, FIELD - width)
    part = _noise()[rng.integers(FIELDS), top : top + height, left : left + width]
    return (part - part.mean()) / part.std()


@cache
def _noise() -> NDArray[np.float32]:
    """Draws (FIELDS, FIELD, FIELD) noise, whose amplitude falls with frequency about as in photographs."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(FIELD)[:, None], np.fft.rfftfreq(FIELD))
    frequency[0, 0] = 1
    spectra = rng.normal(size=(2, FIELDS, *frequency.shape)) / frequency**1.25
    return np.fft.irfft2(spectra[0] + 1j * spectra[1]).astype(np.float32)


def _encoded(pixels: NDArray[np.uint8], kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def _write_tars(folder: Path, files: Sequence[Path]) -> None:
    folder.mkdir()
    for first in range(0, len(files), TAR_IMAGES):
        with tarfile.open(folder / f"{first:06d}.tar", "w") as tar:
            for file in files[first : first + TAR_IMAGES]:
                tar.add(file, f"{file.stem}.jpg")
                label = str(_labelled(str(file))["label"]).encode()
                member = tarfile.TarInfo(f"{file.stem}.cls")
                member.size = len(label)
                tar.addfile(member, io.BytesIO(label))


def _labelled(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes(), "label": int(Path(path).parent.name.removeprefix("class"))}
