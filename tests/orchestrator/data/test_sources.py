"""Images of every kind that people have, and files that are none."""

import io
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from orchestrator.config import UsageError
from orchestrator.data.packing import Sample
from orchestrator.data.sources import Source, open_source
from orchestrator.data.transforms import decode

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


def write(folder: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return f"folder:{folder}"


def everything(source: Source) -> dict[str, Sample]:
    return {sample.key: sample for split in source.splits.values() for sample in split}


def pixels(sample: Sample) -> np.ndarray:
    image = decode(sample.image)
    assert image.dtype == torch.uint8
    return image.permute(1, 2, 0).numpy()


def keys(samples: Iterable[Sample]) -> list[str]:
    return [sample.key for sample in samples]


IMAGES = {
    "plain.png": encoded(RGB, "PNG"),
    "plain.jpg": encoded(RGB, "JPEG", quality=90),
    "progressive.jpeg": encoded(RGB, "JPEG", progressive=True),
    "plain.gif": encoded(RGB, "GIF"),
    "plain.webp": encoded(RGB, "WEBP", lossless=True),
    "plain.bmp": encoded(RGB, "BMP"),
    "grey.png": encoded(GREY, "PNG"),
    "grey.jpg": encoded(GREY, "JPEG"),
    "palette.png": encoded(RGB.quantize(16), "PNG"),
    "alpha.png": encoded(Image.merge("RGBA", (*RGB.split(), GREY)), "PNG"),
    "transparent.png": encoded(RGB, "PNG", transparency=(1, 2, 3)),
    "bits.png": encoded(GREY.convert("1"), "PNG"),
    "print.jpg": encoded(RGB.convert("CMYK"), "JPEG"),
    "nested/deeper.png": encoded(RGB, "PNG"),
}


def test_every_kind_of_image_decodes_to_what_pillow_sees(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a", {f"cat/{name}": content for name, content in IMAGES.items()}))
    found = everything(source)
    assert {*found} == {f"cat/{name}" for name in IMAGES}
    assert source.skipped == []
    for key, sample in found.items():
        with Image.open(tmp_path / "a" / key) as image:
            seen = np.asarray(image.convert("RGB")).astype(int)
        # decoders of JPEG round differently
        assert np.abs(pixels(sample) - seen).max() <= (3 if ".jp" in key else 0), key


def test_jpeg_and_png_stay_the_bytes_that_they_are(tmp_path: Path) -> None:
    found = everything(open_source(write(tmp_path, {f"cat/{n}": content for n, content in IMAGES.items()})))
    kept = {
        key.removeprefix("cat/")
        for key, sample in found.items()
        if sample.image == (tmp_path / key).read_bytes()
    }
    assert kept == {
        *(
            "plain.png",
            "plain.jpg",
            "progressive.jpeg",
            "grey.png",
            "grey.jpg",
            "transparent.png",
            "nested/deeper.png",
        )
    }


def test_sixteen_bits_become_eight(tmp_path: Path) -> None:
    """They would reach training as uint16, or as white."""
    values = RNG.integers(0, 2**16, (5, 4, 3))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    grey = encoded(Image.fromarray(values[..., 0].astype("uint16")), "PNG")
    files = {"cat/rgb.png": raw_png(width=4, height=5, bits=16, rows=rows), "cat/grey.png": grey}
    found = everything(open_source(write(tmp_path, files)))
    np.testing.assert_allclose(pixels(found["cat/rgb.png"]), values / 257, atol=1)
    np.testing.assert_allclose(pixels(found["cat/grey.png"])[..., 0], values[..., 0] / 257, atol=1)


def test_files_that_are_no_images_are_named_once(tmp_path: Path) -> None:
    cut = IMAGES["plain.jpg"][: len(IMAGES["plain.jpg"]) // 2]
    bomb = raw_png(width=60_000, height=60_000, bits=8, rows=b"")
    bad = {"cat/cut.jpg": cut, "cat/notes.txt": b"no image", "dog/empty.png": b"", "dog/bomb.png": bomb}
    source = open_source(write(tmp_path, {**bad, "dog/fine.png": IMAGES["plain.png"]}))
    assert {*everything(source)} == {"dog/fine.png"}
    assert sorted(line.split(": ")[0] for line in source.skipped) == sorted(
        f"{tmp_path}/{name}" for name in bad
    )


def test_what_is_packed_can_be_decoded(tmp_path: Path) -> None:
    """PIL reads files that torchvision refuses; 300 damaged ones, none of which may stop a training run."""
    rng = np.random.default_rng(1)
    files = {}
    for i in range(300):
        name, content = list(IMAGES.items())[i % 3]
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.integers(min(len(damaged), 60))] = rng.integers(256)
        files[f"cat/{i}-{name}"] = bytes(damaged)
    source = open_source(write(tmp_path, files))
    found = everything(source)
    assert len(found) + len(source.skipped) == 300
    assert len(found) > 50
    for sample in found.values():
        assert pixels(sample).shape[2] == 3


def test_own_split(tmp_path: Path) -> None:
    """A class may be missing on one side; labels count the classes of both."""
    png = IMAGES["plain.png"]
    files = {
        "train/b/1.png": png,
        "train/a/1.png": png,
        "val/b/2.png": png,
        "val/c/3.png": png,
        "readme": b"",
    }
    source = open_source(write(tmp_path, files))
    assert source.classes == ["a", "b", "c"]
    assert [(s.key, s.label) for s in source.splits["train"]] == [("train/a/1.png", 0), ("train/b/1.png", 1)]
    assert [(s.key, s.label) for s in source.splits["val"]] == [("val/b/2.png", 1), ("val/c/3.png", 2)]


def test_split_by_key_is_stable(tmp_path: Path) -> None:
    """A sample keeps its side when others come; a fifth is validation."""
    png = IMAGES["grey.png"]
    name = write(tmp_path, {f"cat/{n:03d}.png": png for n in range(0, 200, 2)})
    before = {split: {*keys(samples)} for split, samples in open_source(name).splits.items()}
    write(tmp_path, {f"cat/{n:03d}.png": png for n in range(1, 200, 2)})
    after = {split: {*keys(samples)} for split, samples in open_source(name).splits.items()}
    assert before["train"] < after["train"]
    assert before["val"] < after["val"]
    assert not after["train"] & after["val"]
    assert len(after["train"]) + len(after["val"]) == 200
    assert 20 < len(after["val"]) < 60


def test_torchvision(tmp_path: Path) -> None:
    """A set of torchvision that needs no network: its own ImageFolder."""
    files = {f"{c}/{n}.png": encoded(RGB.rotate(n), "PNG") for c in ("cat", "dog") for n in range(10)}
    write(tmp_path, files)
    source = open_source("torchvision:ImageFolder", root=str(tmp_path))
    assert source.classes == ["cat", "dog"]
    found = everything(source)
    assert [found[key].label for key in sorted(found)] == [0] * 10 + [1] * 10
    with Image.open(tmp_path / "dog" / "3.png") as image:
        np.testing.assert_array_equal(pixels(found["0000013"]), np.asarray(image))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagenet", "unknown source 'imagenet'; known: digits, folder:PATH, torchvision:NAME"),
        ("folder:", "unknown source 'folder:'"),
        ("folder:/not/there", "no folder /not/there"),
        ("torchvision:NoSuchSet", "torchvision.datasets has no 'NoSuchSet'"),
        ("torchvision:mnist", "torchvision.datasets has no 'mnist'"),  # a module there
        ("torchvision:ImageFolder", "torchvision:ImageFolder below '/not/there': .*No such file"),
        ("torchvision:CocoDetection", "torchvision:CocoDetection below '/not/there': .*annFile"),
    ],
)
def test_unknown_sources(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(name, root="/not/there")


def test_folder_without_classes(tmp_path: Path) -> None:
    name = write(tmp_path, {"image.png": IMAGES["plain.png"]})
    with pytest.raises(UsageError, match=f"{tmp_path} has no class folders"):
        open_source(name)
