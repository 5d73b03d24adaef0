"""Weights of transformers with their config.json: ViT, MAE, DINOv2 and SigLIP's image tower.

transformers 5 has other names in memory than in its files; both are read.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch.nn.functional as F

from moe.models.vit import ViTConfig
from moe.signature import SIGNATURE, Signature
from orchestrator.errors import UsageError
from wings.weights.kind import HALF, Facts, TensorNames, WeightsKind
from wings.weights.outward import ForeignFolder, check_expressible
from wings.weights.preprocessor import Preprocessing, read_preprocessor
from wings.weights.tensors import ForeignWeights, Lazy

PATCHES = r"(?:(?:vit|dinov2|vision_model)\.)?embeddings\.patch_embedding(?:s\.projection)?\.weight"
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
PROBLEMS: dict[Any, Literal["softmax", "sigmoid"]] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
GELUS: dict[str, Literal["exact", "tanh"]] = {
    "gelu": "exact",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
}
# Fields of a config that are read here, seen in the tensors, or without effect on what is computed.
COMMON = {
    *("architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash"),
    *("dtype", "torch_dtype", "use_bfloat16", "torchscript", "tf_legacy_loss", "_attn_implementation"),
    *("attn_implementation", "_attn_implementation_autoset", "gradient_checkpointing", "use_cache"),
    *(
        "output_hidden_states",
        "output_attentions",
        "return_dict",
        "use_return_dict",
        "chunk_size_feed_forward",
    ),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "tie_word_embeddings"),
    *("initializer_range", "initializer_factor", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "image_size", "patch_size", "num_channels", "hidden_act", "layer_norm_eps"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "drop_path_rate"),
    # transformers 4 writes what is for the generation of text into any config
    *(
        "max_length",
        "min_length",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
    ),
    *("top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "num_return_sequences", "do_sample", "early_stopping", "output_scores"),
    *("return_dict_in_generate", "remove_invalid_values", SIGNATURE),
}
VIT_FIELDS = {"qkv_bias", "encoder_stride", "pooler_act", "pooler_output_size"}
KNOWN = {
    "vit": VIT_FIELDS,
    "vit_mae": VIT_FIELDS
    | {
        *("decoder_num_attention_heads", "decoder_hidden_size", "decoder_num_hidden_layers"),
        *("decoder_intermediate_size", "mask_ratio", "norm_pix_loss"),
    },
    "dinov2": {
        *("qkv_bias", "mlp_ratio", "layerscale_value", "use_mask_token", "out_features", "out_indices"),
        *("stage_names", "apply_layernorm", "reshape_hidden_states"),
    },
    "siglip": {"vision_config", "text_config", "vision_use_head"},
    "siglip_vision_model": {"vision_use_head"},
}
# Fields of which the model here has one value.
ONLY = {
    "num_channels": 3,
    "use_swiglu_ffn": False,
    **dict.fromkeys(
        ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"), False
    ),
}
# What files of transformers 5 call differently in memory.
RENAMED = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)


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
    _check_fields(kind, {**config, **settings})
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
    if names is SIGLIP and not classifies:
        head = settings.get("vision_use_head", True)
        if bool(head) != (f"{names.probe}" in theirs):
            raise UsageError(f"vision_use_head={head!r}, and the tensors are those of the contrary")
    problem = config.get("problem_type")
    if problem not in (None, *PROBLEMS):
        raise UsageError(f"problem_type {problem!r}: the model here classifies ({', '.join(PROBLEMS)})")
    processed = _preprocessing(opened, kind)
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
    if not isinstance(settings.get("image_size", 224), int):
        raise UsageError(f"image_size={settings['image_size']!r}: the model here reads square images")
    if "mlp_ratio" in settings and "width" in sizes:
        sizes["mlp_dim"] = int(sizes["width"] * settings["mlp_ratio"])
    assumed, side = processed.assumed, processed.side
    if side not in (None, size := sizes.get("image_size", side)):
        assumed += (
            f"its image processor makes {side} x {side} pixels, and the model is for {size} x {size}:"
            f" set `model.image_size` {side} to read images as large",
        )
    facts = Facts(
        heads=settings.get("num_attention_heads", 12),
        gelu=GELUS[act],
        norm_eps=float(settings.get("layer_norm_eps", 1e-12 if names is VIT else 1e-6)),
        mean=processed.mean,
        std=processed.std,
        mean_stated=opened.preprocessor is not None,
        resize=lambda image, new: F.interpolate(image, size=(new, new), mode="bicubic", align_corners=False),
        evaluation=processed.evaluation,
        classes=config.get("id2label") if classifies else None,
        output=PROBLEMS.get(problem, "softmax"),
        sizes=sizes,
        assumed=assumed,
    )
    return theirs, names, facts


def _check_fields(kind: str, config: Mapping[str, Any]) -> None:
    """Raises UsageError for a field that may change what the model computes in a way that is not known here.
    A field without a value changes nothing.
    """
    for name, value in config.items():
        if name in ONLY and value != ONLY[name]:
            raise UsageError(f"{name}={value!r} of its config: the model here has {ONLY[name]!r}")
        if name not in (COMMON | KNOWN[kind]) and name not in ONLY and value not in (None, {}, []):
            raise UsageError(
                f"{name}={value!r} of its config is not known here, and may change what the model computes:"
                " if it does not, take it out of config.json"
            )


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


def _preprocessing(opened: ForeignWeights, kind: str) -> Preprocessing:
    if opened.preprocessor is not None:
        return read_preprocessor(opened.preprocessor)
    # What the class for this kind of model has; mean and std differ from model to model.
    evaluation = {"eval_resize": "square", "eval_crop": 1.0}
    evaluation["eval_interpolation"] = "bicubic" if "siglip" in kind else "bilinear"
    if kind == "dinov2":
        evaluation = {"eval_resize": "shorter", "eval_crop": 224 / 256, "eval_interpolation": "bicubic"}
    evaluation["eval_pixels"] = "transformers"
    said = f"{evaluation['eval_resize']}, crop {evaluation['eval_crop']}, {evaluation['eval_interpolation']}"
    if kind in ("vit_mae", "dinov2"):  # published with several
        return Preprocessing(evaluation=evaluation, assumed=(f"no preprocessor_config.json: {said}",))
    said = f"mean and std of 0.5, the library's own, {said}"
    mean, std = HALF
    return Preprocessing(
        mean=mean, std=std, evaluation=evaluation, assumed=(f"no preprocessor_config.json: {said}",)
    )


def as_transformers(config: ViTConfig, signature: Signature) -> ForeignFolder:
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
    labels = signature.classes or [f"LABEL_{i}" for i in range(config.num_classes)]
    head = {
        "dtype": "float32",
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
    }
    if signature.output in PROBLEMS.values():
        head["problem_type"] = next(theirs for theirs, ours in PROBLEMS.items() if ours == signature.output)
    if config.pooling == "token":
        content = {"model_type": "vit", "architectures": ["ViTForImageClassification"], **head, **tower}
        return ForeignFolder(config=content, names=VIT, prefix="vit.", opens=OPENS)
    tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
    content = {"model_type": "siglip", "architectures": ["SiglipForImageClassification"], **head}
    content |= {"vision_config": tower}
    return ForeignFolder(config=content, names=SIGLIP, prefix="vision_model.", opens=OPENS)


KIND = WeightsKind(name="Hugging Face", patches=PATCHES, read=_read)
