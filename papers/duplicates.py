"""Images that two splits have in common: by a perceptual hash, small ones by their pixels.

Source: pHash by `imagehash` (64 signs of a discrete cosine transform), compared by Hamming distance. Measured
on two photographs: JPEG of quality 50 and a reduction to 32 pixels change at most 2 bits, a crop to 95 % 6
and to 90 % 10 in the median; other photographs differ by at least 14. Flat images, as of a sky, are near to
each other whatever they show. A mirrored image has another hash, so both are compared. Soft MoE and V-MoE
remove from the images for pre-training what is in a test set (BiT, Kolesnikov et al. 2020).
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import imagehash
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from orchestrator.data.images import BadImage, decode
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError

SAME, ALIKE = 4, 8  # bits: a duplicate, and one to look at
SMALLEST = 32  # pixels of the shorter side, below which different images have the same hash
TOGETHER = 256  # images that are read at a time
COMPARED = 1 << 24  # pairs at a time: 128 MB

Hashes = NDArray[np.uint64]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HashedSplit:
    """The hashes of the images of a split, all (images,).

    Attributes:
        keys: names of the images, unique in the split.
        number: place of each image in the split.
        bits, mirrored: perceptual hashes of the image and of its mirror image.
        digest: checksum of the pixels.
        small: whether only pixels count.
    """

    name: str
    keys: Sequence[str]
    number: NDArray[np.int64]
    bits: Hashes
    mirrored: Hashes
    digest: Hashes
    small: NDArray[np.bool_]


class Pair(NamedTuple):
    """Places of two images in their `HashedSplit`, and the bits in which they differ."""

    one: int
    other: int
    distance: int
    mirrored: bool


def hash_split(data: DataSet, split: str, name: str) -> HashedSplit:
    """Decodes and hashes every image of a split; those that are damaged are left out, with a warning.

    Raises:
        UsageError: if there is no whole image.
    """
    keys, rows = list[str](), list[tuple[int, int, int, int, bool]]()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (key, found) in enumerate(_images(data, split, pool)):
            if isinstance(found, BadImage):
                log.warning("%s, %s: %s", name, key, found)
            else:
                keys.append(key)
                rows.append((number, *found))
    if not rows:
        raise UsageError(f"{name} has no image that can be decoded: texts cannot be compared")
    number, bits, mirrored, digest, small = zip(*rows, strict=True)
    return HashedSplit(
        name=name,
        keys=keys,
        number=np.array(number, dtype=np.int64),
        bits=np.array(bits, dtype=np.uint64),
        mirrored=np.array(mirrored, dtype=np.uint64),
        digest=np.array(digest, dtype=np.uint64),
        small=np.array(small, dtype=bool),
    )


def _images(
    data: DataSet, split: str, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, tuple[int, int, int, bool] | BadImage]]:
    starts = data.starts(split)
    for shard, of in enumerate(data.manifest.splits[split]):
        keys = data.keys(split, shard)
        for first in range(0, of.rows, TOGETHER):
            images = int(starts[shard]) + np.arange(first, min(first + TOGETHER, of.rows))
            yield from zip(keys[first:], pool.map(_hashed, data.readers(split, images)), strict=False)


def _hashed(read: Callable[[], bytes]) -> tuple[int, int, int, bool] | BadImage:
    try:
        pixels = decode(read()).permute(1, 2, 0).contiguous().numpy()
    except BadImage as error:
        return error
    shape = np.array(pixels.shape).tobytes()
    digest = int.from_bytes(hashlib.blake2b(shape + pixels.tobytes(), digest_size=8).digest(), "big")
    if min(pixels.shape[:2]) < SMALLEST:
        return 0, 0, digest, True
    image = Image.fromarray(pixels).convert("L")
    bits, mirrored = (
        int(str(imagehash.phash(each)), 16)
        for each in (image, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    )
    return bits, mirrored, digest, False


def pairs(one: HashedSplit, other: HashedSplit, most: int = ALIKE) -> Iterator[Pair]:
    """Yields the pairs of images of two splits that differ by at most `most` bits, or by no pixel."""
    where: dict[int, list[int]] = {}
    for j in np.flatnonzero(other.small).tolist():
        where.setdefault(int(other.digest[j]), []).append(j)
    for i in np.flatnonzero(one.small).tolist():
        yield from (Pair(i, j, 0, False) for j in where.get(int(one.digest[i]), ()))
    mine, theirs = np.flatnonzero(~one.small), np.flatnonzero(~other.small)
    rows = max(1, COMPARED // max(1, len(theirs)))
    for first in range(0, len(mine), rows):
        chunk = mine[first : first + rows]
        straight, turned = (
            np.bitwise_count(bits[chunk, None] ^ other.bits[None, theirs])
            for bits in (one.bits, one.mirrored)
        )
        nearest = np.minimum(straight, turned)
        for i, j in np.argwhere(nearest <= most).tolist():
            distance = int(nearest[i, j])
            yield Pair(int(chunk[i]), int(theirs[j]), distance, bool(turned[i, j] < straight[i, j]))
