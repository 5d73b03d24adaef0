"""The sweeps of Soft MoE (Puigcerver et al. 2023, https://arxiv.org/abs/2308.00951) on images and texts."""

from typing import Any

from orchestrator.codec import override
from orchestrator.sweeps.arms import Arm, moe, named
from orchestrator.sweeps.scales import TINY, Changes, Scale, vit_size
from orchestrator.sweeps.sweep import Sweep
from papers.soft_moe.contrastive.scales import last_half_of_image
from papers.soft_moe.sweeps import printed_size
from wings.image_text.towers import beside_towers, in_image_tower

# Table 3: the experts of Soft MoE with one slot each, where they are not those of other sizes.
_TABLE_3_EXPERTS = {"S14": 256, "H14": 256}


_TINY_TEXT = {  # 18 epochs of the digits with captions
    "model.kind": "two_towers",
    **in_image_tower({"model.image_size": 8, "model.patch_size": 2, **vit_size(32, 2, 2)}),
    "model.text.width": 32,
    "model.text.depth": 1,
    "model.text.heads": 2,
    "model.text.mlp_dim": 64,
    "model.text.vocabulary": 64,  # about that of the captions
    "task.kind": "contrastive",
    "train.steps": 400,
    "train.report_every": 50,
}
_SMALL_TOWERS = {name: in_image_tower(vit_size(width, 2, 2)) for name, width in (("w16", 16), ("w32", 32))}
for _sweep in ("lit", "laion", "augmentation_contrastive"):
    TINY.add(_sweep, base=_TINY_TEXT, sizes=_SMALL_TOWERS, data="digits-captions")


@named(task="contrastive", from_models=beside_towers)
def lit(scale: Scale) -> Sweep:
    """Text towers trained beside frozen image towers: which tower is the better representation?

    Source: Soft MoE, section 4 and table 3 (LiT, Zhai et al. 2022): zero-shot classification and retrieval
    by dense models and Soft MoE, experts in the last half of the blocks, one slot each. The arms are plans:
    the command puts trained towers in their place.
    """
    arms, published = dict[str, Arm](), dict[str, str]()
    for name, changes in scale.sizes.items():
        experts = _TABLE_3_EXPERTS.get(name, scale.experts)
        arms[f"{name}-dense"] = dict(changes)
        router = _experts_in_image(scale, changes, "soft", experts, slots_per_expert=1)
        arms[f"{name}-soft"] = {**changes, **router}
        published[f"{name}-dense"] = f"ViT {printed_size(name)}"
        published[f"{name}-soft"] = f"Soft MoE {printed_size(name)} {experts}E"
    # ImageNet zero-shot of all sizes.
    claims = ("family=soft beats family=dense at equal size",)
    base = override(scale.base, {"train.freeze": ("image.",)})
    return Sweep(base=base, arms=arms, claims=claims, published=published)


@named(task="contrastive")
def laion(scale: Scale) -> Sweep:
    """Images and captions from scratch: dense models, Experts Choice and Soft MoE.

    Source: Soft MoE, appendix F.1, and the released `pretrain_laion.py`: the sigmoid loss, experts in the
    last half of the blocks of the image tower, one slot for each expert or a capacity of 1 in groups of one
    image. Images of Soft MoE are cropped at random, the others' are resized; our crop also flips.
    """
    arms: dict[str, Arm] = {}
    for name, changes in scale.sizes.items():
        for kind, fields in _OF_LAION.items():
            augment = {"data.augment": "inception" if kind == "soft" else "none"}
            experts = _experts_in_image(scale, changes, kind, scale.experts, **fields) if fields else {}
            arms[f"{name}-{kind}"] = {**changes, **augment, **experts}
    claims = (
        "family=soft beats family=dense at equal size",
        "family=soft beats family=expert_choice at equal size",
    )
    return Sweep(base=scale.base, arms=arms, claims=claims)


@named(task="contrastive")
def augmentation_contrastive(scale: Scale) -> Sweep:
    """Images resized or cropped at random, for each family: who gains from augmentation?

    Source: Soft MoE, appendix F.1 and figure 15: only Soft MoE gains.
    """
    arms: dict[str, Arm] = {}
    for kind, fields in _OF_LAION.items():
        experts = _experts_in_image(scale, {}, kind, scale.experts, **fields) if fields else {}
        for augment, label in (("none", "resize"), ("inception", "crop")):
            arms[f"{kind}-{label}"] = {**experts, "data.augment": augment}
    claims = ("arm=soft-crop beats arm=soft-resize", "arm=dense-resize beats arm=dense-crop")
    return Sweep(base=scale.base, arms=arms, claims=claims)


_OF_LAION: dict[str, dict[str, Any]] = {
    "dense": {},
    "expert": {"capacity_factor": 1.0, "noise_std": 1.0},
    "soft": {"slots_per_expert": 1},
}


def _experts_in_image(
    scale: Scale, changes: Changes, kind: str, experts: int, **router: Any
) -> dict[str, Any]:
    """Returns experts in the last half of the image tower's blocks, each text and image routed by itself."""
    half = last_half_of_image(override(scale.base, changes))
    return in_image_tower(moe({"expert": "expert_choice"}.get(kind, kind), experts, layers=half, **router))
