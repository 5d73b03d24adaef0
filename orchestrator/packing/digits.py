"""The digits of scikit-learn as sources: plain, with captions, and cluttered."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from typing import ClassVar, Literal

import numpy as np
from PIL import Image

from orchestrator.data.images import encode_png
from orchestrator.data.text import TEXT, captions_as_field
from orchestrator.packing.base import SourceConfig
from orchestrator.packing.samples import Execute, Part, Source, tabulated

DIGITS = "sklearn/datasets/data/digits.csv.gz"
CANVAS = 16  # pixels of the side of a cluttered digit
PIECES, PIECE = 2, 4  # their number in an image, and the pixels of a side
DRAWS = {"train": 8, "val": 6}  # images of every digit
TEMPLATES = (
    "a photo of the number {}",
    "the digit {}",
    "a handwritten {}",
    "a small picture of a {}",
    "somebody wrote {}",
)
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


Captioned = Literal["none", "all", "asked"]


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(SourceConfig):
    kind: Literal["digits"] = "digits"
    placed: ClassVar[str] = ""
    captioned: ClassVar[Captioned] = "none"

    def samples(self, execute: Execute) -> Source:
        return plain_digits(self.val_frac)


@dataclass(frozen=True, kw_only=True)
class DigitsCaptionsConfig(SourceConfig):
    kind: Literal["digits-captions"] = "digits-captions"
    placed: ClassVar[str] = ""
    captioned: ClassVar[Captioned] = "all"

    def samples(self, execute: Execute) -> Source:
        return plain_digits(self.val_frac, captions=True)


@dataclass(frozen=True, kw_only=True)
class ClutteredDigitsConfig(SourceConfig):
    kind: Literal["cluttered-digits"] = "cluttered-digits"
    placed: ClassVar[str] = ""
    captioned: ClassVar[Captioned] = "none"

    def samples(self, execute: Execute) -> Source:
        return cluttered_digits(self.val_frac)


def plain_digits(val_frac: float, *, captions: bool = False) -> Source:
    """Returns the 1,797 images of 8x8 pixels of scikit-learn, with five captions each if asked."""
    # `sklearn.datasets` takes a second to load, its file does not.
    table = np.loadtxt(str(distribution("scikit-learn").locate_file(DIGITS)), delimiter=",")
    pixels = (table[:, :-1] * (255 / 16)).round().astype("uint8").reshape(-1, 8, 8)
    images = [encode_png(image) for image in pixels]
    keys = [f"digit-{i:04d}" for i in range(len(images))]
    labels, places = table[:, -1].astype(int).tolist(), [(0, len(image)) for image in images]
    fields = {TEXT: _captions(labels)} if captions else {}
    part = Part("all", labels, keys, places, images, fields=fields)
    return tabulated([part], {"all": None}, val_frac, iter, mixed=False)


def _captions(labels: Sequence[int]) -> list[bytes]:
    """Returns a caption of each template for each digit, which is a word or a figure at random, the same
    every time.
    """
    by_word = np.random.default_rng(0).integers(0, 2, (len(labels), len(TEMPLATES))).astype(bool)
    return [
        captions_as_field(
            [
                template.format(WORDS[label] if word else label)
                for template, word in zip(TEMPLATES, row, strict=True)
            ]
        )
        for label, row in zip(labels, by_word.tolist(), strict=True)
    ]


def cluttered_digits(val_frac: float) -> Source:
    """Draws every digit several times at a random place of a canvas, over pieces of others of its split.

    The images are the same every time.

    Source: the cluttered MNIST of Recurrent Models of Visual Attention (Mnih et al., 2014), but smaller.
    """
    plain, rng = plain_digits(val_frac), np.random.default_rng(0)
    splits = {}
    for split, samples in plain.splits.items():
        digits = [np.asarray(Image.open(io.BytesIO(sample.image))) for sample in samples]
        splits[split] = [
            sample._replace(image=image, key=f"{sample.key}-{draw}", size=len(image))
            for draw in range(DRAWS[split])
            for sample, digit in zip(samples, digits, strict=True)
            for image in [encode_png(_cluttered(digit, digits, rng))]
        ]
    return Source(classes=plain.classes, splits=splits, fetch=iter)


def _cluttered(digit: np.ndarray, others: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Returns the canvas, (CANVAS, CANVAS) uint8."""
    canvas = np.zeros((CANVAS, CANVAS), np.uint8)
    for _ in range(PIECES):
        y, x = rng.integers(0, len(digit) - PIECE + 1, 2)
        piece = others[int(rng.integers(len(others)))][y : y + PIECE, x : x + PIECE]
        y, x = rng.integers(0, CANVAS - PIECE + 1, 2)
        place = canvas[y : y + PIECE, x : x + PIECE]
        np.maximum(place, piece, out=place)
    y, x = rng.integers(0, CANVAS - len(digit) + 1, 2)
    canvas[y : y + len(digit), x : x + len(digit)] = digit
    return canvas
