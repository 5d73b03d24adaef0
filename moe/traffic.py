"""What a rank sends in a training step, by collective and by link, from the config alone.

Ranks are numbered with ep innermost, then dp, then the copies of the model (HSDP), so an EP group is `ep`
neighbouring ranks. Every device is linked to those of its node, and by a card of its own to other nodes.
"""

from math import gcd
from typing import NamedTuple

from moe.cost import expert_rows
from moe.parallel import ParallelConfig
from moe.sharding import FP32, Step, units
from moe.vit import ViTConfig


class Sent(NamedTuple):
    """Bytes to devices of the same node, and to those of other nodes."""

    intra: float
    inter: float


def traffic_per_rank(
    config: ViTConfig,
    step: Step,
    *,
    dp: int,
    ep: int,
    options: ParallelConfig,
    devices_per_node: int = 8,
) -> dict[str, Sent]:
    """By collective, per step; a rank's own share, which it sends to nobody, does not count.

    ``all_to_all``: the rows of every MoE layer travel to their experts and back, so do their gradients, and
    with activation checkpointing the rows a second time. ``all_gather``: weights of the blocks are gathered
    forward and backward, unless a pass kept them for the next; the rest of the model once.
    ``reduce_scatter``, and ``all_reduce`` over copies of the model: float32 gradients, once. Routers count
    as gathered with their blocks; bfloat16 runs gather them once, in float32. Not counted: gradient norms,
    metrics.
    """
    shards = dp // options.dp_replicate
    node = min(devices_per_node, dp * ep)
    root, *blocks = units(config, dp=shards, ep=ep)
    gathers = 1 + step.passes if options.reshard_after_forward else 1
    dense, experts = (sum(unit[i].held for unit in blocks) for i in (0, 1))
    dense_group = _Group(shards * ep, 1, node)
    experts_group = _Group(shards, ep, node)
    copies = _Group(options.dp_replicate, shards * ep, node)

    exchanges = 6 if options.activation_checkpointing else 4
    rows = step.images * step.passes * expert_rows(config) * len(config.moe_blocks()) if config.moe else 0
    return {
        "all_to_all": _Group(ep, 1, node).exchange(step.compute_bytes * exchanges * rows * config.width),
        "all_gather_dense": dense_group.gather(step.compute_bytes * (root.dense.held + gathers * dense)),
        "all_gather_experts": experts_group.gather(step.compute_bytes * gathers * experts),
        "reduce_scatter_dense": dense_group.gather(FP32 * (root.dense.held + dense)),
        "reduce_scatter_experts": experts_group.gather(FP32 * experts),
        "all_reduce": copies.gather(2 * FP32 * (root.held() + dense + experts) / options.dp_replicate),
    }


class _Group(NamedTuple):
    """Ranks that are `stride` apart, `node` devices to a node."""

    size: int
    stride: int
    node: int

    def mates(self) -> int:
        """Members in the node of any member, itself included: the fewest, where groups and nodes do not
        divide each other.
        """
        return 1 if self.node % self.stride else gcd(self.size, self.node // self.stride)

    def exchange(self, whole: float) -> Sent:
        """All-to-all of `whole` bytes: an equal part for every member, itself included."""
        part, mates = whole / self.size, self.mates()
        return Sent(intra=(mates - 1) * part, inter=(self.size - mates) * part)

    def gather(self, share: float) -> Sent:
        """All-gather of `share` bytes of every member: first between nodes, each member with its like in
        other nodes, then within every node, so that a byte enters a node once, through one of its cards. A
        reduce-scatter that leaves `share` bytes goes the way back.
        """
        nodes = self.size // self.mates()
        return Sent(intra=(self.size - nodes) * share, inter=(nodes - 1) * share)
