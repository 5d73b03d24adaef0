"""The models: one file each, with its config and its module. Another one joins here."""

from moe.models.astroformer import Astroformer, AstroformerConfig
from moe.models.two_towers import TwoTowers, TwoTowersConfig
from moe.models.vit import ViT, ViTConfig

__all__ = [
    "Astroformer",
    "AstroformerConfig",
    "TwoTowers",
    "TwoTowersConfig",
    "ViT",
    "ViTConfig",
]
