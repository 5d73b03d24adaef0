"""mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019) of the images of a batch and their neighbours."""

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

from moe.config import PositiveFloat
from orchestrator.data.augment.base import AugmentationConfig, Mixing, Stage
from orchestrator.data.augment.randaugment import square


@dataclass(frozen=True, kw_only=True)
class MixupConfig(AugmentationConfig):
    """Mixes the pixels of two images.

    Attributes:
        alpha: parameter of the Beta distribution of the weights.
    """

    kind: Literal["mixup"] = "mixup"
    stage: ClassVar[Stage] = "batch"
    alpha: PositiveFloat = 0.2

    def mix(self, size: int, rng: Random) -> Mixing:
        return rng.betavariate(self.alpha, self.alpha), 0, 0, 0, 0


@dataclass(frozen=True, kw_only=True)
class CutMixConfig(AugmentationConfig):
    """Shows another image in a box around a random pixel; labels weigh as their areas.

    Attributes:
        alpha: parameter of the Beta distribution of the area outside of the box.
    """

    kind: Literal["cutmix"] = "cutmix"
    stage: ClassVar[Stage] = "batch"
    alpha: PositiveFloat = 1.0

    def mix(self, size: int, rng: Random) -> Mixing:
        half = int(size * math.sqrt(1 - rng.betavariate(self.alpha, self.alpha))) // 2
        top, left, bottom, right = square(rng, half, size, size)
        return 1 - (bottom - top) * (right - left) / size**2, top, left, bottom, right
