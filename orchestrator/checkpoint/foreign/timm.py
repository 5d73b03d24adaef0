"""Weights of timm's VisionTransformer: a folder with ``config.json``, or a bare state dict.

The config names the architecture, whose defaults decide the GELU and, without `model_args`, the heads.
"""

import re
from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F

from orchestrator.checkpoint.foreign.kind import HALF, Facts, TensorNames, WeightsKind
from orchestrator.checkpoint.foreign.tensors import Lazy, Opened
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
    harmless=r"mask_token$",
)
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


KIND = WeightsKind(name="timm", recognises=_recognises, read=_read)
