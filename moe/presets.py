"""The models of the papers, with ImageNet's 1000 classes.

Source: the dense models (``S/16``, ..) are those of Soft MoE (section 3.3) and its released code; the
``soft-`` models are those of its section 3.4: MoE in the last half of the blocks, one slot per expert. The
``vmoe-`` models are V-MoE's (sections 3.1 and 3.6, table 2), with the class token, the tanh layer and the 8
blocks of S of the released configs. The paper does not print the sizes of ``vmoe-15B``; ours have the printed
14.7B parameters. ``vit_small_patch16_224`` and its like are timm's plain ViTs.

``astroformer-1-soft-`` are the models of Implicit Bias in Soft MoE (section 4.4.1) for CIFAR: Soft MoE in
place of both MLPs of Astroformer-1, without the skip connection around it; one slot per expert, and the same
number of hidden units in all for any number of experts.

Two towers: ``lit-`` are those of LiT (Zhai et al. 2022), with a text tower of the image tower's size;
``-lit-g`` those of Soft MoE's table 3, with the text tower of ViT-g; ``-laion`` those of its appendix F.1, as
in the released `pretrain_laion.py`, without the sizes whose patches of 14 pixels do not divide 256.
"""

from dataclasses import asdict, replace
from pathlib import Path

from moe.config import did_you_mean
from moe.exported import load
from moe.layer import MoEConfig
from moe.model import Model, ModelConfig
from moe.models import AstroformerConfig, TwoTowersConfig, ViTConfig
from moe.models.text import TextConfig
from moe.routers import SoftConfig, TokenChoiceConfig

_DEBUG = ViTConfig(image_size=8, patch_size=2, width=32, depth=2, heads=2, mlp_dim=128, num_classes=10)
_TI = ViTConfig(width=192, depth=12, heads=3, mlp_dim=768)
_S = ViTConfig(width=384, depth=12, heads=6, mlp_dim=1536)
_B = ViTConfig(width=768, depth=12, heads=12, mlp_dim=3072)
_L = ViTConfig(width=1024, depth=24, heads=16, mlp_dim=4096)
_H = ViTConfig(width=1280, depth=32, heads=16, mlp_dim=5120)
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
            ("S", _S, (32, 16, 14, 8)),
            ("B", _B, (32, 16)),
            ("L", _L, (32, 16)),
            ("H", _H, (14,)),
        )
        for patch in patches
    }
    | {
        "soft-S/16-128e": _soft(_S, 16, 128),
        "soft-S/14-256e": _soft(_S, 14, 256),
        "soft-B/16-128e": _soft(_B, 16, 128),
        "soft-L/16-128e": _soft(_L, 16, 128),
        "soft-H/14-128e": _soft(_H, 14, 128),
        "soft-H/14-256e": _soft(_H, 14, 256),
        "vmoe-S/32": _vmoe(_SMALL_VMOE, 32),
        "vmoe-B/32": _vmoe(_B, 32),
        "vmoe-B/16": _vmoe(_B, 16),
        "vmoe-L/32": _vmoe(_L, 32),
        "vmoe-L/16": _vmoe(_L, 16),
        "vmoe-H/14-dense": replace(_vmoe(_H, 14), moe=None),
        "vmoe-H/14": _vmoe(_H, 14),
        "vmoe-H/14-last-5": _vmoe(_H, 14, "last_5_odd"),
        "vmoe-15B": _vmoe(_15B, 14),
    }
    | {
        f"vit_{name}_patch{patch}_{pixels}": replace(
            size, patch_size=patch, image_size=pixels, pooling="token", qk_norm=False, gelu="exact"
        )
        for name, size, patches in (
            ("tiny", _TI, (16,)),
            ("small", _S, (32, 16)),
            ("base", _B, (32, 16)),
            ("large", _L, (32, 16)),
        )
        for patch in patches
        for pixels in (224, 384)
    }
)


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
        for name, size in (("S", _S), ("B", _B), ("L", _L))
    }
    | {
        f"{name}-lit-g": TwoTowersConfig(image=vit, text=TEXT_G)
        for name, vit in VITS.items()
        if name in _TABLE_3 or name.startswith("soft-")
    }
    | {
        f"{name}-laion": TwoTowersConfig(image=replace(vit, image_size=256), text=_text(_B, qk_norm=True))
        for name, vit in (
            (name.removesuffix("-128e"), vit)
            for name, vit in VITS.items()
            if name.removeprefix("soft-").removesuffix("-128e") in ("S/16", "B/16", "L/16")
        )
    }
)
_ASTROFORMER = AstroformerConfig()
ASTROFORMERS = {"astroformer-1": _ASTROFORMER} | {
    f"astroformer-1-soft-{num_experts}e": replace(
        _ASTROFORMER,
        moe=MoEConfig(
            layers="last_2",
            num_experts=num_experts,
            expert_dim=49_152 // num_experts,
            residual=False,
            router=SoftConfig(),
        ),
    )
    for num_experts in (2, 8, 16, 64, 128)
}
PRESETS: dict[str, ModelConfig] = {**VITS, **ASTROFORMERS, **TWO_TOWERS}


def preset(name: str) -> ModelConfig:
    """Returns the config of a model by name. Raises ValueError, naming those that exist, if there is none."""
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
