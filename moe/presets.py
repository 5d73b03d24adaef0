"""The models of the papers, with ImageNet's 1000 classes.

Source: the dense models (``S/16``, ..) are those of Soft MoE (section 3.3) and its released code; the
``soft-`` models are those of its section 3.4: MoE in the last half of the blocks, one slot per expert. The
``vmoe-`` models are V-MoE's (sections 3.1 and 3.6, table 2), with the class token, the tanh layer and the 8
blocks of S of the released configs. The paper does not print the sizes of ``vmoe-15B``; ours have the printed
14.7B parameters. ``vit_small_patch16_224`` and its like are timm's plain ViTs.
"""

from dataclasses import asdict, replace
from pathlib import Path

from moe.config import did_you_mean
from moe.exported import load
from moe.guests import join_families
from moe.layer import MoEConfig
from moe.model import Model, ModelConfig
from moe.models import ViTConfig
from moe.routers import SoftConfig, TokenChoiceConfig

_DEBUG = ViTConfig(image_size=8, patch_size=2, width=32, depth=2, heads=2, mlp_dim=128, num_classes=10)
_TI = ViTConfig(width=192, depth=12, heads=3, mlp_dim=768)
VIT_S = ViTConfig(width=384, depth=12, heads=6, mlp_dim=1536)
VIT_B = ViTConfig(width=768, depth=12, heads=12, mlp_dim=3072)
VIT_L = ViTConfig(width=1024, depth=24, heads=16, mlp_dim=4096)
VIT_H = ViTConfig(width=1280, depth=32, heads=16, mlp_dim=5120)
_SMALL_VMOE = ViTConfig(width=512, depth=8, heads=8, mlp_dim=2048)
_15B = ViTConfig(width=1408, depth=48, heads=16, mlp_dim=6400)


def _soft(size: ViTConfig, patch_size: int, num_experts: int) -> ViTConfig:
    moe = MoEConfig(layers=f"last_{size.depth // 2}", num_experts=num_experts, router=SoftConfig())
    return replace(size, patch_size=patch_size, moe=moe)


def _vmoe(size: ViTConfig, patch_size: int, layers: str = "every_2") -> ViTConfig:
    router = TokenChoiceConfig(k=2, capacity_factor=1.05)
    moe = MoEConfig(layers=layers, num_experts=32, images_per_group=8, router=router)
    return replace(
        size,
        patch_size=patch_size,
        pooling="token",
        representation_size=size.width,
        qk_norm=False,
        moe=moe,
    )


VITS = (
    {"debug": _DEBUG}
    | {
        f"{name}/{patch}": replace(size, patch_size=patch)
        for name, size, patches in (
            ("S", VIT_S, (32, 16, 14, 8)),
            ("B", VIT_B, (32, 16)),
            ("L", VIT_L, (32, 16)),
            ("H", VIT_H, (14,)),
        )
        for patch in patches
    }
    | {
        "soft-S/16-128e": _soft(VIT_S, 16, 128),
        "soft-S/14-256e": _soft(VIT_S, 14, 256),
        "soft-B/16-128e": _soft(VIT_B, 16, 128),
        "soft-L/16-128e": _soft(VIT_L, 16, 128),
        "soft-H/14-128e": _soft(VIT_H, 14, 128),
        "soft-H/14-256e": _soft(VIT_H, 14, 256),
        "vmoe-S/32": _vmoe(_SMALL_VMOE, 32),
        "vmoe-B/32": _vmoe(VIT_B, 32),
        "vmoe-B/16": _vmoe(VIT_B, 16),
        "vmoe-L/32": _vmoe(VIT_L, 32),
        "vmoe-L/16": _vmoe(VIT_L, 16),
        "vmoe-H/14-dense": replace(_vmoe(VIT_H, 14), moe=None),
        "vmoe-H/14": _vmoe(VIT_H, 14),
        "vmoe-H/14-last-5": _vmoe(VIT_H, 14, "last_5_odd"),
        "vmoe-15B": _vmoe(_15B, 14),
    }
    | {
        f"vit_{name}_patch{patch}_{pixels}": replace(
            size, patch_size=patch, image_size=pixels, pooling="token", qk_norm=False, gelu="exact"
        )
        for name, size, patches in (
            ("tiny", _TI, (16,)),
            ("small", VIT_S, (32, 16)),
            ("base", VIT_B, (32, 16)),
            ("large", VIT_L, (32, 16)),
        )
        for patch in patches
        for pixels in (224, 384)
    }
)


PRESETS: dict[str, ModelConfig] = {**VITS}


def preset(name: str) -> ModelConfig:
    """Returns the config of a model by name. Raises ValueError, naming those that exist, if there is none."""
    if name not in PRESETS:
        join_families()
    if name not in PRESETS:
        near = did_you_mean(name, PRESETS)
        raise ValueError(f"unknown model {name!r}; known: {', '.join(PRESETS)}{near}")
    return PRESETS[name]


def create_model(
    name: str, *, num_classes: int = 1000, seed: int | None = 0, weights: str | Path | None = None
) -> Model:
    """Returns a model of `PRESETS` with weights drawn from `seed`; without a seed they are not set.

    Args:
        weights: an exported folder or file, as `load` takes it, whose classes the model then has.

    Raises ValueError for a name that does not exist, and for weights of another model.
    """
    config = preset(name)
    if weights is None:
        return replace(config, **config.for_classes(num_classes)).build(seed=seed)
    model = load(weights)
    wanted, found = (
        asdict(replace(config, **config.for_classes(model.config.num_outputs()))),
        asdict(model.config),
    )
    if differs := [field for field in wanted if wanted[field] != found.get(field)]:
        is_there = f"{differs[0]} is {found.get(differs[0])!r} there, and {wanted[differs[0]]!r} here"
        raise ValueError(f"{weights} is no {name}: {is_there}")
    return model
