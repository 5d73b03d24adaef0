"""One pass of a ViT at many operating points, which computes what they share once.

Overrides change nothing before the first block whose routing differs: the points form a tree that branches
between a block's attention and its experts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.layer import MoELayer
from moe.overrides import RoutingOverrides

if TYPE_CHECKING:
    from moe.models.vit import Block, ViT


@torch.no_grad()
def at_points(
    model: "ViT", images: Tensor, valid_B: Tensor | None, points: Sequence[RoutingOverrides]
) -> list[Tensor]:
    """Returns for each point the logits of ``model(images, valid_B, routing_overrides=point)``, (B, classes).

    Points with equal outputs share a tensor. Of a sharded model, each half of a block gathers its weights
    when it is called.

    Raises ValueError if the model has no such routing, or its router refuses a value.
    """
    for point in points:
        model.config.check_overrides(point)
    B = len(images)
    images, valid_BP, _ = model.whole_groups(images, valid_B)
    blocks: list[tuple[int, Block]] = list(enumerate(model.blocks))  # pyright: ignore[reportAssignmentType]
    logits: dict[int, Tensor] = {}

    def routing_at(point: RoutingOverrides, block: int) -> object:
        """Returns the settings of a point in a block. Points with equal settings have equal outputs there."""
        assert model.config.moe
        router = point.apply(model.config.moe.router.eval_config())
        drawn = point.subset_seed, block in point.random_blocks
        return router, point.experts, point.images_per_group, drawn

    def run_from(x_BSD: Tensor, first: int, members: list[int]) -> None:
        """Runs the blocks from `first` on for the points with the indices `members`."""
        for index, block in blocks[first:]:
            if not isinstance(block.mlp, MoELayer):
                x_BSD = block(x_BSD, valid_BP).x
                continue
            x_BSD = block.attended(x_BSD)
            branches: dict[object, list[int]] = {}
            for member in members:
                branches.setdefault(routing_at(points[member], index), []).append(member)
            *others, members = branches.values()
            for branch in others:
                run_from(block.routed(x_BSD, valid_BP, points[branch[0]]), index + 1, branch)
            x_BSD = block.routed(x_BSD, valid_BP, points[members[0]])
        answer = model.head(model.pooled(model.norm(x_BSD[:B])))
        logits.update((member, answer) for member in members)

    if points:
        run_from(model.embedded(images), 0, list(range(len(points))))
    return [logits[i] for i in range(len(points))]
