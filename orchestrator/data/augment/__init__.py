"""The augmentations. To add one, write its file and import its config here: it joins by its kind."""

from orchestrator.data.augment.base import AugmentationConfig
from orchestrator.data.augment.colours import ColorJitterConfig, RandomErasingConfig, ThreeAugmentConfig
from orchestrator.data.augment.geometry import (
    CropConfig,
    CropFlipConfig,
    FlipConfig,
    InceptionConfig,
    ShiftConfig,
)
from orchestrator.data.augment.mixing import CutMixConfig, MixupConfig
from orchestrator.data.augment.randaugment import RandAugmentConfig

__all__ = [
    "AugmentationConfig",
    "ColorJitterConfig",
    "CropConfig",
    "CropFlipConfig",
    "CutMixConfig",
    "FlipConfig",
    "InceptionConfig",
    "MixupConfig",
    "RandAugmentConfig",
    "RandomErasingConfig",
    "ShiftConfig",
    "ThreeAugmentConfig",
]
