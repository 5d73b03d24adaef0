"""Weights of transformers with their config.json: ViT, MAE, DINOv2 and SigLIP's image tower.

transformers 5 has other names in memory than in its files; both are read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch.nn.functional as F

from moe.models.vit import ViTConfig
from orchestrator.checkpoint.foreign.kind import HALF, Facts, TensorNames, WeightsKind
from orchestrator.checkpoint.foreign.outward import ForeignFolder, check_expressible
from orchestrator.checkpoint.foreign.tensors import ForeignWeights, Lazy
from orchestrator.config import DataConfig
from orchestrator.errors import UsageError

OPENS = "transformers.AutoModelForImageClassification.from_pretrained('{out}')"
PREFIXES = ("vit.", "dinov2.", "vision_model.", "")
VIT = TensorNames(
    embed="embeddings.patch_embeddings.projection.",
    class_token="embeddings.cls_token",
    position="embeddings.position_embeddings",
    block="encoder.layer.{i}.",
    norm1="layernorm_before.",
    qkv=tuple(f"attention.attention.{part}." for part in ("query", "key", "value")),
    out="attention.output.dense.",
    norm2="layernorm_after.",
    up="intermediate.dense.",
    down="output.dense.",
    norm="layernorm.",
    pre_logits="pooler.dense.",
    head="classifier.",
    harmless=r"decoder\.|embeddings\.mask_token$",
)
DINOV2 = replace(
    VIT,
    norm1="norm1.",
    scale1="layer_scale1.lambda1",
    norm2="norm2.",
    up="mlp.fc1.",
    down="mlp.fc2.",
    scale2="layer_scale2.lambda1",
    pre_logits="",
)
SIGLIP = TensorNames(
    embed="embeddings.patch_embedding.",
    class_token="",
    position="embeddings.position_embedding.weight",
    block="encoder.layers.{i}.",
    norm1="layer_norm1.",
    qkv=tuple(f"self_attn.{part}_proj." for part in "qkv"),
    out="self_attn.out_proj.",
    norm2="layer_norm2.",
    up="mlp.fc1.",
    down="mlp.fc2.",
    norm="post_layernorm.",
    head="classifier.",
    probe="head.probe",
    pool_in="head.attention.in_proj_",
    pool_out="head.attention.out_proj.",
    pool_norm="head.layernorm.",
    pool_up="head.mlp.fc1.",
    pool_down="head.mlp.fc2.",
    harmless=r"text_model\.|logit_scale$|logit_bias$|embeddings\.position_ids$",
)
NAMES_OF = {
    "vit": VIT,
    "vit_mae": VIT,
    "dinov2": DINOV2,
    "siglip": SIGLIP,
    "siglip_vision_model": SIGLIP,
}
GELUS: dict[str, Literal["exact", "tanh"]] = {
    "gelu": "exact",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
}
# What files of transformers 5 call differently in memory.
RENAMED = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)


def _recognises(names: Mapping[str, Lazy]) -> bool:
    return any(re.search(r"(^|\.)embeddings\.patch_embedding", name) for name in names)


def _read(opened: ForeignWeights) -> tuple[Mapping[str, Lazy], TensorNames, Facts]:
    config = opened.config
    if config is None:
        raise UsageError(
            "weights of Hugging Face say nothing of heads, epsilon and GELU: give the folder with config.json"
        )
    kind = str(config.get("model_type"))
    if kind not in NAMES_OF:
        raise UsageError(f"model_type {kind!r} of Hugging Face is none of {', '.join(NAMES_OF)}")
    settings: Mapping[str, Any] = config.get("vision_config") or config if kind == "siglip" else config
    if settings.get("use_swiglu_ffn"):
        raise UsageError("its MLPs are SwiGLU, and the model here has GELU")
    # A nested config leaves out what is the default of its class.
    act = settings.get("hidden_act", "gelu_pytorch_tanh" if "siglip" in kind else "gelu")
    if act not in GELUS:
        raise UsageError(f"hidden_act {act!r}: the model here has {', '.join(GELUS)}")
    theirs, names = _named(opened.tensors, kind), NAMES_OF[kind]
    classifies = f"{names.head}weight" in theirs
    if names is SIGLIP and classifies:  # the mean of the tokens, without the pooling
        theirs = {name: lazy for name, lazy in theirs.items() if not name.startswith("head.")}
    if names is DINOV2 and classifies:
        raise UsageError(
            "a classifier on class token and mean, which the model here has not: save Dinov2Model"
        )
    pools = any(name.startswith("pooler.dense.") for name in theirs)
    if pools and (pooler := settings.get("pooler_act", "tanh")) != "tanh":
        raise UsageError(f"pooler_act {pooler!r}: the model here has tanh between class token and features")
    mean, std, evaluation, assumed = _preprocessing(opened, kind)
    sizes = {
        ours: settings[key]
        for ours, key in (
            ("width", "hidden_size"),
            ("depth", "num_hidden_layers"),
            ("patch_size", "patch_size"),
            ("mlp_dim", "intermediate_size"),
            ("image_size", "image_size"),
        )
        if isinstance(settings.get(key), int)
    }
    if not isinstance(settings.get("image_size", 224), int) or settings.get("num_channels", 3) != 3:
        raise UsageError("the model here reads square images of 3 colours")
    facts = Facts(
        heads=settings.get("num_attention_heads", 12),
        gelu=GELUS[act],
        norm_eps=float(settings.get("layer_norm_eps", 1e-12 if names is VIT else 1e-6)),
        mean=mean,
        std=std,
        resize=lambda image, new: F.interpolate(image, size=(new, new), mode="bicubic", align_corners=False),
        evaluation=evaluation,
        classes=config.get("id2label") if classifies else None,
        sizes=sizes,
        assumed=assumed,
    )
    return theirs, names, facts


def _named(tensors: Mapping[str, Lazy], kind: str) -> dict[str, Lazy]:
    """The tensors by the names of `NAMES_OF`, without their model's prefix."""
    embedding = next(name for name in tensors if re.search(r"(^|\.)embeddings\.patch_embedding", name))
    prefix = next(prefix for prefix in PREFIXES if embedding.startswith(f"{prefix}embeddings."))
    found = {}
    for name, lazy in tensors.items():
        name = name.removeprefix(prefix)
        for pattern, word in RENAMED if "siglip" not in kind else ():
            name = re.sub(pattern, word, name)
        if kind in ("vit", "vit_mae"):
            name = name.replace(".mlp.fc1.", ".intermediate.dense.").replace(".mlp.fc2.", ".output.dense.")
        found[name] = lazy
    return found


def _preprocessing(
    opened: ForeignWeights, kind: str
) -> tuple[tuple[float, ...], tuple[float, ...], dict[str, Any], tuple[str, ...]]:
    """Mean, std, fields of `DataConfig`, and what is assumed."""
    found = opened.preprocessor
    if found is None:
        if kind == "dinov2":
            raise UsageError(
                "there is no preprocessor_config.json, and DINOv2's mean and crop differ by model"
            )
        cubic = "bicubic" if "siglip" in kind else "bilinear"
        evaluation = {"eval_resize": "square", "eval_crop": 1.0, "eval_interpolation": cubic}
        evaluation["eval_pixels"] = "transformers"
        return *HALF, evaluation, (f"no preprocessor_config.json: mean and std of 0.5, square, {cubic}",)
    if not found.get("do_rescale", True) or abs(found.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise UsageError("it does not rescale pixels by 1/255, and images here are in -1..1")
    mean, std = tuple(found.get("image_mean", HALF[0])), tuple(found.get("image_std", HALF[1]))
    if not found.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    size, crop = found.get("size"), found.get("crop_size")
    size = {"height": size, "width": size} if isinstance(size, int) else dict(size or {})
    if size.get("height") != size.get("width"):
        raise UsageError(f"it resizes to {size}, and the model here reads squares")
    cropped = crop.get("height") if isinstance(crop, Mapping) else crop
    cropped = cropped if found.get("do_center_crop") else None
    whole, resample = size.get("shortest_edge", size.get("height")), found.get("resample", 2)
    evaluation = {
        "eval_resize": "shorter" if "shortest_edge" in size else "square",
        "eval_crop": cropped / whole if cropped and whole and cropped <= whole else 1.0,
        "eval_interpolation": "bicubic" if resample == 3 else "bilinear",
        "eval_pixels": "transformers",
    }
    assumed = [] if resample in (2, 3) else [f"resample {resample} is not known here: bilinear is taken"]
    if not found.get("do_resize", True):
        assumed.append("it does not resize: images are resized here")
    return mean, std, evaluation, tuple(assumed)


def as_transformers(config: ViTConfig, data: DataConfig, classes: Sequence[str] | None) -> ForeignFolder:
    """Returns the folder of a ViTForImageClassification (class token), or of a SiglipForImageClassification
    (mean of the tokens).

    Raises:
        UsageError: for a model that neither can be.
    """
    lacking = {
        "experts": config.moe is not None,
        "stem='conv'": config.stem is not None,
        "representation_size": config.representation_size is not None,
        "qk_norm": config.qk_norm,
        "a classifier behind pooling='map'": config.pooling == "map",
    }
    check_expressible("transformers", lacking, instead="moe, torch or onnx (and often timm)")
    tower = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_dim,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh" if config.gelu == "tanh" else "gelu",
        "layer_norm_eps": config.norm_eps,
    }
    labels = classes or [f"LABEL_{i}" for i in range(config.num_classes)]
    head = {
        "dtype": "float32",
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
    }
    if config.pooling == "token":
        content = {"model_type": "vit", "architectures": ["ViTForImageClassification"], **head, **tower}
        return ForeignFolder(config=content, names=VIT, prefix="vit.", opens=OPENS)
    tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
    content = {"model_type": "siglip", "architectures": ["SiglipForImageClassification"], **head}
    content |= {"vision_config": tower}
    return ForeignFolder(config=content, names=SIGLIP, prefix="vision_model.", opens=OPENS)


KIND = WeightsKind(name="Hugging Face", recognises=_recognises, read=_read)
