"""Which patches no expert sees when room is short, drawn white on the images.

Source: V-MoE (Riquelme et al. 2021), figure 4 and appendix D.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.overrides import Priority, RoutingOverrides
from moe.routers.capacity import CapacityConfig
from moe.vit import ViT
from orchestrator.data.batch import Batch
from orchestrator.data.images import normalize
from orchestrator.evaluation.microscope.views import view_of


@dataclass(frozen=True, kw_only=True)
class Discarded:
    """Attributes:
    capacity: factor, of all MoE layers.
    priority: who queues first; None where nobody queues (expert choice).
    patch_BP: by block; whether no expert sees the patch, of the images of a batch that count.
    """

    capacity: float
    priority: Priority | None
    patch_BP: dict[int, Tensor]

    def of(self, images: list[int]) -> "Discarded":
        """The same for some of the images."""
        return replace(self, patch_BP={block: one[images] for block, one in self.patch_BP.items()})


def drops(router: object) -> bool:
    """Whether there are patches that no expert sees: soft routers and mixtures have room for all."""
    return isinstance(router, CapacityConfig)


def settings(model: ViT, capacities: Iterable[float]) -> tuple[list[RoutingOverrides], list[str]]:
    """Each capacity, with and without priority where the router has one, and why some cannot be."""
    moe = model.config.moe
    assert moe
    found, refused = [], []
    for capacity in sorted(capacities):
        try:
            changed = RoutingOverrides(capacity_factor=capacity).apply(moe.router)
            replace(model.config, moe=replace(moe, router=changed))  # checks that there are slots
        except ValueError as error:
            refused.append(f"capacity {capacity:g}: {error}")
            continue
        if hasattr(moe.router, "priority"):
            of_queue = "max" if moe.router.priority == "none" else moe.router.priority  # pyright: ignore[reportAttributeAccessIssue]
            found += [RoutingOverrides(capacity_factor=capacity, priority=p) for p in ("none", of_queue)]
        else:
            found.append(RoutingOverrides(capacity_factor=capacity))
    return found, refused


@torch.inference_mode()
def discarded(model: ViT, batch: Batch, overrides: RoutingOverrides) -> Discarded:
    output = model(normalize(batch.image), batch.valid, routing_overrides=overrides, return_routings=True)
    assert overrides.capacity_factor is not None
    return Discarded(
        capacity=overrides.capacity_factor,
        priority=overrides.priority,
        patch_BP={
            block: view_of(routing, model.config, batch.valid).discarded_BP().cpu()
            for block, routing in zip(model.config.moe_blocks(), output.routings, strict=True)
        },
    )


def whitened(image_B3HW: Tensor, patch_BP: Tensor) -> Tensor:
    """The uint8 images with those patches white, and nothing else changed."""
    return image_B3HW.masked_fill(pixels_of(patch_BP, image_B3HW.shape[-1]).unsqueeze(1), 255)


def pixels_of(patch_BP: Tensor, size: int) -> Tensor:
    """(B, P) on the patch grid -> (B, size, size)."""
    grid = round(patch_BP.shape[1] ** 0.5)
    patch_BHW = patch_BP.unflatten(1, (grid, grid))
    return patch_BHW.repeat_interleave(size // grid, 1).repeat_interleave(size // grid, 2)
