"""Weights of timm's VisionTransformer: a folder with ``config.json``, or a bare state dict.

The config names the architecture, whose defaults decide the GELU and, without `model_args`, the heads.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F

from moe.models.vit import ViTConfig
from moe.signature import Signature
from orchestrator.errors import UsageError
from wings.weights.kind import Facts, TensorNames, WeightsKind, by_channel
from wings.weights.outward import ForeignFolder, check_expressible
from wings.weights.tensors import ForeignWeights, Lazy

TANH = (
    r"vit_(base_patch32_siglip\w*_256|giantopt_patch16_siglip\w*|large_patch16_siglip\w*_512|"
    r"so400m_patch16_siglip\w*)"
)
SIZES = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24), "huge": (1280, 32)}
SIXTEEN_HEADS = (1152, 1280, 1408, 1536, 1664)  # widths whose heads are not of 64
POOLINGS: dict[str, Literal["gap", "token", "map"]] = {"token": "token", "avg": "gap", "map": "map"}
NAMES = TensorNames(
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
    # What MAE, DINO and MoCo train with: a decoder, and heads of more than one layer.
    harmless=r"mask_token$|blocks\.\d+\.attn\.[qk]_norm\.bias$|decoder_|head\.(\d+|mlp|last_layer)\.",
)
# Arguments of VisionTransformer that are read here, seen in the tensors, or for training and other sizes.
ARGUMENTS = {
    *("img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth", "num_heads"),
    *("mlp_ratio", "qkv_bias", "qk_norm", "proj_bias", "init_values", "class_token", "pos_embed"),
    *("no_embed_class", "reg_tokens", "pool_include_prefix", "pre_norm", "final_norm", "fc_norm"),
    *("scale_attn_norm", "scale_mlp_norm", "act_layer", "norm_layer", "dynamic_img_size", "dynamic_img_pad"),
    *("strict_img_size", "weight_init", "fix_init", "drop_rate", "pos_drop_rate", "patch_drop_rate"),
    *("proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
}
# The names whose defaults are nearest to a width; the arguments beside it decide.
ARCHITECTURES = {192: "tiny_patch16", 384: "small_patch16", 1024: "large_patch16", 1280: "huge_patch14"}
OTHER = (
    r"beit|eva|swin|hybrid|relpos|samvit|rope|dinov3|_r50|_r26|quickgelu|clip|aimv2|hiera|naflex|mixer|resmlp|"
    r"deit\w*_distilled|_reg\d"
)


def _read(opened: ForeignWeights) -> tuple[Mapping[str, Lazy], TensorNames, Facts]:
    config = opened.config or {}
    architecture, args = str(config.get("architecture", "")).partition(".")[0], config.get("model_args") or {}
    pretrained = config.get("pretrained_cfg", config) or {}  # timm before 0.9 has it all in one
    if unknown := [
        f"{name}={value!r}" for name, value in args.items() if name not in ARGUMENTS and value is not None
    ]:
        raise UsageError(
            f"{unknown[0]} of model_args is not known here, and may change what the model computes: if it"
            " does not, take it out of config.json"
        )
    if (architecture and not re.search("vit|deit", architecture)) or re.search(OTHER, architecture):
        raise UsageError(f"{architecture} is no plain ViT of timm: the model here lacks its parts")
    if args.get("act_layer") not in (None, "gelu", "gelu_tanh"):
        raise UsageError(f"act_layer={args['act_layer']!r}: the model here has gelu, exact or by tanh")
    if args.get("norm_layer") not in (None, "layernorm"):
        raise UsageError(f"norm_layer={args['norm_layer']!r}: the model here has layernorm")
    if args.get("reg_tokens"):
        raise UsageError(f"reg_tokens={args['reg_tokens']}: the model here has no register tokens")
    if re.search("deit3|dinov2", architecture) and "blocks.0.ls1.gamma" not in opened.tensors:
        raise UsageError(
            f"{architecture} has LayerScale, and the tensors have none: it is another model's config"
        )
    for name, lazy in opened.tensors.items():
        if re.fullmatch(r".*attn\.[qk]_norm\.bias", name) and lazy.read().any():  # zeros change nothing
            raise UsageError(f"norms of queries and keys with a bias ({name}): the model here has none")
    tanh = args.get("act_layer") == "gelu_tanh" or re.fullmatch(TANH, architecture)
    pooling = config.get("global_pool") or args.get("global_pool")
    if pooling not in (None, "", *POOLINGS):
        raise UsageError(f"global_pool={pooling!r}: the model here pools by token, avg or map")
    width, assumed = opened.tensors["patch_embed.proj.weight"].shape[0], []
    heads = args.get("num_heads")
    if heads is None and architecture:
        heads = _heads(architecture, width)
        assumed.append(f"{heads} heads, as {architecture} has them")
    if not opened.config:
        assumed.append(
            "no config.json: exact GELU, a crop of 0.9, bicubic, and pooling by the class token or the mean"
        )
    for name, known in (("interpolation", ("bicubic", "bilinear")), ("crop_mode", ("center", "squash"))):
        if pretrained.get(name, known[0]) not in known:
            assumed.append(f"{name} {pretrained[name]!r} is not known here: {known[0]} is taken")
    sizes = _stated_sizes(architecture, config, args, pretrained)
    patch = opened.tensors["patch_embed.proj.weight"].shape[-1]
    if over := sizes.get("image_size", 0) % patch:
        assumed.append(
            f"{over} pixels at the edge that no patch covers there: images are resized to less here"
        )
        sizes["image_size"] -= over
    squash = pretrained.get("crop_mode") == "squash"
    facts = Facts(
        heads=heads,
        heads_stated="num_heads" in args,
        gelu="tanh" if tanh else "exact",
        mean=by_channel(pretrained.get("mean")),
        std=by_channel(pretrained.get("std")),
        resize=lambda image, new: F.interpolate(
            image, size=(new, new), mode="bicubic", antialias=True, align_corners=False
        ),
        evaluation={
            "eval_resize": "square" if squash else "shorter",
            "eval_crop": pretrained.get("crop_pct", 1.0 if squash else 0.9),
            "eval_interpolation": "bilinear" if pretrained.get("interpolation") == "bilinear" else "bicubic",
            "eval_pixels": "timm",
        },
        classes=config.get("label_names"),
        sizes=sizes,
        pooling=POOLINGS.get(pooling or ""),
        assumed=tuple(assumed),
        licence=str(pretrained.get("license") or ""),
    )
    # DINOv2's training has blocks in chunks, and counts them through all of these.
    theirs = {
        re.sub(r"^blocks\.\d+\.(?=\d+\.)", "blocks.", name): lazy for name, lazy in opened.tensors.items()
    }
    if len(theirs) < len(opened.tensors):
        raise UsageError("its blocks are in stages, and those of the model here are alike")
    return theirs, NAMES, facts


def _heads(architecture: str, width: int) -> int | None:
    if architecture.startswith("test_vit"):
        return width // 32
    if width in SIXTEEN_HEADS or "patch16_gap_224" in architecture:
        return 16
    return width // 64 if width % 64 == 0 else None


def _stated_sizes(
    architecture: str, config: Mapping[str, Any], args: Mapping[str, Any], pretrained: Mapping[str, Any]
) -> dict[str, int]:
    """Returns the sizes that the config and the name of the architecture state."""
    sizes: dict[str, int] = {}
    name = re.match(r"(?:vit|deit3?)_(tiny|small|base|large|huge)_patch(\d+)_(?!.*\d+x\d+)", architecture)
    if name:
        width, depth = SIZES[name[1]]
        sizes |= {"width": width, "depth": depth, "patch_size": int(name[2])}
    if isinstance(config.get("num_features"), int):
        sizes["width"] = config["num_features"]
    if isinstance(pretrained.get("input_size"), list):
        sizes["image_size"] = _side(pretrained["input_size"][-2:])
    if "img_size" in args:
        sizes["image_size"] = _side(args["img_size"])
    for theirs, ours in (("embed_dim", "width"), ("depth", "depth"), ("patch_size", "patch_size")):
        if isinstance(args.get(theirs), int):
            sizes[ours] = args[theirs]
    if "mlp_ratio" in args and "width" in sizes:
        sizes["mlp_dim"] = int(sizes["width"] * args["mlp_ratio"])
    classes = config.get("num_classes", args.get("num_classes"))
    return sizes | ({"num_classes": classes} if isinstance(classes, int) and classes else {})


def _side(size: Any) -> int:
    sides = size if isinstance(size, list | tuple) else [size]
    if len({*sides}) != 1:
        raise UsageError(f"images of {' x '.join(map(str, sides))} pixels: the model here reads squares")
    return int(sides[0])


def as_timm(config: ViTConfig, signature: Signature) -> ForeignFolder:
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
    size = signature.image_size
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
            "init_values": config.layer_scale,
            "class_token": config.pooling == "token",
            "global_pool": pooling,
            "fc_norm": False,
            "act_layer": "gelu_tanh" if config.gelu == "tanh" else "gelu",
        },
        "pretrained_cfg": {
            "num_classes": config.num_classes,
            "input_size": [3, size, size],
            "fixed_input_size": True,
            "mean": signature.mean,
            "std": signature.std,
            "interpolation": signature.interpolation,
            "crop_pct": signature.crop,
            "crop_mode": "squash" if signature.resize == "square" else "center",
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    if signature.classes:
        content["label_names"] = list(signature.classes)
    opens = "timm.create_model('local-dir:{out}', pretrained=True)"
    return ForeignFolder(config=content, names=NAMES, opens=opens)


KIND = WeightsKind(name="timm", patches=r"patch_embed\.proj\.weight", read=_read)
