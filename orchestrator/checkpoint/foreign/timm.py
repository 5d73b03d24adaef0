"""Weights of timm's VisionTransformer: a folder with ``config.json``, or a bare state dict.

The config names the architecture, whose defaults decide the GELU and, without `model_args`, the heads.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch.nn.functional as F

from moe.models.vit import ViTConfig
from orchestrator.checkpoint.foreign.kind import HALF, Facts, TensorNames, WeightsKind
from orchestrator.checkpoint.foreign.outward import ForeignFolder, check_expressible
from orchestrator.checkpoint.foreign.tensors import Lazy, Opened
from orchestrator.config import DataConfig
from orchestrator.errors import UsageError

TANH = (
    r"vit_(base_patch32_siglip\w*_256|giantopt_patch16_siglip\w*|large_patch16_siglip\w*_512|"
    r"so400m_patch16_siglip\w*)"
)
SIXTEEN_HEADS = (1152, 1280, 1408, 1536, 1664)  # widths whose heads are not of 64
POOLINGS: dict[str, Literal["gap", "token", "map"]] = {"token": "token", "avg": "gap", "map": "map"}
LAYOUT = TensorNames(
    embed="patch_embed.proj.",
    class_token="cls_token",
    position="pos_embed",
    block="blocks.{i}.",
    norm1="norm1.",
    qkv=("attn.qkv.",),
    out="attn.proj.",
    scale1="ls1.gamma",
    norm2="norm2.",
    up="mlp.fc1.",
    down="mlp.fc2.",
    scale2="ls2.gamma",
    norm_q="attn.q_norm.",
    norm_k="attn.k_norm.",
    norm="norm.",
    head="head.",
    probe="attn_pool.latent",
    pool_q=("attn_pool.q.",),
    pool_kv=("attn_pool.kv.",),
    pool_out="attn_pool.proj.",
    pool_norm="attn_pool.norm.",
    pool_up="attn_pool.mlp.fc1.",
    pool_down="attn_pool.mlp.fc2.",
    harmless=r"mask_token$|blocks\.\d+\.attn\.[qk]_norm\.bias$",
)
# The names whose defaults are nearest to a width; the arguments beside it decide.
ARCHITECTURES = {192: "tiny_patch16", 384: "small_patch16", 1024: "large_patch16", 1280: "huge_patch14"}
OTHER = (
    r"beit|eva|swin|hybrid|relpos|samvit|rope|dinov3|_r50|_r26|quickgelu|clip|aimv2|hiera|naflex|mixer|resmlp|"
    r"deit\w*_distilled"
)


def _recognises(names: Mapping[str, Lazy]) -> bool:
    return "patch_embed.proj.weight" in names and any(name.startswith("blocks.0.") for name in names)


def _read(opened: Opened) -> tuple[Mapping[str, Lazy], TensorNames, Facts]:
    config = opened.config or {}
    architecture, args = str(config.get("architecture", "")), config.get("model_args") or {}
    pretrained = config.get("pretrained_cfg") or {}
    if found := re.search(OTHER, architecture):
        raise UsageError(
            f"{architecture} is no plain ViT of timm ({found[0]}): the model here lacks its parts"
        )
    if args.get("act_layer") not in (None, "gelu", "gelu_tanh"):
        raise UsageError(f"act_layer={args['act_layer']!r}: the model here has gelu, exact or by tanh")
    tanh = args.get("act_layer") == "gelu_tanh" or re.fullmatch(TANH, architecture.partition(".")[0])
    width = opened.tensors["patch_embed.proj.weight"].shape[0]
    heads = args.get("num_heads")
    if heads is None and width % 64 == 0:
        heads = 16 if width in SIXTEEN_HEADS or "patch16_gap_224" in architecture else width // 64
    pooling = config.get("global_pool") or args.get("global_pool")
    if pooling not in (None, "", *POOLINGS):
        raise UsageError(f"global_pool={pooling!r}: the model here pools by token, avg or map")
    if not opened.config and "mean" not in pretrained:
        opened.notes.append("no config.json: mean and std of 0.5 and the exact GELU are assumed")
    mean, std = pretrained.get("mean", HALF[0]), pretrained.get("std", HALF[1])
    facts = Facts(
        heads=heads,
        gelu="tanh" if tanh else "exact",
        mean=tuple(mean),
        std=tuple(std),
        resize=lambda image, new: F.interpolate(
            image, size=(new, new), mode="bicubic", antialias=True, align_corners=False
        ),
        evaluation={
            "eval_resize": "square" if pretrained.get("crop_mode") == "squash" else "shorter",
            "eval_crop": 1.0 if pretrained.get("crop_mode") == "squash" else pretrained.get("crop_pct", 0.9),
            "eval_interpolation": "bilinear" if pretrained.get("interpolation") == "bilinear" else "bicubic",
        },
        classes=tuple(config["label_names"]) if config.get("label_names") else None,
        says={
            ours: args[theirs]
            for ours, theirs in (("width", "embed_dim"), ("depth", "depth"), ("patch_size", "patch_size"))
            if isinstance(args.get(theirs), int)
        },
        pooling=POOLINGS.get(pooling or ""),
        licence=str(pretrained.get("license") or ""),
    )
    return opened.tensors, LAYOUT, facts


def as_timm(config: ViTConfig, data: DataConfig, classes: Sequence[str] | None) -> ForeignFolder:
    """Returns the folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` opens.

    Raises:
        UsageError: for a model that timm's VisionTransformer cannot be.
    """
    lacking = {
        "experts": config.moe is not None,
        "stem='conv'": config.stem is not None,
        "representation_size": config.representation_size is not None,
        f"norm_eps={config.norm_eps:g} (its own is 1e-06)": config.norm_eps != 1e-6,
        "qk_norm with pooling='map'": config.qk_norm and config.pooling == "map",
    }
    check_expressible("timm", lacking, instead="moe, torch or onnx")
    ratio = config.mlp_dim / config.width
    if int(config.width * ratio) != config.mlp_dim:  # as timm rounds
        ratio = (config.mlp_dim + 0.5) / config.width
    pooling = next(theirs for theirs, ours in POOLINGS.items() if ours == config.pooling)
    size, square = config.image_size, data.eval_resize == "square"
    content = {
        "architecture": f"vit_{ARCHITECTURES.get(config.width, 'base_patch16')}_224",
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": pooling,
        "model_args": {
            "img_size": size,
            "patch_size": config.patch_size,
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": ratio,
            "qk_norm": config.qk_norm,
            "class_token": config.pooling == "token",
            "global_pool": pooling,
            "fc_norm": False,
            "act_layer": "gelu_tanh" if config.gelu == "tanh" else "gelu",
        },
        "pretrained_cfg": {
            "num_classes": config.num_classes,
            "input_size": [3, size, size],
            "fixed_input_size": True,
            "mean": HALF[0],
            "std": HALF[1],
            "interpolation": data.eval_interpolation,
            "crop_pct": data.eval_crop,
            "crop_mode": "squash" if square else "center",
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    if classes:
        content["label_names"] = list(classes)
    opens = "timm.create_model('local-dir:{out}', pretrained=True)"
    return ForeignFolder(config=content, names=LAYOUT, opens=opens)


KIND = WeightsKind(name="timm", recognises=_recognises, read=_read)
