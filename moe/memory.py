"""Memory of one rank at the peak of a training step, from the config alone.

The backward pass goes down the blocks, frees activations and leaves gradients behind. `memory_per_rank` adds
up what there is at every block, and at the update after it.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from moe.cost import expert_rows
from moe.dense import stem_channels
from moe.parallel import ParallelConfig
from moe.routers import MixtureConfig, SoftConfig
from moe.sharding import FP32, Step, Unit, units
from moe.vit import ViTConfig


def memory_per_rank(
    config: ViTConfig, step: Step, *, dp: int, ep: int, options: ParallelConfig
) -> dict[str, float]:
    """Bytes of one rank of a (dp, ep) mesh at the step's peak, by part; their sum is the peak.

    ``gradients``, ``activations`` and ``buffers`` are those of the peak: where activations are at their
    most, only the last block has gradients, unless earlier passes left some. ``buffers``: weights that FSDP
    has gathered, gradients that it reduces, gradients of a layer's activations. Not counted: the loss,
    temporaries of an operation, fragmentation, communication libraries.
    """
    parts = units(config, dp=dp // options.dp_replicate, ep=ep)
    own: float = FP32 * sum(unit.held() for unit in parts)
    stream = step.images * step.compute_bytes * config.tokens() * config.width  # from block to block
    root, *blocks = (step.images * saved for saved in _saved_bytes(config, step.compute_bytes))
    below = list(
        accumulate([stream] * config.depth if options.activation_checkpointing else blocks, initial=root)
    )
    lower_precision = step.compute_bytes < FP32
    sharded = dp * ep > 1 or lower_precision or options.activation_checkpointing or options.compile

    update: dict[str, float] = {"gradients": own, "activations": 0.0, "buffers": 0.0}
    stages = [update]
    for i, saved in enumerate(blocks):
        computing = stream + step.images * step.compute_bytes * _hidden(config, i)
        for last in (True,) if step.passes == 1 else (True, False):
            backward = {
                "gradients": FP32 * _gradients(parts, i + 1, step.passes, last=last),
                "activations": below[i] + saved,
                "buffers": computing,
            }
            if sharded:
                backward["buffers"] = _fsdp_buffers(parts, i + 1, step, options, computing, last=last)
            stages.append(backward)
    peak = max(stages, key=lambda stage: sum(stage.values()))
    return {"parameters": own, "optimizer": step.moments * own} | peak


def _gradients(parts: Sequence[Unit], block: int, passes: int, *, last: bool) -> int:
    """Numbers in gradients during the backward pass of `block`: a rank's share from there on, whole ones of
    what earlier passes left and the `last` has not reduced.
    """
    if not last:
        return sum(unit.gathered() for unit in parts[block + 1 if passes == 2 else 0 :])
    unreduced = sum(unit.gathered() for unit in parts[: block + 1]) if passes > 1 else 0
    return unreduced + sum(unit.held() for unit in parts[block:])


def _fsdp_buffers(
    parts: Sequence[Unit], block: int, step: Step, options: ParallelConfig, computing: float, *, last: bool
) -> float:
    """Bytes while the experts of `block` arrive, while it computes, or while its gradients are reduced:
    whichever are most.

    Experts that are sharded over dp, in dim 1, arrive, are taken apart and are put together: a copy each.
    Later the dense weights of the block before arrive, if they were freed. What is in no block stays; so do
    the blocks after this one where another pass follows.
    """
    here, experts = parts[block].gathered(), parts[block].experts
    kept = [parts[0], *(() if last else parts[block + 1 :])]
    early, arrive = 0, step.passes == 1  # if only in the first forward pass, there is room
    if not options.reshard_after_forward:
        kept += parts[1:block]
    else:
        early, arrive = parts[block - 1].dense.gathered if block > 1 else 0, True
    copies = 2 if arrive and experts.gathered > experts.held else 0
    gathered = here + sum(unit.gathered() for unit in kept)
    return max(
        step.compute_bytes * (gathered + copies * experts.gathered),
        step.compute_bytes * (gathered + early + here / 2) + computing,  # half of its own gradients are there
        step.compute_bytes * (gathered + early) + (FP32 if last else step.compute_bytes) * here,
    )


def saved_for_backward(config: ViTConfig) -> dict[str, float]:
    """Numbers that autograd keeps of one image's forward pass, by part.

    Counted: what matmuls, attention, LayerNorm, GELU and the routing's mixes need again. Assumed: fused
    attention, which keeps no S x S scores, and no activation checkpointing. Not counted: router internals of
    the size of its logits beyond gates, indices and mixing weights; the loss.
    """
    return dict(sum(map(Counter, _saved(config)), Counter()))


def _saved_bytes(config: ViTConfig, compute_bytes: int) -> list[float]:
    """`_saved` in bytes. Routers compute in float32: their weights of tokens, and a copy of these."""
    parts = _saved(config)
    if compute_bytes < FP32:
        for block in config.moe_blocks():
            parts[1 + block]["mixing"] += config.tokens() * config.width
    return [sum(n * (FP32 if name == "mixing" else compute_bytes) for name, n in p.items()) for p in parts]


def _saved(config: ViTConfig) -> list[dict[str, float]]:
    """`saved_for_backward` of what is in no block, then of every block."""
    D, F, S, H = config.width, config.mlp_dim, config.tokens(), config.heads
    root: dict[str, float] = {
        "embed": 3 * config.image_size**2 + _stem_saved(config),
        "head": S * (D + 2) + D + 2 * (config.representation_size or 0),
    }
    if config.pooling == "map":
        root["head"] += S * D * (3 + config.qk_norm) + 2 * F + 6 * D
    qk_norm = 2 * S * D + 4 * S * H if config.qk_norm else 0  # normalised queries, keys; means, deviations
    # the input of both norms, and what they give; queries, keys, values; the heads' answers, log-sum-exp
    attention_norms = S * (4 * D + 4) + 3 * S * D + qk_norm + S * D + S * H
    blocks: list[dict[str, float]] = []
    for i in range(config.depth):
        moe = i in config.moe_blocks()
        mlp = {"experts" if moe else "mlp": 2 * _hidden(config, i)}  # before and after GELU
        blocks.append({"attention_norms": attention_norms} | mlp | (_routing_saved(config) if moe else {}))
    return [root, *blocks]


def _stem_saved(config: ViTConfig) -> int:
    """What each of its convolutions, norms and GELUs gives."""
    if not config.stem:
        return 0
    channels = stem_channels(config.width, config.patch_size)
    return sum(3 * n * (config.image_size >> i) ** 2 for i, n in enumerate(channels, start=1))


def _hidden(config: ViTConfig, block: int) -> float:
    """Numbers in the hidden layer of a block's MLP or experts."""
    if block in config.moe_blocks():
        return config.expert_dim() * expert_rows(config)
    return config.mlp_dim * config.tokens()


def _routing_saved(config: ViTConfig) -> dict[str, float]:
    assert config.moe
    router, D, S, E = config.moe.router, config.width, config.tokens(), config.moe.num_experts
    rows = expert_rows(config)
    if isinstance(router, SoftConfig):
        unit_x = S * D if router.learned() and router.normalize != "none" else 0
        return {"rows": 2 * rows * D, "mixing": 2 * S * E * config.slots() + unit_x}
    if isinstance(router, MixtureConfig):
        return {"rows": rows * D, "mixing": S * E}  # dispatch copies no token
    return {"rows": 3 * rows * D, "mixing": S * E}  # index_add keeps what it adds, for its shape
