"""The bytes that a shard stores of an image."""

import io

import numpy as np
from PIL import Image

from orchestrator.data.decode import decode


def stored(encoded: bytes) -> bytes:
    """JPEG, PNG and WebP as they are; what else training can decode, as PNG of what it sees.

    Raises:
        BadImage: for what training cannot decode.
    """
    pixels = decode(encoded)
    return encoded if _is_kept(encoded) else png(pixels.permute(1, 2, 0).numpy())


def png(pixels: np.ndarray) -> bytes:
    """Of (H, W) or (H, W, 3) uint8. By Pillow: torchvision's encoder dies of an image of a million rows."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _is_kept(encoded: bytes) -> bool:
    starts = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
    return encoded.startswith(starts) or (encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP")
