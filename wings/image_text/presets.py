"""Models of images and texts by name.

``lit-`` are those of LiT (Zhai et al. 2022), with a text tower of the image tower's size;
``-lit-g`` those of Soft MoE's table 3, with the text tower of ViT-g; ``-laion`` those of its appendix F.1, as
in the released `pretrain_laion.py`, without the sizes whose patches of 14 pixels do not divide 256.
"""

from dataclasses import replace

from moe.models import ViTConfig
from moe.presets import PRESETS, VIT_B, VIT_L, VIT_S, VITS
from wings.image_text.text_tower import TextConfig
from wings.image_text.two_towers import TwoTowersConfig


def _text(size: ViTConfig, *, qk_norm: bool = False) -> TextConfig:
    sizes = {name: getattr(size, name) for name in ("width", "depth", "heads", "mlp_dim")}
    return TextConfig(**sizes, qk_norm=qk_norm)


TEXT_G = TextConfig(width=1408, depth=40, heads=16, mlp_dim=6144, qk_norm=True)
_TABLE_3 = ("S/16", "S/14", "B/16", "L/16", "H/14")
TWO_TOWERS = (
    {
        f"lit-{name}/16": TwoTowersConfig(
            image=replace(size, patch_size=16, pooling="token", qk_norm=False), text=_text(size)
        )
        for name, size in (("S", VIT_S), ("B", VIT_B), ("L", VIT_L))
    }
    | {
        f"{name}-lit-g": TwoTowersConfig(image=vit, text=TEXT_G)
        for name, vit in VITS.items()
        if name in _TABLE_3 or name.startswith("soft-")
    }
    | {
        f"{name}-laion": TwoTowersConfig(image=replace(vit, image_size=256), text=_text(VIT_B, qk_norm=True))
        for name, vit in (
            (name.removesuffix("-128e"), vit)
            for name, vit in VITS.items()
            if name.removeprefix("soft-").removesuffix("-128e") in ("S/16", "B/16", "L/16")
        )
    }
)
PRESETS.update(TWO_TOWERS)
