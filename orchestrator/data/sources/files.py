"""Images that are files of their own."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator import storage
from orchestrator.data.decode import BadImage

EXTENSIONS = (
    "jpg",
    "jpeg",
    "jpe",
    "jfif",
    "png",
    "webp",
    "bmp",
    "gif",
    "tif",
    "tiff",
    "ppm",
    "pgm",
    "pbm",
    "pnm",
)
READERS = 16  # at the same time: S3 answers slowly, but many


def read_files(locations: Sequence[str]) -> Iterator[bytes | BadImage]:
    """Raises OSError if storage fails; a file that is not there is a BadImage."""
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(_read, locations)


def may_be_image(name: str) -> bool:
    """By its extension; a name without one may be anything."""
    _, dot, extension = name.rpartition("/")[2].rpartition(".")
    return not dot or extension.lower() in EXTENSIONS


def _read(location: str) -> bytes | BadImage:
    if storage.is_local(location) and os.path.exists(location) and not os.path.isfile(location):
        return BadImage("no regular file")  # to open a pipe would wait for ever
    try:
        return storage.read_bytes(location)
    except FileNotFoundError:
        return BadImage("no such file")
    except PermissionError as error:
        return BadImage(error.strerror or str(error))
