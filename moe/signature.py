"""The signature of a model: what it takes and what it gives, as it is stored beside its weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from moe.codec import from_dict, to_dict
from moe.config import Bound, Config, NonNegativeInt, PositiveFloat, PositiveInt

WHITE = 65535  # the largest sample of 16 bits
SIGNATURE = "signature"  # the name under which every format has it, as JSON


@dataclass(frozen=True, kw_only=True)
class Signature(Config):
    """The input of a model, and the meaning of its output. docs/prediction.md has more, and names a reader.

    Attributes:
        image_size: pixels per side of the images that it takes; 0: it takes none.
        channels: of an image: red, green and blue.
        mean, std: of each channel in 0..1, by which pixels are normalised.
        resize: what is resized before the central crop: the ``shorter`` side, keeping the aspect, or both
            sides to a ``square``.
        crop: fraction of these sides that the central crop keeps.
        interpolation: of resizing.
        pixels: how sides are rounded: as ``timm`` or ``transformers`` do; ``whole``, as timm, but images of
            the model's size are kept; or in ``parts`` of a resized pixel, as earlier versions.
        background: the colour under transparent pixels, as in CSS; None: alpha is dropped.
        white: the sample of 16 bits that is white; None: the high byte is taken.
        output: what an output means: logits of classes of which an image has one (``softmax``) or each by
            itself (``sigmoid``), an ``embedding``, logits of the next of its ``tokens``, or ``values`` that
            the task defines.
        classes: names by output; None: unknown, or there are none.
        images_per_group: images that are routed together: the answer to one depends on the others.
        source, licence: of weights that were made elsewhere, or that training began with; empty: none, or
            unknown.
    """

    image_size: NonNegativeInt = 0
    channels: PositiveInt = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[PositiveFloat, ...] = (0.5, 0.5, 0.5)
    resize: Literal["shorter", "square"] = "shorter"
    crop: Annotated[float, Bound(">", 0), Bound("<=", 1)] = 0.875
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    pixels: Literal["whole", "timm", "transformers", "parts"] = "whole"
    background: str | None = None
    white: Annotated[int, Bound(">=", 1), Bound("<=", WHITE)] | None = None
    output: Literal["softmax", "sigmoid", "embedding", "tokens", "values"] = "softmax"
    classes: tuple[str, ...] | None = None
    images_per_group: PositiveInt = 1
    source: str = ""
    licence: str = ""

    def to_json(self) -> str:
        return json.dumps(to_dict(self))

    def __str__(self) -> str:
        """The signature in words, for people."""
        takes = "tokens"
        if self.image_size:
            size = f"{self.image_size} x {self.image_size}"
            side = "shorter side" if self.resize == "shorter" else "both sides"
            takes = (
                f"RGB images of {size} pixels ({side}, central {self.crop:.4g},"
                f" {self.interpolation}), mean {_plain(self.mean)}, std {_plain(self.std)}"
            )
            takes += f", transparent pixels on {self.background}" if self.background else ""
            takes += f", 16 bits with {self.white} as white" if self.white else ""
        named = f", of {len(self.classes)} named classes" if self.classes else ""
        together = self.images_per_group
        depends = f"; {together} images are routed together, so an answer depends on its batch"
        return f"takes {takes}; gives {self.output}{named}{depends if together > 1 else ''}"


def read_signature(tree: Any) -> Signature:
    """Returns the signature in JSON, as text or as read. Raises ValueError if it is none."""
    tree = json.loads(tree) if isinstance(tree, str | bytes) else tree
    if not isinstance(tree, Mapping) or "image_size" not in tree:
        raise ValueError("there is no signature, an object with an image_size")
    return from_dict(Signature, tree, f"{SIGNATURE}.")


def _plain(values: tuple[float, ...]) -> str:
    distinct = dict.fromkeys(values) if len({*values}) == 1 else values
    return " ".join(f"{value:g}" for value in distinct)
