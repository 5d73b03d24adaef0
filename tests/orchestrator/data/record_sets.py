"""Data sets that MDSWriter and LitData wrote (tests/fixtures/shards.md): image n has the class n % 3."""

import zipfile
from pathlib import Path

import numpy as np

from orchestrator.data.parquet import BY_NAME, Columns
from orchestrator.packing import open_source
from tests.orchestrator.data.images import Taken, everything, pixels

FIXTURES = Path(__file__).parents[2] / "fixtures"
ROWS = 7
WORDS = ("ape", "bee", "cat")


def extracted(kind: str, to: Path) -> Path:
    with zipfile.ZipFile(FIXTURES / f"{kind}.zip") as file:
        file.extractall(to)
    return to / kind


def images(root: Path, extension: str) -> list[bytes]:
    return [(root.parent / f"{n}.{extension}").read_bytes() for n in range(ROWS)]


def in_order(name: str, columns: Columns = BY_NAME, **options) -> list[Taken]:
    """Returns the samples of a source by the order of their keys; none may be left out."""
    source = open_source(name, columns=columns, **options)
    found, bad = everything(source)
    assert (source.skipped, bad) == ((), [])
    return [found[key] for key in sorted(found)]


def check_pixels(found: list[Taken]) -> None:
    for n, taken in enumerate(found):
        expected = np.full((4, 5, 3), (n, 2 * n, 255 - n))
        np.testing.assert_array_equal(pixels(taken.image), expected)
