"""Collects how the routers of a trained model decide: counted over a stream of images, and on a few of them.

Of the stream only sums are kept, so memory does not grow with the number of images. Groups become images
again; class tokens and padding images count nowhere. Of an image with several labels, the first is its class.
P: patches of an image.

Source: V-MoE (Riquelme et al. 2021), sections 2.3 and 5, figure 4, appendices D and E; Soft MoE (Puigcerver
et al. 2023), section 6 and appendices B, G and I; Implicit Bias in Soft MoE (Chung et al. 2024), section
4.4.1.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe import CapacityConfig, RoutingOverrides, TokenChoiceConfig, ViT, ViTConfig
from moe.init import mix, split
from moe.overrides import AS_TRAINED
from moe.routers.soft import SoftRouter
from moe.routing import DenseRouting, GatherRouting, Routing, SoftRouting
from moe.rows import RowsRouting
from orchestrator.data.batch import Batch, normalize
from orchestrator.evaluation.scores import refuse_not_finite
from orchestrator.tasks.base import not_finite

BINS = 50  # of the histogram of weights, which lie in 0..1
SIGMAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
EMPTY = torch.zeros(0)


@dataclass(frozen=True, kw_only=True)
class RoutingView:
    """How a MoE layer routes the patches of B images."""

    gate_BPE: Tensor  # share of each expert before any dropping; sums to 1 over E, or to 0 if no gate is open
    seat_BPE: Tensor  # whether the expert sees the patch
    weight_BPE: Tensor  # of the expert's output in the patch's sum; 0 without a seat

    def experts_BP(self) -> Tensor:
        """Returns the number of experts that see each patch."""
        return self.seat_BPE.sum(-1)

    def discarded_BP(self) -> Tensor:
        """Whether no expert sees the patch, so that it passes the layer by its skip connection alone."""
        return ~self.seat_BPE.any(-1)

    def best_BP(self) -> Tensor:
        """The expert of the largest weight in the patch's sum; -1 for discarded patches."""
        return self.weight_BPE.masked_fill(~self.seat_BPE, -1).argmax(-1).masked_fill(self.discarded_BP(), -1)


def view_of(routing: Routing, config: ViTConfig, valid_B: Tensor) -> RoutingView:
    """The routing of the images that are 1 in `valid_B`."""
    weight_GSE, seat_GSE = seated(routing)
    return RoutingView(
        gate_BPE=patches(routing.gates_GSE, config, valid_B),
        seat_BPE=patches(seat_GSE, config, valid_B),
        weight_BPE=patches(weight_GSE, config, valid_B),
    )


def patches(x_GS: Tensor, config: ViTConfig, valid_B: Tensor) -> Tensor:
    """(G, S, ..) -> (B, P, ..): whole images again, without class tokens and padding images."""
    tokens = x_GS.reshape(-1, config.tokens(), *x_GS.shape[2:])
    return tokens[valid_B.bool(), -(config.grid() ** 2) :]


def seated(routing: Routing) -> tuple[Tensor, Tensor]:
    """(G, S, E) twice: each expert's weight in each token's sum, and whether the expert sees the token."""
    if isinstance(routing, GatherRouting):
        G, S, E = routing.gates_GSE.shape
        token_GCE = routing.token_GEC.transpose(1, 2)
        weight_GSE = routing.weight_GEC.new_zeros(G, S + 1, E)  # row S takes the empty slots
        weight_GSE = weight_GSE.scatter(1, token_GCE, routing.weight_GEC.transpose(1, 2))
        seat_GSE = torch.zeros_like(weight_GSE, dtype=torch.bool).scatter(1, token_GCE, True)
        return weight_GSE[:, :S], seat_GSE[:, :S]
    if isinstance(routing, RowsRouting):
        weight_GSE = torch.zeros_like(routing.gates_GSE).scatter(-1, routing.expert_GSK, routing.weight_GSK)
        return weight_GSE, torch.zeros_like(weight_GSE, dtype=torch.bool).scatter(
            -1, routing.expert_GSK, True
        )
    if isinstance(routing, SoftRouting):
        return routing.combine_GSEC.sum(-1), (routing.dispatch_GSEC > 0).any(-1)
    assert isinstance(routing, DenseRouting)
    return routing.weight_GSE, torch.ones_like(routing.weight_GSE, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over images for a single MoE layer. The counts of several batches add up."""

    images: Tensor
    class_expert: Tensor  # (classes, E), gates summed over the patches of the class
    position_expert: Tensor  # (P, E), gates summed over images
    experts: Tensor  # (E + 1,), number of patches that 0, 1, .. E experts see
    weights: Tensor  # (BINS,), number of seats by the weight of the expert's output
    weight_sum: Tensor
    contribution: Tensor = EMPTY  # |moe(x)| / |x|, mean over an image's patches; x is the residual stream
    correct: Tensor = EMPTY  # images classified correctly as trained
    correct_random: Tensor = EMPTY  # the same with random logits in place of this router's
    flips: Tensor = EMPTY  # (SIGMAS,), shares of choices that noise changes, if the router has noise
    # Of soft routers, summed over groups: cosines between the dispatch weights of two slots; (2, 3), least,
    # mean and largest cosine of different slots' dispatch weights and of different tokens' combine weights.
    slots_NN: Tensor = EMPTY
    cosines: Tensor = EMPTY
    groups: Tensor = EMPTY  # that have valid tokens

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def mean_by_class(self) -> Tensor:
        """(classes, E): mean routing weight of the class's patches; 0 for a class without images."""
        return self.class_expert / self.class_expert.sum(1, keepdim=True).clamp(min=1e-30)

    def mean_by_position(self) -> Tensor:
        """(P, E): mean routing weight at each place of the image."""
        return self.position_expert / self.position_expert.sum(1, keepdim=True)

    def experts_frac(self) -> Tensor:
        """(E + 1,): share of the patches that 0, 1, .. E experts see; the first are discarded."""
        return self.experts / self.experts.sum()

    def weights_frac(self) -> Tensor:
        """(BINS,): share of the seats in each bin of weights."""
        return self.weights / self.weights.sum().clamp(min=1)

    def mean_weight(self) -> float:
        """Mean weight of a seat."""
        return float(self.weight_sum / self.weights.sum().clamp(min=1))


@contextmanager
def activation_hooks(model: ViT, modules: Iterable[str]) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Maps each module's name to its inputs and output in the newest forward pass."""
    seen: dict[str, tuple[Any, Any]] = {}
    with ExitStack() as stack:
        for name in modules:

            def record(_: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                seen[name] = inputs, output

            stack.callback(model.get_submodule(name).register_forward_hook(record).remove)
        yield seen


@torch.inference_mode()
def collect(
    model: ViT,
    batches: Iterable[Batch],
    *,
    blocks: Sequence[int],
    classes: int,
    progress: Callable[[int], None],
) -> dict[int, Counts]:
    """The counts by block. `progress` is called after each batch with the number of images so far."""
    totals: dict[int, Counts] = {}
    modules = [f"blocks.{block}.{part}" for block in blocks for part in ("norm2", "mlp", "mlp.router")]
    with activation_hooks(model, modules) as seen:
        for batch in batches:
            if not batch.valid.any():
                continue
            correct = _correct(model, batch)
            fields_of = {block: _count_layer(model, batch, block, seen, classes) for block in blocks}
            for block, found in fields_of.items():
                # The random pass comes last, because it overwrites what the hooks have seen.
                random = _correct(model, batch, RoutingOverrides(random_blocks=(block,)))
                found |= {"correct": correct, "correct_random": random}
                counts = Counts(**{name: value.cpu() for name, value in found.items()})
                totals[block] = totals[block] + counts if block in totals else counts
            progress(int(totals[blocks[0]].images))
    return totals


def _correct(model: ViT, batch: Batch, overrides: RoutingOverrides = AS_TRAINED) -> Tensor:
    """The number of images that are classified correctly. Raises UsageError for logits that are not
    finite.
    """
    logits = model(normalize(batch["image"]), batch.valid, routing_overrides=overrides).logits
    refuse_not_finite(int(not_finite({"logits": logits}, batch)), int(batch.valid.sum()))
    return ((logits.argmax(-1) == batch["label"][:, 0]) * batch.valid).sum()


def _count_layer(
    model: ViT, batch: Batch, block: int, seen: dict[str, tuple[Any, Any]], classes: int
) -> dict[str, Tensor]:
    router, valid = model.get_submodule(f"blocks.{block}.mlp.router"), batch.valid
    (residual_BSD,), _ = seen[f"blocks.{block}.norm2"]
    _, (experts_BSD, _) = seen[f"blocks.{block}.mlp"]
    if (scale_D := model.get_submodule(f"blocks.{block}").scale2_D) is not None:
        experts_BSD = experts_BSD * scale_D
    (x_GSD, valid_GS, *_), routing = seen[f"blocks.{block}.mlp.router"]
    found = count(view_of(routing, model.config, valid), batch["label"][:, 0][valid.bool()], classes=classes)
    ratio_BS = experts_BSD.norm(dim=-1) / residual_BSD.norm(dim=-1).clamp(min=1e-30)
    found["contribution"] = patches(ratio_BS, model.config, valid).double().mean(1).sum()
    if hasattr(router.config, "noise_std"):
        shares = flip_fracs(router, x_GSD, valid_GS, batch.key, block=block)
        found["flips"] = shares * valid.sum().double()
    if isinstance(routing, SoftRouting):
        found |= count_slots(routing, valid_GS)
    return found


def count(view: RoutingView, label_B: Tensor, *, classes: int) -> dict[str, Tensor]:
    """The fields of `Counts` about patches, in float64, which holds whole numbers exactly."""
    gate_BPE = view.gate_BPE.double()
    E = gate_BPE.shape[-1]
    weight = view.weight_BPE[view.seat_BPE].double()
    return {
        "images": gate_BPE.new_tensor(len(gate_BPE)),
        "class_expert": gate_BPE.new_zeros(classes, E).index_add(0, label_B, gate_BPE.sum(1)),
        "position_expert": gate_BPE.sum(0),
        "experts": torch.bincount(view.experts_BP().flatten(), minlength=E + 1).double(),
        "weights": torch.bincount((weight * BINS).long().clamp(0, BINS - 1), minlength=BINS).double(),
        "weight_sum": weight.sum(),
    }


def mutual_information(mass: Tensor) -> float:
    """The mutual information in nats between the row and the column of a table of non-negative mass.

    It is 0 if experts are independent of the class, and ln(classes) if each class has experts of its own.
    """
    joint = mass.double() / mass.sum()
    product = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    ratio = torch.where(joint > 0, joint / product.clamp(min=1e-300), 1.0)
    return float((joint * ratio.log()).sum())


def flip_fracs(router: nn.Module, x_GSD: Tensor, valid_GS: Tensor, key_B: Tensor, *, block: int) -> Tensor:
    """(SIGMAS,): the share of choices that noise of each `noise_std` changes, mean over groups.

    A choice is an expert that a token takes (token choice) or a token that an expert takes (expert choice);
    for soft routers it is the expert of the largest weight in a token's combination. Only this layer has
    noise. V-MoE, section 2.3.
    """
    keys_GS = split(mix(key_B, block), valid_GS.numel() // len(key_B)).view(valid_GS.shape)
    best_GS = router(x_GSD, valid_GS, None, AS_TRAINED).gates_GSE.argmax(-1)
    shares = []
    for sigma in SIGMAS:
        noisy = copy.copy(router)  # shares the weights
        noisy.config = replace(router.config, noise_std=sigma)  # pyright: ignore[reportArgumentType]
        routing = noisy(x_GSD, valid_GS, keys_GS, AS_TRAINED)
        changed_GS = (best_GS != routing.gates_GSE.argmax(-1)) * valid_GS
        soft = isinstance(router, SoftRouter)
        shares.append(changed_GS.sum() / valid_GS.sum() if soft else routing.stats["flip_frac"])
    return torch.stack(shares).double()


def count_slots(routing: SoftRouting, valid_GS: Tensor) -> dict[str, Tensor]:
    """The fields of `Counts` about slots, group by group, because N x N matrices of all would not fit."""
    N, groups = routing.dispatch_GSEC[0, 0].numel(), valid_GS.any(1).nonzero().flatten().tolist()
    slots_NN = valid_GS.new_zeros(N, N, dtype=torch.float64)
    cosines = valid_GS.new_zeros(2, 3, dtype=torch.float64)
    for g in groups:
        valid_S = valid_GS[g].bool()
        group_NN = cosine(routing.dispatch_GSEC[g, valid_S].flatten(1).T)
        tokens_SS = cosine(routing.combine_GSEC[g, valid_S].flatten(1))
        slots_NN += group_NN
        cosines += torch.stack([extremes(group_NN), extremes(tokens_SS)])
    return {"slots_NN": slots_NN, "cosines": cosines, "groups": torch.tensor(len(groups))}


def parameter_cosines(router: nn.Module) -> Tensor | None:
    """(N, N) between the slots' parameters, the columns of Phi; None for a router that learns no slots."""
    if not isinstance(router, SoftRouter) or not router.config.learned():
        return None
    return cosine(router.phi_DEC.detach().flatten(1).T)


def cosine(vectors_ND: Tensor) -> Tensor:
    """(N, N) cosines; 0 with a vector of zeros."""
    unit_ND = F.normalize(vectors_ND.double(), dim=1)
    return unit_ND @ unit_ND.T


def extremes(cosine_NN: Tensor) -> Tensor:
    """(3,): least, mean and largest cosine of two different vectors; NaN if there is only one."""
    N = len(cosine_NN)
    if N == 1:
        return cosine_NN.new_full((3,), torch.nan)
    pairs = cosine_NN[~torch.eye(N, dtype=torch.bool, device=cosine_NN.device)]
    return torch.stack([pairs.amin(), pairs.mean(), pairs.amax()])


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
    return isinstance(router, CapacityConfig)


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
