"""Transparent pixels, which training shows in the colour that an editor left below them: it drops alpha."""

import io

from PIL import Image, ImageColor, ImageOps

from orchestrator.data.images import damage_as_bad_image, open_image
from orchestrator.errors import UsageError

Colour = tuple[int, int, int]


def colour(name: str) -> Colour:
    """Returns the red, green and blue of a colour, from 0 to 255 each.

    Raises:
        UsageError: for a name that is not a colour of CSS, as ``white``, or ``#rrggbb``.
    """
    try:
        return ImageColor.getcolor(name, "RGB")  # pyright: ignore[reportReturnType] # a triple in this mode
    except ValueError:
        raise UsageError(f"unknown colour {name!r}: give a name of CSS, as white, or #rrggbb") from None


def on_background(encoded: bytes, background: Colour | None) -> bytes | None:
    """Returns an image with transparent pixels as an upright PNG on `background`, or as it is if that is
    None. Returns None for an image without transparent pixels.

    Raises:
        BadImage: for bytes that are not a whole image.
    """
    with damage_as_bad_image(encoded), open_image(encoded) as image:
        if not image.has_transparency_data:
            return None
        pixels = ImageOps.exif_transpose(image).convert("RGBA")
    lowest, _ = pixels.getchannel("A").getextrema()
    if lowest == 255:
        return None
    if background is None:
        return encoded
    flat = Image.new("RGBA", pixels.size, (*background, 255))
    flat.alpha_composite(pixels)
    png = io.BytesIO()
    flat.convert("RGB").save(png, format="PNG")
    return png.getvalue()
