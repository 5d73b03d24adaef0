"""One pass over images at many operating points: what they share is computed once.

Overrides change nothing before the first block whose routing differs: the points are a tree that branches
between a block's attention and its experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.layer import MoELayer
from moe.overrides import RoutingOverrides
from moe.vit import Block, ViT, check_overrides


@torch.no_grad()
def forward_at(
    model: ViT, images: Tensor, valid_B: Tensor | None, points: Sequence[RoutingOverrides]
) -> list[Tensor]:
    """Of each point the logits of ``model(images, valid_B, routing_overrides=point)``, (B, classes).

    In one process, without gradients. Points that come to the same share a tensor.

    Raises:
        ValueError: if the model has no such routing, or its router refuses a value.
    """
    for point in points:
        check_overrides(model.config, point)
    if not points:
        return []
    logits: dict[int, Tensor] = {}
    B, router, moe_blocks = (
        len(images),
        model.config.moe and model.config.moe.router,
        model.config.moe_blocks(),
    )
    images, valid_BP, _ = model.whole_groups(images, valid_B)
    blocks: list[tuple[int, Block]] = list(enumerate(model.blocks))  # pyright: ignore[reportAssignmentType]

    def decides(point: RoutingOverrides, block: int) -> object:
        """What a point changes in a block: points of equal ones have the same output."""
        if router is None or block not in moe_blocks:
            return None
        return point.apply(router), point.experts, block in point.random_blocks

    def second_half(block: Block, x_BSD: Tensor, point: RoutingOverrides) -> Tensor:
        if not isinstance(block.mlp, MoELayer):
            return x_BSD + block.mlp(block.norm2(x_BSD))
        y_BSD, _ = block.mlp(block.norm2(x_BSD), valid_BP, None, point)
        return x_BSD + y_BSD if block.residual else y_BSD

    def onward(x_BSD: Tensor, first: int, members: Sequence[int]) -> None:
        for index, block in blocks[first:]:
            x_BSD = x_BSD + block.attention(block.norm1(x_BSD))
            branches: dict[object, list[int]] = {}
            for member in members:
                branches.setdefault(decides(points[member], index), []).append(member)
            *others, last = branches.values()
            for branch in others:
                onward(second_half(block, x_BSD, points[branch[0]]), index + 1, branch)
            x_BSD = second_half(block, x_BSD, points[last[0]])
            members = last
        answer = model.head(model.pooled(model.norm(x_BSD[:B])))
        logits.update((member, answer) for member in members)

    onward(model.embedded(images), 0, range(len(points)))
    return [logits[number] for number in range(len(points))]
