"""From encoded images to the model's input: decode, crop, flip and augment in uint8; normalise on the device.

Ordinary JPEGs are decoded by torchvision, which is a third faster than Pillow; everything else by Pillow,
which is within 20 % of torchvision for PNG. Both release Python's lock while they decode.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from torch import Tensor

from moe.signature import Signature
from orchestrator.data.augment.base import AugmentationConfig, Box, at, tv
from orchestrator.data.undecodable import undecodable

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")
IMAGE_FILES = re.compile(
    r"jpe?g|jpe|jfif|png|webp|bmp|gif|tiff?|p[pgbn]m|avifs?|jp[2cfx]|j2[ck]", re.IGNORECASE
)
SCALED_FROM = 2**19  # pixels; torchvision decodes a smaller JPEG as fast as Pillow does at half its size
# A decoded image takes up to 10 bytes per pixel while it becomes RGB: 640 MB for each decoding thread.
MAX_PIXELS = 64_000_000
# Huffman codes have at least a bit, and a JPEG has a code for each block of 8 x 8 pixels: at most 512 pixels
# per byte. A header that promises more is damaged, and libjpeg would fill the image with grey. A lossless
# WebP of one colour has 23,000.
JPEG_PIXELS_PER_BYTE = 512
PNG_DEPTH = 24  # the byte of a PNG that has the bits of a sample
TIFF_BITS = 258  # the tag of TIFF that has them
FLIPS = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}  # EXIF orientation -> dims of (3, H, W)

# Why Pillow cannot identify an image, which BadImage says.
warnings.filterwarnings("ignore", "image file could not be identified because")
# This warning recommends torchcodec.
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities of TorchVision")
# `decode` drops alpha, as documented.
warnings.filterwarnings("ignore", "Palette images with Transparency expressed in bytes")


class BadImage(ValueError):
    """Raised for bytes that are not a whole image. The message gives the reason in one line."""


def decode(encoded: bytes) -> Tensor:
    """Decodes to (3, H, W) uint8, upright; the format is found from the content, not from a name.

    Colours are those of Pillow's ``convert("RGB")``: alpha is dropped. Samples of 16 bits keep their high
    byte. The first of several frames is taken.

    Raises:
        BadImage: for bytes that are not a whole image, and for more than `MAX_PIXELS` pixels.
    """
    return Picture(encoded).pixels()


def open_image(encoded: bytes) -> ImageFile:
    """Reads the header of an image of `FORMATS`, of those that this Pillow has. Raises what Pillow raises."""
    Image.init()
    return Image.open(io.BytesIO(encoded), formats=[name for name in FORMATS if name in Image.OPEN])


def may_be_image(name: str) -> bool:
    """Judges a file by its extension; a file without an extension may be an image."""
    _, dot, extension = name.rpartition("/")[2].rpartition(".")
    return not dot or IMAGE_FILES.fullmatch(extension) is not None


def encode_png(pixels: np.ndarray) -> bytes:
    """Encodes (H, W) or (H, W, channels) uint8 by Pillow; torchvision's encoder crashes on a million rows."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


class Picture:
    """An encoded image whose header has been read: its `format`, `height` and `width` in pixels, upright.

    The constructor raises BadImage if the header is damaged, `pixels` for damage after the header.
    """

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        with damage_as_bad_image(encoded):
            self._image = open_image(encoded)
            self.format = self._image.format
            _check_size(self._image, len(encoded))
            self._orientation = _orientation(self._image)
            # CMYK JPEGs, made for print, are left to Pillow.
            self._jpeg = self.format in ("JPEG", "MPO") and self._image.mode in ("L", "RGB")
            width, height = self._image.size
            self.height, self.width = (width, height) if self._orientation > 4 else (height, width)

    def scale(self, most: float) -> int:
        """Returns the scaling factor to decode with: 1, 2, 4 or 8, at most `most`; 1 unless a large JPEG."""
        worth = self._jpeg and self.height * self.width >= SCALED_FROM
        return next(scale for scale in (8, 4, 2, 1) if scale <= most or scale == 1) if worth else 1

    def pixels(self, scale: int = 1) -> Tensor:
        """Decodes to (3, ceil(height / scale), ceil(width / scale)) uint8; may be called once.

        `scale` is 1, or a result of the method `scale`: then only a part of a JPEG's frequencies is decoded.
        """
        with damage_as_bad_image(self._encoded):
            if scale > 1:
                self._image.draft(None, (self._image.width // scale, self._image.height // scale))
            fast = scale == 1 and self._jpeg
            return self._upright(_by_torchvision(self._encoded, "RGB") if fast else _rgb(self._image))

    def samples(self) -> Tensor | None:
        """Decodes samples of 16 bits to (channels, height, width) int32; may be called once. Returns None for
        an image of fewer bits. Of colours in TIFF only high bytes are known: low bytes are taken as 255.
        """
        image = self._image
        with damage_as_bad_image(self._encoded):
            if self.format == "PNG" and self._encoded[PNG_DEPTH] == 16:
                return self._upright(_by_torchvision(self._encoded, "UNCHANGED").to(torch.int32))
            if _is_grey_of_16_bits(image):
                return self._upright(torch.from_numpy(np.asarray(image).astype("int32"))[None])
            bits = getattr(image, "tag_v2", {}).get(TIFF_BITS, ())
            deep = 16 in (bits if isinstance(bits, tuple) else (bits,))
            return (_rgb(image).to(torch.int32) << 8) | 255 if deep else None

    def _upright(self, image: Tensor) -> Tensor:
        if self._orientation > 4:
            image = image.transpose(1, 2)
        return image.flip(FLIPS[self._orientation]) if self._orientation in FLIPS else image


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Makes a square of `size` pixels, augmented; other fields are those of `DataConfig`."""

    size: int
    augment: tuple[AugmentationConfig, ...] = ()
    eval_resize: Literal["shorter", "square"] = "shorter"
    eval_crop: float = 0.875
    eval_interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    eval_pixels: Literal["whole", "timm", "transformers", "parts"] = "whole"

    @classmethod
    def of(cls, signature: Signature) -> "Transform":
        """Returns what makes a model's input of an image, after its preparation and before normalisation."""
        return cls(size=signature.image_size, **eval_settings(signature))

    def __call__(self, encoded: bytes, key: str = "") -> Tensor:
        """Returns one image as (3, size, size) uint8. Its randomness is a function of `key` alone.

        The generator is Python's, seeded with the SHA-512 of `key`; numpy's takes 50 us longer to start.

        Raises:
            BadImage: for bytes that are not a whole image.
        """
        if not self.crops():
            return self.vary(self.central(encoded), key)
        (crop,), rng, picture = at(self.augment, "crop"), Random(key), Picture(encoded)
        box = crop.box(picture.height, picture.width, rng)
        return self._varied(_cropped(picture, box, self.size), rng)

    def central(self, encoded: bytes) -> Tensor:
        """Returns what resizing to size / eval_crop and cropping the middle keeps: an image before the random
        operations of all but random crops. What would be too large when resized is cropped first.
        """
        picture, size = Picture(encoded), self.size
        height, width = picture.height, picture.width
        if height == width == size and self.eval_pixels in ("whole", "parts"):
            return picture.pixels()
        short = resized_side(size, self.eval_crop, self.eval_pixels)
        shorter = min(height, width) if self.eval_resize == "shorter" else 0
        h, w = (int(short * side / shorter) if shorter else short for side in (height, width))
        if self.eval_pixels != "parts" and h * w <= MAX_PIXELS:
            return self._middle(picture, h, w)
        h, w = (max(1, round((shorter or side) * self.eval_crop)) for side in (height, width))
        middle = Box((height - h) // 2, (width - w) // 2, h, w)
        return _cropped(picture, middle, size, self.eval_interpolation)

    def _middle(self, picture: Picture, h: int, w: int) -> Tensor:
        """Resizes to (h, w) as the library of `eval_pixels`, and crops whole pixels of that."""
        size, way = self.size, self.eval_interpolation
        scale = (
            picture.scale(min(picture.height / h, picture.width / w)) if self.eval_pixels == "whole" else 1
        )
        image = picture.pixels(scale)
        if self.eval_pixels == "timm":
            pillow = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
            pillow = pillow.resize((w, h), Image.Resampling[way.upper()])  # as torchvision's Resize does
            image = torch.from_numpy(np.array(pillow)).permute(2, 0, 1)
        else:
            image = _resized(image[None], h, w, way)
        # torchvision, and so timm, rounds halves to even numbers; transformers cuts them off.
        cut = int if self.eval_pixels == "transformers" else round
        if (h, w) == (size, size):
            return image
        return tv().crop(image, cut((h - size) / 2), cut((w - size) / 2), size, size)

    def vary(self, image: Tensor, key: str) -> Tensor:
        """Returns `image`, a result of `central`, after the random operations of `key`."""
        return self._varied(image, Random(key)) if self.varies() else image

    def crops(self) -> bool:
        """Returns whether an image is cropped at random, which begins with the whole image."""
        return bool(at(self.augment, "crop"))

    def varies(self) -> bool:
        """Returns whether an image differs from one key to another."""
        return any(member.stage != "batch" for member in self.augment)

    def _varied(self, image: Tensor, rng: Random) -> Tensor:
        for member in self.augment:
            image = member.apply(image, rng)
        return image


def eval_settings(signature: Signature) -> dict[str, Any]:
    """Returns the fields of `DataConfig` that a signature has."""
    return {
        f"eval_{name}": getattr(signature, name) for name in ("resize", "crop", "interpolation", "pixels")
    }


def resized_side(size: int, crop: float, pixels: str) -> int:
    """Returns the side whose middle `size` are cropped. transformers states it, timm rounds down."""
    return round(size / crop) if pixels == "transformers" else math.floor(size / crop)


def _cropped(picture: Picture, box: Box, size: int, interpolation: str = "bilinear") -> Tensor:
    """Returns the box resized to (3, size, size); the image is decoded no larger than this needs."""
    scale = picture.scale(min(box.height, box.width) / size)

    def reduced(position: int) -> int:
        # Halves are always rounded up, so that a side of `scale` pixels keeps one pixel.
        return (position + scale // 2) // scale

    top, left = reduced(box.top), reduced(box.left)
    height, width = reduced(box.top + box.height) - top, reduced(box.left + box.width) - left
    crop = picture.pixels(scale)[None, :, top : top + height, left : left + width]
    # Resizing takes half the time in this layout.
    crop = crop.contiguous(memory_format=torch.channels_last)
    return _resized(crop, size, size, interpolation)


def _resized(images: Tensor, height: int, width: int, interpolation: str) -> Tensor:
    """Returns the one image of (1, 3, H, W)."""
    if images.shape[2:] == (height, width):
        return images[0]
    import torchvision.transforms

    way = torchvision.transforms.InterpolationMode(interpolation)
    return tv().resize(images, [height, width], way, antialias=True)[0]


def _by_torchvision(encoded: bytes, mode: str) -> Tensor:
    import torchvision.io

    data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    return torchvision.io.decode_image(data, torchvision.io.ImageReadMode[mode])


@contextmanager
def damage_as_bad_image(encoded: bytes) -> Iterator[None]:
    """Raises BadImage for whatever a decoder of these bytes raises."""
    try:
        yield
    except BadImage:
        raise
    except Exception as error:  # decoders raise nearly anything for damaged files
        if known := undecodable(encoded):
            raise BadImage(known) from None
        if isinstance(error, UnidentifiedImageError):
            raise BadImage(f"not an image of a known format ({', '.join(FORMATS)})") from None
        lines = str(error).splitlines() or [""]
        reason = re.sub(r".*\.cpp:\d+, ", "", lines[0])  # torchvision's build path
        raise BadImage(f"{type(error).__name__}: {reason}") from None


def _check_size(image: ImageFile, size: int) -> None:
    """Raises BadImage for an image of `size` bytes whose header promises too many pixels."""
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        raise BadImage(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS / 1e6:g} million")
    if image.format in ("JPEG", "MPO") and pixels > JPEG_PIXELS_PER_BYTE * size:
        raise BadImage(
            f"{image.width} x {image.height} pixels in a JPEG of {size} bytes, which holds at most"
            f" {JPEG_PIXELS_PER_BYTE} per byte: its header is damaged"
        )


def _orientation(image: ImageFile) -> int:
    """Returns the EXIF orientation, 1 to 8; 1, which is upright, if there is none or it is damaged."""
    if image.format == "TIFF":
        return 1  # Pillow rotates TIFF itself
    if image.format == "PNG":
        # EXIF may follow the pixels; damage to the pixels is raised here, outside of the `try`.
        image.load()
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _rgb(image: Image.Image) -> Tensor:
    """Decodes by Pillow to (3, H, W) in channels-last memory, in which resizing is fastest."""
    if _is_grey_of_16_bits(image):
        grey = (np.asarray(image) >> 8).astype("uint8")  # `convert` would clip to white
        pixels = np.repeat(grey[..., None], 3, axis=2)
    elif image.mode in ("I", "F"):
        raise BadImage(f"samples of 32 bits (mode {image.mode}), whose white is unknown")
    else:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _is_grey_of_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
