"""A source: images of stripes, which lie or stand."""

from collections.abc import Iterator

import numpy as np

from orchestrator import Sample, Source, encode_png


def stripes(number: int) -> np.ndarray:
    lying = np.tile(np.uint8([[0], [25 * (number % 10) + 30]]), (4, 8))
    return lying if number % 2 else lying.T


def make() -> Iterator[Sample]:
    """Samples that lie in memory, to be split."""
    for number in range(200):
        label = "lying" if number % 2 else "standing"
        yield Sample(encode_png(stripes(number)), label, f"stripes-{number}")


def placed() -> Source:
    """Samples whose bytes are made where they are packed."""
    samples = [Sample(number, number % 2, f"stripes-{number}") for number in range(200)]
    splits = {"train": samples[:160], "val": samples[160:]}
    return Source(classes=("standing", "lying"), splits=splits, fetch=read)


def read(numbers):
    return (encode_png(stripes(number)) for number in numbers)
