"""The decoded images of a small split, kept in memory: decoding them takes longer than training on them."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from orchestrator.data.images import Transform
from orchestrator.data.index import Ints
from orchestrator.data.shards import DataSet

SMALL = 32  # pixels of a side
SPLIT_BYTES = 160 << 20  # of memory for the images of a split: 50,000 of 32 pixels fit
SPLITS = 4  # kept in a process: of a run, and of its few-shot evaluation


class DecodedSplit:
    """The central crops of a split's images, (rows, size, size, 3), as far as they have been decoded."""

    def __init__(self, rows: int, size: int) -> None:
        # Memory that is not written to is not taken.
        self._pixels = np.zeros((rows, size, size, 3), np.uint8)
        self._known = np.zeros(rows, bool)

    def of(self, places: Ints) -> NDArray[np.uint8] | None:
        """Returns the images at (n,) places of the split, or None if any has not been decoded."""
        return self._pixels[places] if self._known[places].all() else None

    def keep(self, place: int, pixels: NDArray[np.uint8]) -> None:
        self._pixels[place] = pixels
        self._known[place] = True  # last, because another thread may read it


@lru_cache(maxsize=SPLITS)
def decoded_split(data: DataSet, split: str, transform: Transform) -> DecodedSplit | None:
    """Returns what this process keeps of a split; None if images are large, many, or never the same."""
    size, rows = transform.size, data.manifest.rows(split)
    if size > SMALL or rows * size * size * 3 > SPLIT_BYTES or transform.crops():
        return None
    return DecodedSplit(rows, size)
