"""White of 16 bits and the background of transparent pixels, in packing and for every image of the model."""

import shutil
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from orchestrator.checkpoint.export import export
from orchestrator.checkpoint.models import read_model
from orchestrator.data.images import BadImage, Picture, decode
from orchestrator.data.manifest import open_manifest
from orchestrator.data.preparation import Preparation
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.pack import pack
from tests.orchestrator.checkpoint.test_weights import DENSE, save_trained
from tests.orchestrator.data.images import encoded, exif, write

VALUES = np.arange(12, dtype=np.uint16).reshape(3, 4) * 300  # up to 3300, of 12 bits


def png_of_16_bits(channels: np.ndarray) -> bytes:
    """Encodes (height, width, channels) uint16 as PNG by hand, which Pillow cannot."""
    height, width, depth = channels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[depth]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in channels)

    def chunk(name: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + crc

    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


OPAQUE = np.full_like(VALUES, 65535)
DEEP = {
    "grey.png": png_of_16_bits(VALUES[..., None]),
    "grey.tiff": encoded(Image.fromarray(VALUES), "TIFF"),
    "rgb.png": png_of_16_bits(np.stack([VALUES] * 3, 2)),
    "alpha.png": png_of_16_bits(np.stack([VALUES] * 3 + [OPAQUE], 2)),
    "grey alpha.png": png_of_16_bits(np.stack([VALUES, OPAQUE], 2)),
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("white", [255, 3300, 65535])
def test_white_of_16_bits(name: str, white: int) -> None:
    found = decode(Preparation(white=white).prepare(DEEP[name]))
    expected = np.minimum(np.round(VALUES * 255.0 / white), 255).astype("uint8")
    assert found.tolist() == [expected.tolist()] * 3
    samples = Picture(DEEP[name]).samples()
    assert samples is not None
    assert samples[0].tolist() == VALUES.tolist()


def tiff_of_16_bits(colours: np.ndarray) -> bytes:
    """Encodes (height, width, 3) uint16 as TIFF by hand, which Pillow cannot."""
    height, width, _ = colours.shape
    data = colours.astype("<u2").tobytes()
    fields = {256: width, 257: height, 258: 0, 259: 1, 262: 2, 273: 0, 277: 3, 278: height, 279: len(data)}
    bits = 8 + 2 + 12 * len(fields) + 4  # where the bits of a sample are, before the samples
    fields |= {258: bits, 273: bits + 6}
    entries = (struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    header = b"II*\0" + struct.pack("<IH", 8, len(fields))
    whole = header + b"".join(entries) + struct.pack("<IHHH", 0, 16, 16, 16) + data
    return whole.replace(struct.pack("<HHI", 258, 4, 1), struct.pack("<HHI", 258, 3, 3))


def test_colours_of_16_bits_in_tiff_are_refused_with_a_white() -> None:
    """Only their high bytes are read, so their largest sample is a bound, and no white can be applied."""
    image = tiff_of_16_bits(np.stack([VALUES] * 3, 2))
    samples = Picture(image).samples()
    assert samples is not None
    assert samples[0].tolist() == (VALUES | 255).tolist()
    assert decode(Preparation(background="white").prepare(image))[0].tolist() == (VALUES >> 8).tolist()
    with pytest.raises(BadImage, match=r"TIFF are read by their high bytes.*make a PNG"):
        Preparation(white=3300).prepare(image)


def test_a_turned_image_of_16_bits() -> None:
    turned = encoded(Image.fromarray(VALUES), exif=exif(6))
    expected = np.rot90(np.round(VALUES * 255.0 / 3300), -1).astype("uint8")
    assert decode(Preparation(white=3300).prepare(turned))[0].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_images_of_8_bits_are_as_they_are(kind: str) -> None:
    image = encoded(Image.fromarray(VALUES.astype("uint8")), kind)
    assert Preparation(white=4095, background="white").prepare(image) is image
    assert Picture(image).samples() is None


def test_white_before_the_background() -> None:
    """A clear pixel of 12 bits becomes the background, and the others are brighter."""
    clear = OPAQUE.copy()
    clear[0, 0] = 0
    image = png_of_16_bits(np.stack([VALUES, VALUES, VALUES, clear], 2))
    found = decode(Preparation(white=3300, background="#0000ff").prepare(image))
    assert found[:, 0, 0].tolist() == [0, 0, 255]
    assert found[:, 2, 3].tolist() == [255, 255, 255]


def test_what_is_refused() -> None:
    for settings, message in (
        ({"white": 0}, "1 to 65535"),
        ({"background": "whyte"}, "unknown colour 'whyte'"),
    ):
        with pytest.raises(UsageError, match=message):
            Preparation(**settings)
    with pytest.raises(BadImage):
        Preparation(white=1).prepare(b"-")


def test_it_stays_with_the_data_and_the_model(tmp_path: Path) -> None:
    """The manifest keeps it, other manifests have no word of it, and a model of the data prepares so."""
    write(tmp_path / "in", {f"{c}/{n}.png": DEEP["grey.png"] for c in "ab" for n in range(4)})
    source = open_source(f"folder:{tmp_path}/in", val_frac=0.4)
    bare = pack(str(tmp_path / "bare"), source).manifest
    assert b"white" not in bare.to_json()
    pack(str(tmp_path / "out"), source, preparation=Preparation(white=3300))
    manifest = open_manifest(str(tmp_path / "out"))
    assert (manifest.white, manifest.background) == (3300, None)
    assert manifest.digest() != bare.digest()
    run = replace(DENSE, data=replace(DENSE.data, path=str(tmp_path / "out")))
    save_trained(run, str(tmp_path / "checkpoints"), 1)
    export(str(tmp_path / "checkpoints"), str(tmp_path / "model.safetensors"))
    for location in ("checkpoints", "model.safetensors"):
        assert read_model(str(tmp_path / location)).preparation == Preparation(white=3300)
    shutil.rmtree(tmp_path / "out")  # an exported file needs no data
    assert read_model(str(tmp_path / "model.safetensors")).preparation == Preparation(white=3300)


def test_alpha_of_grey_is_not_scaled_by_the_white() -> None:
    clear = OPAQUE.copy()
    clear[0, 0] = 6000  # above the white, and yet nearly transparent
    image = png_of_16_bits(np.stack([VALUES, clear], 2))
    found = decode(Preparation(white=3300, background="white").prepare(image))
    assert found[:, 0, 0].tolist() == [232, 232, 232]
    assert found[:, 0, 1].tolist() == [23, 23, 23]
