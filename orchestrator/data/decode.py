"""Encoded images of any common kind as 8-bit RGB, upright; whatever is broken is a `BadImage`.

Ordinary JPEGs go through torchvision, which is faster than Pillow by a third; all else goes through Pillow,
within 20 % of torchvision for PNG. Both let go of Python's lock meanwhile.
"""

import io
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SCALED_FROM = 2**19  # pixels; below, decoding a JPEG at half its size gains nothing over torchvision
START_OF_FRAME, EXIF_OR_XMP = (0xC0, 0xC1, 0xC2), 0xE1  # markers of JPEG
FLIPS = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}  # EXIF orientation -> dims of (3, H, W)

# what follows is that torchcodec should be used
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities of TorchVision")
# alpha is dropped as `decode` says
warnings.filterwarnings("ignore", "Palette images with Transparency expressed in bytes")


class BadImage(ValueError):
    """Bytes that are no whole image; the message is one line that says why."""


def decode(encoded: bytes) -> Tensor:
    """(3, H, W) uint8, upright, by content and not by name.

    Colours as Pillow's ``convert("RGB")`` has them, alpha dropped, 16 bits cut to the high byte; the first
    frame of several.

    Raises:
        BadImage: for bytes that are no image, or not a whole one, or above Pillow's limit of 179 megapixels.
    """
    return Picture(encoded).pixels()


class Picture:
    """An encoded image whose header is read: `height` and `width` in pixels, upright.

    Raises:
        BadImage: as `decode`; here for the header, in `pixels` for the rest.
    """

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        with _broken_is_bad():
            plain = _plain_jpeg(encoded)
            self._orientation = 1 if plain else _orientation(self._image)
            self._jpeg = plain is not None or _ordinary_jpeg(self._image)
            width, height = plain or self._image.size
            self.height, self.width = (width, height) if self._orientation > 4 else (height, width)

    @cached_property
    def _image(self) -> ImageFile:
        return Image.open(io.BytesIO(self._encoded), formats=FORMATS)

    def scale(self, most: float) -> int:
        """The largest of 1, 2, 4 and 8 up to `most` by which it is worth to have the image reduced as it is
        decoded: 1 unless it is a large JPEG.
        """
        worth = self._jpeg and self.height * self.width >= SCALED_FROM
        return next(scale for scale in (8, 4, 2, 1) if scale <= most or scale == 1) if worth else 1

    def pixels(self, scale: int = 1) -> Tensor:
        """(3, ceil(height / scale), ceil(width / scale)) uint8; to be called once.

        `scale` is 1, or what the method of that name said: only a part of a JPEG's frequencies is decoded.
        """
        with _broken_is_bad():
            if scale > 1:
                self._image.draft(None, (self._image.width // scale, self._image.height // scale))
            if scale == 1 and self._jpeg:
                data = torch.frombuffer(bytearray(self._encoded), dtype=torch.uint8)
                image = decode_image(data, ImageReadMode.RGB)
            else:
                image = _rgb(self._image)
            if self._orientation > 4:
                image = image.transpose(1, 2)
            return image.flip(FLIPS[self._orientation]) if self._orientation in FLIPS else image


@contextmanager
def _broken_is_bad() -> Iterator[None]:
    try:
        yield
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"not an image of a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # damaged files make decoders raise nearly anything
        lines = str(error).splitlines() or [""]
        reason = re.sub(r".*\.cpp:\d+, ", "", lines[0])  # torchvision's names the machine that built it
        raise BadImage(f"{type(error).__name__}: {reason}") from None


def _plain_jpeg(encoded: bytes) -> tuple[int, int] | None:
    """Width and height of an ordinary JPEG without EXIF and XMP, as most are: 50 us sooner than by Pillow, of
    the 800 that one takes.
    """
    if not encoded.startswith(b"\xff\xd8"):
        return None
    at = 2
    while at + 10 <= len(encoded) and encoded[at] == 0xFF and encoded[at + 1] != EXIF_OR_XMP:
        if encoded[at + 1] in START_OF_FRAME:
            bits, height, width, components = struct.unpack_from(">BHHB", encoded, at + 4)
            plain = bits == 8 and components in (1, 3) and 0 < height * width < 2**26
            return (width, height) if plain else None
        at += 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")
    return None


def _ordinary_jpeg(image: ImageFile) -> bool:
    """Not one of print's four colours."""
    return image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB")


def _orientation(image: ImageFile) -> int:
    """EXIF's, 1 to 8; 1 is upright, as is what has none or a damaged one."""
    if image.format == "TIFF":
        return 1  # Pillow turns it itself
    if image.format == "PNG":
        image.load()  # EXIF may come after the pixels, whose damage is not EXIF's
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _rgb(image: Image.Image) -> Tensor:
    """(3, H, W) in the channels-last memory that resizing is fastest with."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        grey = (np.asarray(image) >> 8).astype("uint8")  # `convert` would clip it to white
        pixels = np.repeat(grey[..., None], 3, axis=2)
    elif image.mode in ("I", "F"):
        raise BadImage(f"samples of 32 bits (mode {image.mode}), whose white is unknown")
    else:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)
