"""A few example images, and how every MoE layer routes them: as trained, and at other capacities.

Source: V-MoE (Riquelme et al. 2021), figure 4 and appendix D (discarded patches, white); Soft MoE (Puigcerver
et al. 2023), appendix G (dispatch and combine weights).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.routing_analysis.collect import RoutingView, parameter_cosines, patches, view_of
from moe import ExpertChoiceConfig, RoutingOverrides, TokenChoiceConfig, ViT, ViTConfig
from moe.routing import SoftRouting
from orchestrator.data.batch import Batch, normalize


@dataclass(frozen=True, kw_only=True)
class Discarded:
    """The patches that no expert sees, by block."""

    setting: RoutingOverrides  # capacity and priority of all MoE layers
    patch_BP: dict[int, Tensor]  # bool, of the example images
    frac: dict[int, float]  # share in all images of the batch


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Example images and their routing, by block."""

    image_B3HW: Tensor  # uint8, as the model sees them
    label_B: Tensor
    views: dict[int, RoutingView]  # as trained
    dispatch_BPEC: dict[int, Tensor]  # of soft routers; a slot's map sums to 1 over the tokens of its group
    combine_BPEC: dict[int, Tensor]  # of soft routers; sums to 1 over (E, C)
    phi_NN: dict[int, Tensor]  # cosines between the parameters of slots, where a router learns slots
    discarded: tuple[Discarded, ...]  # the same images at other capacities


@torch.inference_mode()
def examples(
    model: ViT, batch: Batch, *, count: int, blocks: Sequence[int], settings: Iterable[RoutingOverrides]
) -> Examples:
    """Routes a whole batch, because images of a group compete, and keeps `count` of its images."""
    config, valid = model.config, batch.valid
    labels = batch["label"][:, 0][valid.bool()].cpu()
    chosen = pick(labels.tolist(), count)

    def kept(x_GS: Tensor) -> Tensor:
        return patches(x_GS, config, valid).cpu()[chosen]

    output = model(normalize(batch["image"]), valid, return_routings=True)
    routings = dict(zip(config.moe_blocks(), output.routings, strict=True))
    soft = {b: routings[b] for b in blocks if isinstance(routings[b], SoftRouting)}
    views = {block: vars(view_of(routings[block], config, valid)) for block in blocks}
    phi = {block: parameter_cosines(model.get_submodule(f"blocks.{block}.mlp.router")) for block in blocks}
    return Examples(
        image_B3HW=batch["image"][valid.bool()].cpu()[chosen],
        label_B=labels[chosen],
        views={b: RoutingView(**{k: v.cpu()[chosen] for k, v in view.items()}) for b, view in views.items()},
        dispatch_BPEC={block: kept(routing.dispatch_GSEC) for block, routing in soft.items()},
        combine_BPEC={block: kept(routing.combine_GSEC) for block, routing in soft.items()},
        phi_NN={block: cosines.cpu() for block, cosines in phi.items() if cosines is not None},
        discarded=tuple(discard(model, batch, setting, chosen) for setting in settings),
    )


def pick(label_B: Sequence[int], count: int) -> list[int]:
    """Positions of `count` images: the first image of every class, then the rest, in their order."""
    firsts = sorted({label: i for i, label in reversed(list(enumerate(label_B)))}.values())
    rest = [i for i in range(len(label_B)) if i not in set(firsts)]
    return sorted((firsts + rest)[:count])


@torch.inference_mode()
def discard(model: ViT, batch: Batch, setting: RoutingOverrides, chosen: Sequence[int]) -> Discarded:
    """The patches that no expert sees at these settings, of the `chosen` images."""
    output = model(normalize(batch["image"]), batch.valid, routing_overrides=setting, return_routings=True)
    patch_BP = {
        block: view_of(routing, model.config, batch.valid).discarded_BP().cpu()
        for block, routing in zip(model.config.moe_blocks(), output.routings, strict=True)
    }
    return Discarded(
        setting=setting,
        patch_BP={block: patch[chosen] for block, patch in patch_BP.items()},
        frac={block: float(patch.double().mean()) for block, patch in patch_BP.items()},
    )


def discards(router: object) -> bool:
    """Whether the router may discard patches. Soft routers and mixtures have room for all."""
    return isinstance(router, TokenChoiceConfig | ExpertChoiceConfig)


def capacity_settings(
    config: ViTConfig, capacities: Iterable[float]
) -> tuple[list[RoutingOverrides], list[str]]:
    """Each possible capacity, with and without priority where the router has it, and why others are not."""
    assert config.moe
    router = config.moe.router
    settings, refused = [], []
    for capacity in sorted(capacities):
        setting = RoutingOverrides(capacity_factor=capacity)
        try:
            replace(config, moe=replace(config.moe, router=setting.apply(router)))  # checks the slots
        except ValueError as error:
            refused.append(f"capacity {capacity:g}: {error}")
            continue
        if isinstance(router, TokenChoiceConfig):
            priority = "max" if router.priority == "none" else router.priority
            settings += [replace(setting, priority=order) for order in ("none", priority)]
        else:
            settings.append(setting)
    return settings, refused


def whitened(image_B3HW: Tensor, patch_BP: Tensor) -> Tensor:
    """The uint8 images with these patches white, and nothing else changed."""
    grid = round(patch_BP.shape[1] ** 0.5)
    side = image_B3HW.shape[-1] // grid
    pixel_B1HW = patch_BP.unflatten(1, (1, grid, grid)).repeat_interleave(side, 2).repeat_interleave(side, 3)
    return image_B3HW.masked_fill(pixel_B1HW, 255)
