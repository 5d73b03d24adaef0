"""The contract of an augmentation: at which stage it changes training images, how, and what it refuses.

An image's draws are a function of the run's seed, the epoch, the image and its view; those of a pair of mixed
images of the two.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe.config import Family

Stage = Literal["crop", "pixels", "batch"]
STAGES: tuple[Stage, ...] = get_args(Stage)
Mixing = tuple[float, int, int, int, int]
UNMIXED: Mixing = (1, 0, 0, 0, 0)


def tv():
    """Returns the functions of torchvision, which take a second to load: who changes no pixels never does."""
    import torchvision.transforms.v2.functional

    return torchvision.transforms.v2.functional


class Box(NamedTuple):
    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig(Family, ABC, default="flip"):
    """A random change of training images. ``data.augment`` has any number, one of each kind: they act in the
    order of their stages, and within a stage as they are written.

    Attributes:
        stage: ``crop``: `box` chooses the part of the whole image that is resized, and `apply` goes on with
            it; at most one member does. ``pixels``: `apply` changes an image of the model's size. ``batch``:
            `mix` draws how images 0 and 1, 2 and 3, .. of a batch are mixed, with their labels.
    """

    stage: ClassVar[Stage] = "pixels"

    def box(self, height: int, width: int, rng: Random) -> Box:
        """Draws the part of an image of that size that is resized to a square."""
        raise NotImplementedError

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        """Returns a (3, S, S) uint8 image changed by draws of `rng`."""
        return image

    def mix(self, size: int, rng: Random) -> Mixing:
        """Draws for a pair of images of side `size` the weight of an image's own pixels and label, and the
        box (top, left, bottom, right) in which its partner is shown. With an empty box pixels are mixed by
        the weight, as labels are. A pair shares its draw, so a batch may be cut into even parts.
        """
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {"crop": "box", "pixels": "apply", "batch": "mix"}[self.stage]
        if getattr(type(self), needed) is getattr(AugmentationConfig, needed):
            raise ValueError(
                f"{type(self).__qualname__}: a member of the stage {self.stage} needs a method {needed}"
            )

    def check(self, *, task: str, classifies: bool, images: int) -> None:
        """Raises ValueError for a run in which the member cannot act.

        Args:
            task: the kind of the run's task.
            classifies: whether images have labels that can be mixed.
            images: of one forward pass.
        """
        if self.stage != "batch":
            return
        if not classifies:
            raise ValueError(f"{self.kind} mixes labels, of which a task of kind {task!r} has none")
        if images % 2:
            raise ValueError(
                f"{self.kind} mixes pairs of images: the {images} images of one forward pass must be even"
            )


Members = tuple[AugmentationConfig, ...]


def in_stages(members: Members) -> Members:
    """Returns the members in the order in which they act.

    Raises ValueError for two of one kind, or that both crop.
    """
    kinds = [member.kind for member in members]
    if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise ValueError(f"augment has {', '.join(twice)} more than once")
    if len(crops := at(members, "crop")) > 1:
        raise ValueError(f"augment has {' and '.join(each.kind for each in crops)}, which both crop: use one")
    return tuple(sorted(members, key=lambda member: STAGES.index(member.stage)))


def at(members: Members, stage: Stage) -> Members:
    return tuple(member for member in members if member.stage == stage)


def draw(members: Members, keys: Sequence[str], size: int) -> NDArray[np.float32]:
    """Returns (B, 5): weight and box for images of side `size`, a function of the pairs' keys alone. Of
    several members that mix, each is as frequent.
    """
    draws = np.array([UNMIXED] * len(keys), np.float32).reshape(-1, 5)
    if not members:
        return draws
    for i in range(0, len(keys), 2):
        rng = Random(f"mix/{keys[i]}/{keys[i + 1]}")
        # From the last, so that a draw below 0.5 is CutMix where both are given, as in earlier versions.
        number = int(len(members) * rng.random()) if len(members) > 1 else 0
        draws[i : i + 2] = members[-1 - number].mix(size, rng)
    return draws
