"""What a model costs, from its config alone: parameters, multiply-adds (MACs), memory and traffic per rank.

MACs are those of every matmul, as the papers count; not: softmax, LayerNorm, GELU, sorting (0.3-1 % of the
published figures). Conventions differ by factors of two between the papers, so a cost carries its own in its
name: ``2mac`` counts a MAC as two FLOPs (Soft MoE table 1, GFLOP/img), ``3mac`` is forward and backward at
one FLOP per MAC (its exaFLOP), ``6mac`` at two (V-MoE table 2). Slots are counted as they are computed, full
or empty.
"""

from functools import cache
from math import prod

import torch
from torch import nn

from moe.routers import ExpertChoiceConfig, MixtureConfig, SoftConfig, TokenChoiceConfig
from moe.vit import ViT, ViTConfig

FP32 = 4  # bytes


def num_params(config: ViTConfig) -> int:
    """Every trainable number: weights, biases, norms, position embedding."""
    return sum(map(prod, _shapes(config).values()))


def num_expert_params(config: ViTConfig) -> int:
    """Those of the experts' MLPs."""
    return sum(prod(shape) for name, shape in _shapes(config).items() if ".experts." in name)


def num_active_params(config: ViTConfig) -> float:
    """Those a token meets: of the experts k where tokens choose, the capacity factor on average where experts
    do, all where experts see mixes of all tokens.
    """
    if not config.moe:
        return num_params(config)
    router, share = config.moe.router, 1.0
    if isinstance(router, TokenChoiceConfig):
        share = router.k / config.moe.num_experts
    elif isinstance(router, ExpertChoiceConfig):
        share = router.capacity_factor / config.moe.num_experts
    return num_params(config) - (1 - share) * num_expert_params(config)


@cache
def _shapes(config: ViTConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model: nn.Module = ViT(config)
    return {name: p.shape for name, p in model.named_parameters()}


def forward_macs(config: ViTConfig) -> dict[str, float]:
    """MACs of one image's forward pass, by part; their sum is the whole."""
    D, F, S = config.width, config.mlp_dim, config.tokens()
    num_moe = len(config.moe_blocks())
    features = config.representation_size or 0
    macs: dict[str, float] = {
        "embed": config.grid() ** 2 * 3 * config.patch_size**2 * D,
        "attention_projections": config.depth * S * 4 * D * D,
        "attention_scores": config.depth * 2 * S * S * D,
        "mlp": (config.depth - num_moe) * S * 2 * D * F,
        # the probe's query and answer, the tokens' keys and values, scores, MLP
        "pooling": 2 * D * D + 2 * S * D * D + 2 * S * D + 2 * D * F if config.pooling == "map" else 0,
        "head": D * features + (features or D) * config.num_classes,
    }
    if config.moe:
        macs["experts"] = num_moe * _rows(config) * 2 * D * F
        macs["router"] = num_moe * _router_macs(config)
        macs["dispatch_combine"] = num_moe * _dispatch_combine_macs(config)
    return macs


def _rows(config: ViTConfig) -> float:
    """Expert rows computed per image and MoE layer."""
    assert config.moe
    return config.moe.num_experts * config.slots() / config.moe.images_per_group


def _router_macs(config: ViTConfig) -> float:
    assert config.moe
    router, E, S, D = config.moe.router, config.moe.num_experts, config.tokens(), config.width
    if isinstance(router, SoftConfig):
        return S * D * E * config.slots() if router.learned() else 0
    if isinstance(router, MixtureConfig):
        if router.level == "image":  # one decision per group
            return D * E / config.moe.images_per_group
        return S * D * (E + (router.clusters if router.level == "hierarchical" else 0))
    return S * D * E


def _dispatch_combine_macs(config: ViTConfig) -> float:
    """Gather and scatter move tokens without multiplying; soft routing is two matmuls, a mixture one."""
    assert config.moe
    S, D, E = config.tokens(), config.width, config.moe.num_experts
    if isinstance(config.moe.router, SoftConfig):
        return 2 * S * E * config.slots() * D
    return S * E * D if isinstance(config.moe.router, MixtureConfig) else 0


def forward_gflops_2mac(config: ViTConfig) -> float:
    """GFLOP per image, forward, two FLOPs per MAC."""
    return 2 * sum(forward_macs(config).values()) / 1e9


def train_flops_6mac(config: ViTConfig, images: int) -> float:
    """FLOPs of training on `images` images: forward, and a backward of twice that, at two FLOPs per MAC."""
    return 6 * sum(forward_macs(config).values()) * images


def train_flops_3mac(config: ViTConfig, images: int) -> float:
    """As `train_flops_6mac`, at one FLOP per MAC."""
    return train_flops_6mac(config, images) / 2


def slots_per_token(config: ViTConfig) -> float:
    """Expert rows computed per token: k*C, c, or slots/tokens, as the router has it; 1 for dense."""
    return _rows(config) / config.tokens() if config.moe else 1.0


def saved_for_backward(config: ViTConfig) -> dict[str, float]:
    """Numbers that autograd keeps of one image's forward pass, by part.

    Counted: what matmuls, attention, LayerNorm, GELU and the routing's mixes need again. Assumed: fused
    attention, which keeps no S x S scores, and no activation checkpointing. Not counted: router internals of
    the size of its logits beyond gates, indices and mixing weights; the loss.
    """
    D, F, S, H = config.width, config.mlp_dim, config.tokens(), config.heads
    num_moe = len(config.moe_blocks())
    qk_norm = 2 * S * D + 4 * S * H if config.qk_norm else 0  # normalised queries, keys; means, deviations
    # the input of both norms, and what they give; queries, keys, values; the heads' answers, log-sum-exp
    block = S * (4 * D + 4) + 3 * S * D + qk_norm + S * D + S * H
    hidden = 2 * S * F  # of an MLP: before and after GELU
    saved: dict[str, float] = {
        "embed": 3 * config.image_size**2,
        "attention_norms": config.depth * block,
        "mlp": (config.depth - num_moe) * hidden,
        "head": S * (D + 2) + D + 2 * (config.representation_size or 0),
    }
    if config.pooling == "map":
        saved["head"] += S * D * (3 + config.qk_norm) + 2 * F + 6 * D
    if config.moe:
        saved["experts"] = num_moe * _rows(config) * 2 * F
        saved["routing"] = num_moe * _routing_saved(config)
    return saved


def _routing_saved(config: ViTConfig) -> float:
    assert config.moe
    router, D, S, E, rows = (
        config.moe.router,
        config.width,
        config.tokens(),
        config.moe.num_experts,
        _rows(config),
    )
    if isinstance(router, SoftConfig):
        unit_x = S * D if router.learned() and router.normalize != "none" else 0
        return 2 * rows * D + 2 * S * E * config.slots() + unit_x
    if isinstance(router, MixtureConfig):
        return rows * D + S * E  # dispatch copies no token
    return 3 * rows * D + S * E  # index_add keeps what it adds, for its shape


def memory_per_rank(config: ViTConfig, *, dp: int, ep: int, images_per_rank: int) -> dict[str, float]:
    """Bytes of one rank of a (dp, ep) mesh, by part; all in float32, as `parallel` trains.

    Parameters, gradients and AdamW's two moments are spread evenly over all ranks. ``gathered``: what FSDP
    holds whole for a moment, the root's own parameters and two blocks' (one computes, the next arrives).
    Activations as `saved_for_backward` counts them. Not counted: temporary buffers, the allocator's waste.
    """
    own = FP32 * num_params(config) / (dp * ep)
    root, *blocks = (dense + experts for dense, experts in _units(config, dp, ep))
    return {
        "parameters": own,
        "gradients": own,
        "adamw_moments": 2 * own,
        "gathered": FP32 * (root + sum(sorted(blocks)[-2:])),
        "activations": FP32 * images_per_rank * sum(saved_for_backward(config).values()),
    }


def traffic_per_rank(config: ViTConfig, *, dp: int, ep: int, images_per_rank: int) -> dict[str, float]:
    """Bytes that a rank sends in one forward and backward pass, its own share apart; float32.

    Every MoE layer exchanges its expert rows over ep twice forward and twice backward. FSDP gathers blocks
    forward and backward, the root once, and reduces every gradient once.
    """
    rows = images_per_rank * _rows(config) * len(config.moe_blocks()) if config.moe else 0
    dense_share, experts_share = 1 - 1 / (dp * ep), 1 - 1 / dp
    root, *blocks = (
        dense * dense_share + experts * experts_share for dense, experts in _units(config, dp, ep)
    )
    return {
        "all_to_all": FP32 * 4 * rows * config.width * (1 - 1 / ep),
        "all_gather": FP32 * (root + 2 * sum(blocks)),
        "reduce_scatter": FP32 * (root + sum(blocks)),
    }


def _units(config: ViTConfig, dp: int, ep: int) -> list[tuple[float, float]]:
    """What FSDP gathers at once, first the root, then the blocks: dense numbers, and a rank's experts' over
    dp; 0 where there is nobody to gather from.
    """
    units = [[0.0, 0.0] for _ in range(1 + config.depth)]
    for name, shape in _shapes(config).items():
        unit = units[1 + int(name.split(".")[1]) if name.startswith("blocks.") else 0]
        if ".experts." in name:
            unit[1] += prod(shape) / ep if dp > 1 else 0
        else:
            unit[0] += prod(shape) if dp * ep > 1 else 0
    return [(dense, experts) for dense, experts in units]
