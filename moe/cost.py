"""Parameters and multiply-adds (MACs) of a model, from its config alone.

Counted: every matmul, as the papers do; not: softmax, LayerNorm, GELU, sorting (0.3-1 % of the published
figures). Conventions differ by factors of two between the papers, so a cost carries its own in its name:
``2mac`` counts a MAC as two FLOPs (Soft MoE table 1, GFLOP/img), ``6mac`` is forward and backward at two
FLOPs per MAC (V-MoE table 2). Slots are counted as they are computed, full or empty.
"""

from moe.routers import SoftConfig
from moe.vit import ViTConfig


def num_params(config: ViTConfig) -> int:
    """Every trainable number: weights, biases, norms, position embedding."""
    D, F, tokens = config.width, config.mlp_dim, config.tokens()
    head_dim = D // config.heads
    mlp = D * F + F + F * D + D
    attention = D * 3 * D + 3 * D + D * D + D + 2 * head_dim
    embed = 3 * config.patch_size**2 * D + D + tokens * D
    head = D * config.num_classes + config.num_classes
    num_moe = len(config.moe_blocks())
    total = embed + head + 2 * D + config.depth * (attention + 4 * D) + (config.depth - num_moe) * mlp
    if config.moe:
        total += num_moe * (config.moe.num_experts * mlp + _router_params(config))
    return total


def _router_params(config: ViTConfig) -> int:
    assert config.moe
    router, E, D = config.moe.router, config.moe.num_experts, config.width
    if isinstance(router, SoftConfig):
        return D * E * router.slots_per_expert + router.normalize
    return D * E


def forward_macs(config: ViTConfig) -> dict[str, float]:
    """MACs of one image's forward pass, by part; their sum is the whole."""
    D, F, S = config.width, config.mlp_dim, config.tokens()
    num_moe = len(config.moe_blocks())
    macs: dict[str, float] = {
        "embed": S * 3 * config.patch_size**2 * D,
        "attention_projections": config.depth * S * 4 * D * D,
        "attention_scores": config.depth * 2 * S * S * D,
        "mlp": (config.depth - num_moe) * S * 2 * D * F,
        "head": D * config.num_classes,
    }
    if config.moe:
        soft = isinstance(config.moe.router, SoftConfig)
        slots = config.moe.num_experts * config.slots()  # of a group
        macs["experts"] = num_moe * slots / config.moe.images_per_group * 2 * D * F
        macs["router"] = num_moe * S * D * (slots if soft else config.moe.num_experts)
        # gather and scatter move tokens without multiplying; soft routing is two more matmuls
        macs["dispatch_combine"] = num_moe * 2 * S * slots * D if soft else 0
    return macs


def forward_gflops_2mac(config: ViTConfig) -> float:
    """GFLOP per image, forward, two FLOPs per MAC."""
    return 2 * sum(forward_macs(config).values()) / 1e9


def train_flops_6mac(config: ViTConfig, images: int) -> float:
    """FLOPs of training on `images` images: forward, and a backward of twice that, at two FLOPs per MAC."""
    return 6 * sum(forward_macs(config).values()) * images


def slots_per_token(config: ViTConfig) -> float:
    """Expert rows computed per token: k*C, c, or slots/tokens, as the router has it; 1 for dense."""
    if not config.moe:
        return 1.0
    return config.moe.num_experts * config.slots() / (config.moe.images_per_group * config.tokens())
