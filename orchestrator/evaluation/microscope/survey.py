"""All measurements over a stream of images in one go: sums are kept, images and routings are not."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.overrides import RoutingOverrides
from moe.routing import Routing, SoftRouting
from moe.vit import ViT
from orchestrator.data.batch import Batch
from orchestrator.data.images import normalize
from orchestrator.evaluation.microscope.noise import SIGMAS, flips, has_noise
from orchestrator.evaluation.microscope.slots import SlotSums, parameter_cosines, slot_sums
from orchestrator.evaluation.microscope.tally import Tally, mutual_information, tally
from orchestrator.evaluation.microscope.taps import Tap, tapped
from orchestrator.evaluation.microscope.views import patches, view_of


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What was seen of one MoE layer. Attributes:
    contribution: mean over patches of |moe(x)| / |x|.
    acc_random: accuracy@1 with random logits in place of this router's.
    flips: share of choices that noise changes, by sigma; None for routers without noise.
    slots, parameters: similarity of slots, and of their parameters (N, N); None for routers without.
    """

    block: int
    tally: Tally
    contribution: float
    acc_random: float
    flips: tuple[float, ...] | None
    slots: SlotSums | None
    parameters: Tensor | None

    def mutual_information(self) -> float:
        """Nats between a patch's expert and the class of its image."""
        return mutual_information(self.tally.class_expert)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Attributes:
    acc: accuracy@1 as trained.
    sigmas: of the noise.
    """

    images: int
    acc: float
    sigmas: tuple[float, ...]
    layers: tuple[Layer, ...]


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Of one layer, over images. Attributes:
    contribution: of the images' means over patches.
    flips: weighted by images.
    right: images classified rightly although this router was random.
    """

    tally: Tally
    contribution: Tensor
    flips: Tensor | None
    slots: SlotSums | None
    right: Tensor

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            tally=self.tally + other.tally,
            contribution=self.contribution + other.contribution,
            flips=None if self.flips is None or other.flips is None else self.flips + other.flips,
            slots=None if self.slots is None or other.slots is None else self.slots + other.slots,
            right=self.right + other.right,
        )


@torch.inference_mode()
def survey(
    model: ViT,
    batches: Iterable[Batch],
    *,
    blocks: Sequence[int],
    classes: int,
    report: Callable[[int], None],
    sigmas: tuple[float, ...] = SIGMAS,
) -> Survey:
    """`report` hears after each batch how many images are done."""
    total: dict[int, _Sums] = {}
    images, right = 0, torch.zeros(())
    with tapped(model, blocks) as taps:
        for batch in batches:
            if not batch.valid.any():
                continue
            found, sums = _of_batch(model, batch, taps, classes=classes, sigmas=sigmas)
            total = {i: total[i] + part for i, part in sums.items()} if total else sums
            right = right + found.cpu()
            images += int(batch.valid.sum())
            report(images)
    return Survey(
        images=images,
        acc=float(right) / images,
        sigmas=sigmas,
        layers=tuple(_layer(model, block, sums, images) for block, sums in total.items()),
    )


def _of_batch(
    model: ViT, batch: Batch, taps: dict[int, Tap], *, classes: int, sigmas: tuple[float, ...]
) -> tuple[Tensor, dict[int, _Sums]]:
    """Images that are classified rightly, and what is summed by block."""
    pixels, valid = normalize(batch.image), batch.valid

    def right(logits: Tensor) -> Tensor:
        return ((logits.argmax(-1) == batch.label) * valid).sum()

    output = model(pixels, valid, return_routings=True)
    routings = dict(zip(model.config.moe_blocks(), output.routings, strict=True))
    sums = {}
    # all that the taps hold is read before the model runs again
    seen = {i: _of_layer(model, batch, i, tap, routings[i], classes, sigmas) for i, tap in taps.items()}
    for block, (counted, contribution, flip, slots) in seen.items():
        random = model(pixels, valid, routing_overrides=RoutingOverrides(random_blocks=(block,)))
        sums[block] = _Sums(
            tally=counted, contribution=contribution, flips=flip, slots=slots, right=right(random.logits)
        )
    return right(output.logits), sums


def _of_layer(
    model: ViT,
    batch: Batch,
    block: int,
    tap: Tap,
    routing: Routing,
    classes: int,
    sigmas: tuple[float, ...],
) -> tuple[Tally, Tensor, Tensor | None, SlotSums | None]:
    router, valid = router_of(model, block), batch.valid
    view = view_of(routing, model.config, valid)
    contribution_BP = patches(tap.contribution_BS(), model.config, valid)
    flip = None
    if has_noise(router):
        share = flips(router, tap.router_GSD, tap.valid_GS, batch.key, block=block, sigmas=sigmas)
        flip = share * valid.sum().double()
    return (
        tally(view, batch.label[valid.bool()], classes=classes),
        contribution_BP.double().mean(1).sum(),
        flip,
        slot_sums(routing, tap.valid_GS) if isinstance(routing, SoftRouting) else None,
    )


def router_of(model: ViT, block: int) -> nn.Module:
    return model.get_submodule(f"blocks.{block}.mlp.router")


def _layer(model: ViT, block: int, sums: _Sums, images: int) -> Layer:
    parameters = parameter_cosines(router_of(model, block))
    return Layer(
        block=block,
        tally=sums.tally.cpu(),
        contribution=float(sums.contribution) / images,
        acc_random=float(sums.right) / images,
        flips=None if sums.flips is None else tuple((sums.flips / images).tolist()),
        slots=None if sums.slots is None else sums.slots.cpu(),
        parameters=None if parameters is None else parameters.cpu(),
    )
