"""Weights of torchvision's VisionTransformer: a state dict, which says nothing of heads and preprocessing."""

from collections.abc import Mapping

import torch.nn.functional as F

from wings.weights.kind import Facts, TensorNames, WeightsKind
from wings.weights.tensors import ForeignWeights, Lazy

HEADS = {768: 12, 1024: 16, 1280: 16}  # width of B, L and H
NAMES = TensorNames(
    embed="conv_proj.",
    class_token="class_token",
    position="encoder.pos_embedding",
    block="encoder.layers.encoder_layer_{i}.",
    norm1="ln_1.",
    qkv=("self_attention.in_proj_",),
    out="self_attention.out_proj.",
    norm2="ln_2.",
    up="mlp.0.",
    down="mlp.3.",
    norm="encoder.ln.",
    pre_logits="heads.pre_logits.",
    head="heads.head.",
)


def _read(opened: ForeignWeights) -> tuple[Mapping[str, Lazy], TensorNames, Facts]:
    theirs = {
        name.replace("mlp.linear_1.", "mlp.0.").replace("mlp.linear_2.", "mlp.3."): lazy
        for name, lazy in opened.tensors.items()
    }
    width, patch = (theirs["conv_proj.weight"].shape[axis] for axis in (0, -1))
    rows = theirs[NAMES.position].shape[1] if NAMES.position in theirs else 0
    # SWAG's weights were fine-tuned at 384 pixels and more.
    large = rows > (14**2 if patch != 14 else 16**2) + 1
    crop = 1.0 if large else 224 / 242 if width == 1024 and patch == 16 else 224 / 256
    heads, assumed = HEADS.get(width), []
    if heads:
        assumed.append(f"{heads} heads, as torchvision's models of width {width} have them")
    assumed.append(f"resize and crop of its size: {crop:.3f}, {'bicubic' if large else 'bilinear'}")
    facts = Facts(
        heads=heads,
        heads_stated=False,
        gelu="exact",
        mean=None,
        std=None,
        resize=lambda image, new: F.interpolate(image, size=(new, new), mode="bicubic", align_corners=True),
        evaluation={
            "eval_crop": crop,
            "eval_interpolation": "bicubic" if large else "bilinear",
            "eval_pixels": "timm",  # which takes resize and crop from torchvision
        },
        assumed=tuple(assumed),
    )
    return theirs, NAMES, facts


KIND = WeightsKind(name="torchvision", patches=r"conv_proj\.weight", read=_read)
