"""Recognition of bytes that no decoder here reads: their format, and what to do about them."""

import re

from PIL import features

SHOWN = 80  # characters of bytes that are no image
# Formats that Pillow may be built without -> how they begin, and the name of Pillow's feature.
OPTIONAL = {
    "AVIF": (rb".{4}ftyp(?:avi[fs]|(?:mif1|msf1).{0,60}avi[fs])", "avif"),
    "JPEG 2000": (rb"\0\0\0\x0cjP  \r\n|\xff\x4f\xff\x51", "jpg_2000"),
    "WebP": (rb"RIFF.{4}WEBP", "webp"),
}
# How other bytes begin -> what they are, and what to do.
OTHERS = {
    rb"version https://git-lfs": 'a Git LFS pointer: "git lfs pull" fetches the image',
    rb"\s*(?:<[?!][^>]*>\s*)*<(?:!doctype html|html|head|body)\b": "an HTML page in place of an image",
    rb"\s*(?:<[?!].*)?<svg[\s>]": "an SVG drawing: make a PNG of it",
    rb"\s*<[?!\w]": "XML, perhaps what a server said: {begin}",
    rb"\s*[\[{]\s*[\"\[\]{}]": "JSON, perhaps what a server said: {begin}",
    rb"data:image/": "a data URL: decode the base64 behind its comma",
    rb"(?:/9j/|iVBORw0KGgo|UklGR|R0lGOD)[\w+/=\s]{8}": "base64 text: decode it",
    rb"\x1f\x8b": "compressed by gzip: unpack it",
    rb"BZh\d|\xfd7zXZ\0|\x28\xb5\x2f\xfd": "compressed by bzip2, xz or zstd: unpack it",
    rb"PK\x03\x04": "a zip archive: unpack it",
    rb".{128}DICM": "DICOM: make a PNG of it",
    rb".{4}ftyp(?:hei[cmxs]|hev[cmxs]|mif1|msf1)": "HEIC: make a JPEG or PNG of it",
    rb".{4}ftyp": "a video",
    rb"\xff\x0a|\0\0\0\x0cJXL ": "JPEG XL: make a JPEG or PNG of it",
    rb"%PDF-": "a PDF: make a PNG of it",
    rb"8BPS": "a Photoshop file: make a PNG of it",
    rb"\x93NUMPY": "an array of numpy: make a PNG of it",
}


def undecodable(encoded: bytes) -> str:
    """Returns what the bytes are, if no decoder is for them, else an empty text."""
    begin = encoded[:1024].removeprefix(b"\xef\xbb\xbf")
    for name, (start, feature) in OPTIONAL.items():
        if re.match(start, begin, re.DOTALL):
            hint = f"{name}, which this Pillow cannot decode: install one with its feature {feature}"
            return "" if features.check(feature) else hint
    for start, what in OTHERS.items():
        if re.match(start, begin, re.DOTALL | re.IGNORECASE):
            shown = " ".join(begin.decode(errors="replace").split())[:SHOWN]
            return f"not an image that is decoded, but {what.format(begin=shown)}"
    return ""
