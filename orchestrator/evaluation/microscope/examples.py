"""A few images, and what every layer does with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.overrides import RoutingOverrides
from moe.routing import SoftRouting
from moe.vit import ViT
from orchestrator.data.batch import Batch
from orchestrator.data.images import normalize
from orchestrator.evaluation.microscope.discarded import Discarded, discarded
from orchestrator.evaluation.microscope.views import View, patches, view_of


@dataclass(frozen=True, kw_only=True)
class SlotMaps:
    """Of a soft router. Attributes:
    dispatch_BPEC: what each slot takes of each patch; a slot's map sums to 1 over the tokens of its group.
    combine_BPEC: what each patch takes of each slot; sums to 1 over (E, C).
    """

    dispatch_BPEC: Tensor
    combine_BPEC: Tensor


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Attributes:
    image_B3HW, label_B: uint8 as the model sees them.
    views, slots: by block, as trained; `slots` for soft routers alone.
    discarded: at other capacities, of the same images.
    discarded_frac: of all images of their batch, for each of these, by block.
    """

    image_B3HW: Tensor
    label_B: Tensor
    views: dict[int, View]
    slots: dict[int, SlotMaps]
    discarded: tuple[Discarded, ...]
    discarded_frac: tuple[dict[int, float], ...]


def pick(label_B: Sequence[int], count: int) -> list[int]:
    """Places of `count` images: the first of every class, then the rest, each in their order."""
    first = {label: i for i, label in reversed(list(enumerate(label_B)))}
    firsts = sorted(first.values())
    rest = [i for i in range(len(label_B)) if i not in set(firsts)]
    return sorted((firsts + rest)[:count])


@torch.inference_mode()
def examples(
    model: ViT, batch: Batch, *, count: int, blocks: Sequence[int], points: Iterable[RoutingOverrides]
) -> Examples:
    """Of a whole batch, as images that are routed together matter to each other."""
    config, valid = model.config, batch.valid
    labels = batch.label[valid.bool()].cpu()
    chosen = pick(labels.tolist(), count)
    routings = model(normalize(batch.image), valid, return_routings=True).routings
    views, slots = {}, {}
    for block, routing in zip(config.moe_blocks(), routings, strict=True):
        if block not in blocks:
            continue
        view = view_of(routing, config, valid)
        views[block] = View(**{name: value.cpu()[chosen] for name, value in vars(view).items()})
        if isinstance(routing, SoftRouting):
            slots[block] = SlotMaps(
                dispatch_BPEC=patches(routing.dispatch_GSEC, config, valid).cpu()[chosen],
                combine_BPEC=patches(routing.combine_GSEC, config, valid).cpu()[chosen],
            )
    dropped = [discarded(model, batch, point) for point in points]
    return Examples(
        image_B3HW=batch.image[valid.bool()].cpu()[chosen],
        label_B=labels[chosen],
        views=views,
        slots=slots,
        discarded=tuple(one.of(chosen) for one in dropped),
        discarded_frac=tuple(
            {block: float(patch_BP.double().mean()) for block, patch_BP in one.patch_BP.items()}
            for one in dropped
        ),
    )
