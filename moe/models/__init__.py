"""The models: one file each, with its config and its module. Another one joins here."""

from moe.models.vit import ViT, ViTConfig

__all__ = [
    "ViT",
    "ViTConfig",
]
