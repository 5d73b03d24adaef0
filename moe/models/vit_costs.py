"""The cost of a ViT, a text tower and a decoder, by formulas: multiply-adds, and activations that training
keeps.

Multiply-adds count every matmul, as in the papers, and leave out softmax, LayerNorm, GELU and sorting
(0.3-1 % of the published figures). Empty slots are computed, so they are counted.
"""

from itertools import pairwise
from typing import TYPE_CHECKING

from moe.dense import stem_channels
from moe.overrides import RoutingOverrides
from moe.routing import LayerShape
from moe.trace import Activations

if TYPE_CHECKING:
    from moe.models.decoder import DecoderConfig
    from moe.models.text import TextConfig
    from moe.models.vit import ViTConfig

    Encoder = ViTConfig | TextConfig | DecoderConfig

FP32 = 4  # bytes


def macs(config: "ViTConfig", overrides: RoutingOverrides) -> dict[str, float]:
    """Returns the multiply-adds of one image's forward pass, by part; `config` is that at the point.

    With a subset of experts only their slots are mixed, computed and combined, as `experts.run_chosen` does,
    while the router weighs all experts. A random router counts as a learned router.
    """
    D, features = config.width, config.representation_size or 0
    head = D * features + (features or D) * config.num_classes
    return encoder_macs(config, overrides, embed=_stem_macs(config), head=head)


def encoder_macs(
    config: "Encoder", overrides: RoutingOverrides, *, embed: float, head: float
) -> dict[str, float]:
    """Returns the multiply-adds of blocks and pooling, by part, beside those of `embed` and `head`."""
    D, F, S = config.width, config.mlp_dim, config.tokens()
    num_moe = len(config.moe_blocks())
    parts: dict[str, float] = {
        "embed": embed,
        "attention_projections": config.depth * S * 4 * D * D,
        "attention_scores": config.depth * 2 * S * S * D,
        "mlp": (config.depth - num_moe) * S * 2 * D * F,
        # The probe's query and output, the tokens' keys and values, scores, MLP.
        "pooling": 2 * D * D + 2 * S * D * D + 2 * S * D + 2 * D * F if config.pooling == "map" else 0,
        "head": head,
    }
    if config.moe:
        router, layer = config.moe.router, _layer_shape(config)
        parts["experts"] = num_moe * config.expert_rows(overrides) * 2 * D * config.expert_dim()
        if config.moe.shared_dim:
            parts["shared"] = num_moe * S * 2 * D * config.moe.shared_dim
        parts["router"] = num_moe * router.gate_macs(layer)
        parts["dispatch_combine"] = num_moe * router.mix_macs(layer, overrides.num_kept(layer.experts))
    return parts


def activations(config: "ViTConfig", number: int) -> Activations:
    """Returns the bytes of one image's activations, with `number` bytes for a number outside of routers.

    Counted: what matmuls, attention, LayerNorm, GELU and the routing's mixes need again. Assumed: fused
    attention, which keeps no S x S scores, and no activation checkpointing. Not counted: router internals of
    the size of its logits beyond gates, indices and mixing weights; the loss.
    """
    D, S = config.width, config.tokens()
    channels = stem_channels(D, config.patch_size) if config.stem else ()
    outside = 3 * config.image_size**2 + S * (D + 2) + D + 2 * (config.representation_size or 0)
    outside += sum(3 * n * (config.image_size >> i) ** 2 for i, n in enumerate(channels, start=1))
    return encoder_activations(config, number, outside=outside)


def encoder_activations(config: "Encoder", number: int, *, outside: float) -> Activations:
    """Returns the bytes of the activations of blocks and pooling, and of `outside` numbers beside them."""
    D, F, S, H = config.width, config.mlp_dim, config.tokens(), config.heads
    if config.pooling == "map":
        outside += S * D * (3 + config.qk_norm) + 2 * F + 6 * D
    # What LayerScale scales, in both branches.
    scaled = 2 * S * D if getattr(config, "layer_scale", None) else 0
    qk_norm = 2 * S * D + 4 * S * H if config.qk_norm else 0  # normalised queries, keys; means, deviations
    # inputs and outputs of both norms; queries, keys, values; the output of the heads, log-sum-exp
    attention_norms = S * (4 * D + 4) + 3 * S * D + qk_norm + S * D + S * H + scaled
    found: list[float] = [number * outside]
    hidden = [_hidden(config, block) for block in range(config.depth)]
    for block in range(config.depth):
        found.append(number * (attention_norms + 2 * hidden[block]))  # before and after GELU
        if block in config.moe_blocks():
            assert config.moe
            found[-1] += number * 2 * S * (config.moe.shared_dim or 0)
            rows, mixing = config.moe.router.saved(_layer_shape(config))
            found[-1] += number * rows * D + FP32 * (mixing + (S * D if number < FP32 else 0))
    return Activations(saved=found, stream=number * S * D, widest=number * max(hidden))


def _hidden(config: "Encoder", block: int) -> float:
    """Returns the numbers in the hidden layer of a block's MLP or experts, per image."""
    if block in config.moe_blocks():
        return config.expert_dim() * config.expert_rows()
    return config.mlp_dim * config.tokens()


def _layer_shape(config: "Encoder") -> LayerShape:
    assert config.moe
    moe = config.moe
    return LayerShape(config.tokens(), moe.images_per_group, moe.num_experts, config.slots(), config.width)


def _stem_macs(config: "ViTConfig") -> int:
    D = config.width
    if not config.stem:
        return config.grid() ** 2 * 3 * config.patch_size**2 * D
    channels, count = [3, *stem_channels(D, config.patch_size)], config.grid() ** 2 * D * D
    for i, (before, after) in enumerate(pairwise(channels), start=1):
        count += (config.image_size >> i) ** 2 * 9 * before * after
    return count
