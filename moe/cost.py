"""The cost of a model, computed from its config: parameters and multiply-adds (MACs).

MACs count every matmul, as in the papers, and leave out softmax, LayerNorm, GELU and sorting (0.3-1 % of the
published figures). Conventions differ by factors of two between the papers, so each cost has its convention
in its name: ``2mac`` counts a MAC as two FLOPs (Soft MoE table 1, GFLOP/img), ``3mac`` counts forward and
backward at one FLOP per MAC (its exaFLOP), ``6mac`` at two (V-MoE table 2). Empty slots are computed, so they
are counted.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod

import torch
from torch import nn

from moe.dense import stem_channels
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.vit import ViT, ViTConfig


def num_params(config: ViTConfig) -> int:
    """Number of trainable parameters, including biases, norms and position embedding."""
    return sum(map(prod, param_shapes(config).values()))


def num_expert_params(config: ViTConfig) -> int:
    """Number of parameters of the experts' MLPs."""
    return sum(prod(shape) for name, shape in param_shapes(config).items() if ".experts." in name)


def num_active_params(config: ViTConfig) -> float:
    """Number of parameters that process a token.

    A token is processed by k experts in token choice, by capacity_factor experts on average in expert choice,
    and by all experts if they process mixes of tokens or every token.
    """
    if not config.moe:
        return num_params(config)
    share = config.moe.router.active_experts(config.moe.num_experts) / config.moe.num_experts
    return num_params(config) - (1 - share) * num_expert_params(config)


@cache
def param_shapes(config: ViTConfig) -> dict[str, torch.Size]:
    """Shapes by parameter name, read from a model on the meta device."""
    with torch.device("meta"):
        model: nn.Module = ViT(config)
    return {name: p.shape for name, p in model.named_parameters()}


def at_point(config: ViTConfig, overrides: RoutingOverrides) -> ViTConfig:
    """Returns the config with the overrides of k, capacity and priority. Raises ValueError if the router has
    no such setting, or refuses the value."""
    if not config.moe:
        return config
    return replace(config, moe=replace(config.moe, router=overrides.apply(config.moe.router)))


def forward_macs(config: ViTConfig, overrides: RoutingOverrides = AS_TRAINED) -> dict[str, float]:
    """MACs of one image's forward pass, by part.

    With a subset of experts only their slots are mixed, computed and combined, as `experts.run_chosen` does,
    while the router weighs all experts. A random router counts as a learned router.

    Raises ValueError if the router refuses the overrides.
    """
    config = at_point(config, overrides)
    D, F, S = config.width, config.mlp_dim, config.tokens()
    num_moe = len(config.moe_blocks())
    features = config.representation_size or 0
    macs: dict[str, float] = {
        "embed": _stem_macs(config),
        "attention_projections": config.depth * S * 4 * D * D,
        "attention_scores": config.depth * 2 * S * S * D,
        "mlp": (config.depth - num_moe) * S * 2 * D * F,
        # The probe's query and output, the tokens' keys and values, scores, MLP.
        "pooling": 2 * D * D + 2 * S * D * D + 2 * S * D + 2 * D * F if config.pooling == "map" else 0,
        "head": D * features + (features or D) * config.num_classes,
    }
    if config.moe:
        macs["experts"] = num_moe * expert_rows(config, overrides) * 2 * D * config.expert_dim()
        router, layer = config.moe.router, config.layer_shape()
        macs["router"] = num_moe * router.gate_macs(layer)
        macs["dispatch_combine"] = num_moe * router.mix_macs(layer, overrides.num_kept(layer.experts))
    return macs


def _stem_macs(config: ViTConfig) -> int:
    D = config.width
    if not config.stem:
        return config.grid() ** 2 * 3 * config.patch_size**2 * D
    channels, macs = [3, *stem_channels(D, config.patch_size)], config.grid() ** 2 * D * D
    for i, (before, after) in enumerate(pairwise(channels), start=1):
        macs += (config.image_size >> i) ** 2 * 9 * before * after
    return macs


def expert_rows(config: ViTConfig, overrides: RoutingOverrides = AS_TRAINED) -> float:
    """Number of rows that the experts compute per image and MoE layer."""
    config = at_point(config, overrides)
    assert config.moe
    return overrides.num_kept(config.moe.num_experts) * config.slots() / config.moe.images_per_group


def forward_gflops_2mac(config: ViTConfig, overrides: RoutingOverrides = AS_TRAINED) -> float:
    """GFLOP of one image's forward pass in evaluation mode at two FLOPs per MAC. Raises the errors of
    `forward_macs`.
    """
    if config.moe:
        config = replace(config, moe=replace(config.moe, router=config.moe.router.evaluated()))
    return 2 * sum(forward_macs(config, overrides).values()) / 1e9


def train_flops_6mac(config: ViTConfig, images: int) -> float:
    """FLOPs of training on `images` images, forward and backward (twice the forward), two FLOPs per MAC."""
    return 6 * sum(forward_macs(config).values()) * images


def train_flops_3mac(config: ViTConfig, images: int) -> float:
    """FLOPs of training on `images` images, forward and backward, at one FLOP per MAC."""
    return train_flops_6mac(config, images) / 2


def slots_per_token(config: ViTConfig) -> float:
    """Expert rows computed per token: k*c, c or slots/tokens, depending on the router; 1 for dense."""
    return expert_rows(config) / config.tokens() if config.moe else 1.0
