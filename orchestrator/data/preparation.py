"""Preparation of encoded images before they are decoded as 8-bit RGB: transparent pixels get a background,
and samples of 16 bits a white.

Without it, training shows transparent pixels in the colour that an editor left below them, and the high byte
of 16 bits, which is nearly black where only some of the bits are used.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps
from torch import Tensor

from moe.signature import WHITE
from orchestrator.data.images import BadImage, Picture, damage_as_bad_image, encode_png, open_image
from orchestrator.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The preparation of the images of a data set, and so of every image that its models see.

    background: the colour under transparent pixels, as ``white`` or ``#808080``; None: alpha is dropped.
    white: the sample of 16 bits that becomes 255, and the samples above it too; None: the high byte is kept.

    Raises:
        UsageError: for an unknown colour, and a white that is none of 1 to 65535.
    """

    background: str | None = None
    white: int | None = None

    @classmethod
    def of(cls, kept: Any) -> "Preparation":
        """Returns what a signature, or the manifest of a data set, keeps."""
        return cls(background=kept.background, white=kept.white)

    def __post_init__(self) -> None:
        if self.background is not None:
            colour(self.background)
        if self.white is not None and not 1 <= self.white <= WHITE:
            raise UsageError(f"`white` {self.white}: samples of 16 bits have 1 to {WHITE}")

    def prepare(self, encoded: bytes) -> bytes:
        """Returns the image as it is, or as an upright PNG if there was something to be done.

        Raises:
            BadImage: for bytes that are not a whole image, and, with a white, for colours of 16 bits in TIFF.
        """
        if self.white is not None:
            picture = Picture(encoded)
            samples = picture.samples()
            if samples is not None and picture.format == "TIFF" and len(samples) > 1:
                raise BadImage(
                    "colours of 16 bits in TIFF are read by their high bytes, and a white needs low bytes:"
                    " make a PNG of it"
                )
            encoded = encoded if samples is None else _of_8_bits(samples, self.white)
        if self.background is not None and is_transparent(encoded):
            encoded = _on_background(encoded, self.background)
        return encoded


AS_IT_IS = Preparation()


def colour(name: str) -> tuple[int, int, int]:
    """Returns the red, green and blue of a colour, from 0 to 255 each.

    Raises:
        UsageError: for a name that is not a colour of CSS, as ``white``, or ``#rrggbb``.
    """
    try:
        return ImageColor.getcolor(name, "RGB")  # pyright: ignore[reportReturnType] # a triple in this mode
    except ValueError:
        raise UsageError(f"unknown colour {name!r}: give a name of CSS, as white, or #rrggbb") from None


def is_transparent(encoded: bytes) -> bool:
    """Returns whether an image has transparent pixels. Raises BadImage if it is damaged."""
    with damage_as_bad_image(encoded), open_image(encoded) as image:
        if not image.has_transparency_data:
            return False
        lowest, _ = image.convert("RGBA").getchannel("A").getextrema()
    return lowest != 255


def _on_background(encoded: bytes, background: str) -> bytes:
    with damage_as_bad_image(encoded), open_image(encoded) as image:
        pixels = ImageOps.exif_transpose(image).convert("RGBA")
    flat = Image.new("RGBA", pixels.size, (*colour(background), 255))
    flat.alpha_composite(pixels)
    return encode_png(np.asarray(flat.convert("RGB")))


def _of_8_bits(samples: Tensor, white: int) -> bytes:
    """Encodes samples of 16 bits, (channels, height, width), with alpha as they have it."""
    whites = [white] * len(samples)
    if len(samples) in (2, 4):
        whites[-1] = WHITE
    scaled = samples.double() * 255 / torch.tensor(whites).view(-1, 1, 1)
    pixels = scaled.round().clamp(max=255).to(torch.uint8).permute(1, 2, 0).numpy()
    return encode_png(pixels[..., 0] if len(samples) == 1 else pixels)
