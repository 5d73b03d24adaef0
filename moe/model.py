"""The contract of models: a config that answers for the model, and a module of units.

A model is a file that defines both. It joins by being imported: in `moe.models`, or anywhere before its kind
is named.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from moe.config import Family, PositiveInt
from moe.experts import is_expert
from moe.init import init_weights, set_unsaved
from moe.layer import MoEConfig, MoELayer, filled
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routing import Router, RouterConfig, Routing, RoutingInput


class Activations(NamedTuple):
    """The bytes of activations per image in training.

    saved: what autograd keeps for the backward pass: outside of the units, then for each unit.
    stream: what a unit passes to the next one. widest: the largest tensor within a unit.
    """

    saved: list[float]
    stream: float
    widest: float


class Costs(NamedTuple):
    """The costs of one image.

    macs: multiply-adds of a forward pass, by part. Measured parts are ``router``, ``experts``, ``shared`` and
        ``dispatch_combine`` of all MoE layers, and the rest by the names of the model's children.
    largest: multiply-adds of the largest matmul or convolution.
    activations: of a training step.
    """

    macs: dict[str, float]
    largest: float
    activations: Activations


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Family, ABC, default="vit"):
    """The settings of a model, and what others need to know of it before it is built.

    Attributes:
        moe: the MoE layers, a field of models that may have them; None for a dense model.
        gives: heads of the model's output.
        starts_from: prefix of the tensors that a model of another kind can be the start of; empty: all.
    """

    moe = cast(MoEConfig | None, None)  # has no annotation, so it is no field here
    gives: ClassVar[tuple[str, ...]] = ("logits",)
    starts_from: ClassVar[str] = ""

    @property
    def head(self) -> str:
        """The name of the submodule whose input is an image's representation."""
        return "head"

    @property
    def causal(self) -> bool:
        """Whether the output at a token must not depend on later tokens."""
        return False

    @property
    def whole_batch(self) -> bool:
        """Whether in training an image's output depends on the batch, as with batch norm, so that a batch
        cannot be split into microbatches.
        """
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()
        if self.moe:
            tokens, experts = self.tokens() * self.moe.images_per_group, self.moe.num_experts
            for router in (self.moe.router, self.moe.router.eval_config()):
                self.slots(router)
                if self.causal and (why := router.leaks_future(num_tokens=tokens, num_experts=experts)):
                    raise ValueError(f"the model is causal, and its router ({router.kind}) is not: {why}")

    @abstractmethod
    def build(self, *, seed: int | None = 0) -> "Model":
        """Returns the model with weights drawn from `seed`; without a seed they are not set."""

    @abstractmethod
    def tokens(self) -> int:
        """Returns the number of tokens of an image that a MoE layer routes."""

    @abstractmethod
    def size(self) -> str:
        """Returns the size in a word, the same for models that differ only in their experts or classes."""

    @abstractmethod
    def example(self, count: int) -> Tensor:
        """Returns an input of so many samples without values, on the default device."""

    def image_side(self) -> int:
        """Returns the pixels per side of the images that the model reads; 0 if it reads none."""
        return 0

    def num_outputs(self) -> int:
        """Returns the number of classes that the head `logits` tells apart; 0 if there is no such head."""
        return 0

    @classmethod
    def for_classes(cls, count: int) -> dict[str, int]:
        """Returns the fields of a model of data with so many classes."""
        return {}

    @classmethod
    def published(cls, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Self, Mapping[str, str]] | None:
        """Returns the model whose weights others published as tensors of these names and shapes, and the name
        there of each of its tensors: ours -> theirs. None: they are not of this kind.
        """
        return None

    def check(self) -> None:
        """Raises ValueError for fields that do not fit each other."""

    def check_inputs(self, inputs: Tensor) -> None:
        """Raises ValueError for inputs of another shape than the model's."""

    @property
    def images_per_group(self) -> int:
        """The number of images that are routed together; 1 for a dense model."""
        return self.moe.images_per_group if self.moe else 1

    def moe_blocks(self) -> tuple[int, ...]:
        """Returns the indices of the units with MoE layers, by default those that have experts."""
        return tuple(i for i, shapes in enumerate(unit_shapes(self)[1:]) if any(map(is_expert, shapes)))

    def costs(
        self, overrides: RoutingOverrides = AS_TRAINED, *, number: int = 4, frozen: Sequence[str] = ()
    ) -> "Costs | None":
        """Returns the costs of one image by formulas; None: `moe.cost.model_costs` measures them.

        Args:
            number: bytes of a number outside of routers, which compute in float32.
            frozen: prefixes of tensors that are not trained. A model that computes a part of itself without
                gradients if all of it is frozen keeps nothing for it; others need not look.

        Raises ValueError if the router refuses the overrides.
        """
        return None

    def family(self) -> str:
        """Returns the routing algorithm, ``dense`` without experts."""
        return self.moe.router.family() if self.moe else "dense"

    def slots(self, router: RouterConfig | None = None) -> float:
        """Returns C, the slots per expert and group of a MoE layer, here or with another router; 0 if there
        is none.
        """
        if not self.moe:
            return 0
        group = self.tokens() * self.moe.images_per_group
        return (router or self.moe.router).slots(num_tokens=group, num_experts=self.moe.num_experts)

    def expert_rows(self, overrides: RoutingOverrides = AS_TRAINED) -> float:
        """Returns the number of rows that the experts of a MoE layer compute per image."""
        config = self.at_point(overrides)
        assert config.moe
        return overrides.num_kept(config.moe.num_experts) * config.slots() / config.moe.images_per_group

    def at_point(self, overrides: RoutingOverrides) -> Self:
        """Returns the config with the overrides of k, capacity, priority and images per group. Raises
        ValueError if there is no such setting, or its value is refused.
        """
        return self.with_moe(self.moe.at_point(overrides)) if self.moe else self

    def with_moe(self, moe: MoEConfig) -> Self:
        """Returns the config with other MoE layers; it has some."""
        return replace(self, moe=moe)

    def check_overrides(self, overrides: RoutingOverrides) -> None:
        """Raises ValueError if there is no routing to override, or `random_blocks` are not MoE blocks."""
        if overrides == AS_TRAINED:
            return
        if not self.moe:
            raise ValueError("a dense model has no routing to override")
        blocks = self.moe_blocks()
        if dense := sorted(set(overrides.random_blocks).difference(blocks)):
            raise ValueError(
                f"random_blocks={dense} are not MoE blocks; the MoE blocks of this model are {blocks}"
            )


@dataclass(frozen=True, kw_only=True)
class ImageModelConfig(ModelConfig):
    """The settings of a model that classifies images.

    Attributes:
        image_size: pixels of an image's side.
        num_classes: outputs of the head; commands take the number of classes of the data.
    """

    image_size: PositiveInt = 224
    num_classes: PositiveInt = 1000

    def example(self, count: int) -> Tensor:
        return torch.empty(count, 3, self.image_size, self.image_size)

    def image_side(self) -> int:
        return self.image_size

    def num_outputs(self) -> int:
        return self.num_classes

    @classmethod
    def for_classes(cls, count: int) -> dict[str, int]:
        return {"num_classes": count}

    def check_inputs(self, inputs: Tensor) -> None:
        if inputs.shape[1:] != (3, self.image_size, self.image_size):
            raise ValueError(
                f"images are {tuple(inputs.shape)}, and the model takes (B, 3, {self.image_size},"
                f" {self.image_size}): resize them, or give the model another image_size"
            )


class Output(NamedTuple):
    """The output of a forward pass.

    Attributes:
        heads: name -> (B, ..) float32; a classifier has ``logits``, (B, num_classes).
        aux: scalar, the routers' auxiliary losses: mean over groups, sum over layers.
        stats: routing statistics, name -> (MoE layers,), or (MoE layers, E) of those per expert; detached;
            empty unless requested.
        routings: one routing per MoE layer if requested, else ().
    """

    heads: dict[str, Tensor]
    aux: Tensor
    stats: dict[str, Tensor]
    routings: tuple[Routing, ...]

    @property
    def logits(self) -> Tensor:
        return self.heads["logits"]


class UnitOutput(NamedTuple):
    """The output of a unit: x, and of its MoE layer the auxiliary loss, statistics and routing if requested,
    and what its router counted.

    All but the routing are plain tensors, which FSDP hooks and activation checkpointing need.
    """

    x: Tensor
    aux: Tensor
    stats: dict[str, Tensor]
    routing: Routing | None
    counts: Tensor | None = None


def without_experts(x: Tensor) -> UnitOutput:
    """Returns the output of a unit that has no MoE layer."""
    return UnitOutput(x, x.new_zeros((), dtype=torch.float32), {}, None)


def with_experts(x: Tensor, routed: Routing, routing: RoutingInput) -> UnitOutput:
    """Returns the output of a unit whose MoE layer has routed so."""
    returned = routed if routing.routings else None
    return UnitOutput(x, routed.aux_G.mean(), dict(routed.stats), returned, routed.counts)


C = TypeVar("C", bound=ModelConfig)


class Model(nn.Module, ABC, Generic[C]):
    """A model with weights drawn from `seed`. Without a seed they are not set, for a checkpoint to fill or
    `moe.parallel.set_weights` to draw; nor are they on the meta device.
    """

    def __init__(self, config: C, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        torch.backends.cudnn.allow_tf32 = False  # of convolutions; matmuls have it off by default
        device = torch.get_default_device()
        # On the meta device torch's layers do not draw weights from the global generator.
        with torch.device("meta"):
            self.add_layers()
        if device.type != "meta":
            self.to_empty(device=device)
            if seed is not None:
                init_weights(self, seed)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Moves all tensors to `device` without their values, and sets the buffers that checkpoints do not
        hold (`moe.init.set_unsaved`)."""
        super().to_empty(device=device, recurse=recurse)
        set_unsaved(self)
        return self

    # Names of methods beside `forward` for which a sharded module gathers its weights; units may have it too.
    computes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def add_layers(self) -> None:
        """Makes the layers that `config` describes, as other modules do in their constructor."""

    @abstractmethod
    def units(self) -> Sequence[nn.Module]:
        """Returns the blocks in their order: each is sharded, compiled and recomputed as a whole.

        A unit has ``forward(x, routing: RoutingInput) -> UnitOutput``.
        """

    def layers_above(self) -> dict[str, int]:
        """Returns for each parameter how many layers follow it, for rates by layer: none the head, one the
        last unit and the norm behind it, and all units and the head what comes before them. By default, that
        is what is made before the first unit.
        """
        units, found, before = self.units(), dict[str, int](), True
        of_unit = {param: len(units) - i for i, unit in enumerate(units) for param in unit.parameters()}
        for name, param in self.named_parameters():
            before = before and param not in of_unit
            found[name] = of_unit.get(param, len(units) + 1 if before else int(name.startswith("norm.")))
        return found

    def freeze(self, *prefixes: str) -> None:
        """Keeps the parameters whose names begin so as they are: they have no gradient and no optimiser.
        Routers of such names keep their state too. A star in a prefix stands for any text.
        """
        for name, param in self.named_parameters():
            if begins_so(name, prefixes):
                param.requires_grad_(False)
        for name, module in self.named_modules():
            if isinstance(module, Router) and begins_so(f"{name}.", prefixes):
                module.frozen = True

    def forward(
        self,
        images: Tensor,
        valid_B: Tensor | None = None,
        keys_B: Tensor | None = None,
        routing_overrides: RoutingOverrides = AS_TRAINED,
        return_stats: bool = False,
        return_routings: bool = False,
    ) -> Output:
        """Classifies images (B, 3, H, W) in -1..1; an incomplete last routing group is padded.

        Args:
            valid_B: 0 for padding images, which take no capacity, else 1; None: all are valid.
            keys_B: int64 seeds of router noise and dropout; None, as in evaluation, turns both off.

        Raises ValueError if an override names a block without experts, or the router refuses its value.
        """
        routing = RoutingInput(valid_B, keys_B, routing_overrides, return_stats, return_routings)
        return self.output(images, routing)

    @abstractmethod
    def output(self, images: Tensor, routing: RoutingInput) -> Output:
        """Computes what `forward` returns."""

    def features(
        self,
        images: Tensor,
        valid_B: Tensor | None = None,
        routing_overrides: RoutingOverrides = AS_TRAINED,
    ) -> Tensor:
        """Returns the head's input: (B, 3, H, W) in -1..1 -> (B, D).

        Raises ValueError as a forward pass does.
        """
        found: list[Tensor] = []
        head = self.get_submodule(self.config.head)
        handle = head.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
        try:
            self(images, valid_B, routing_overrides=routing_overrides)
        finally:
            handle.remove()
        return found[0]

    @torch.no_grad()
    def at_points(
        self, images: Tensor, valid_B: Tensor | None, points: Sequence[RoutingOverrides]
    ) -> list[dict[str, Tensor]]:
        """Returns the heads of a forward pass at each operating point. Raises ValueError as they do."""
        return [self(images, valid_B, routing_overrides=point).heads for point in points]

    def whole_groups(self, images: Tensor, routing: RoutingInput) -> tuple[Tensor, RoutingInput]:
        """Pads images, mask and keys to whole routing groups; the mask is not None then. Raises ValueError
        for images of another shape.
        """
        self.config.check_inputs(images)
        valid_B, keys_B, overrides, *_ = routing
        if valid_B is None:
            dtype = images.dtype if images.is_floating_point() else torch.float32
            valid_B = images.new_ones(images.shape[0], dtype=dtype)
        group = overrides.images_per_group or self.config.images_per_group
        # In exported graphs, whose number of images is free, this is no branch.
        if group > 1 and (torch.compiler.is_exporting() or images.shape[0] % group):
            images, valid_B = filled(images, group), filled(valid_B, group)
            keys_B = None if keys_B is None else filled(keys_B, group)
        return images, routing._replace(valid=valid_B, keys=keys_B)

    def through(
        self, x: Tensor, routing: RoutingInput
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], tuple[Routing, ...]]:
        """Runs all units. Returns the last one's x, and what `Output` has after its heads."""
        self.config.check_overrides(routing.overrides)
        aux, layers, routings = x.new_zeros((), dtype=torch.float32), [], []
        for unit in self.units():
            x, unit_aux, stats, routed, counts = unit(x, routing)
            aux = aux + unit_aux
            # Here, and not in the unit, which is compiled, and recomputed in the backward pass.
            if counts is not None and torch.is_grad_enabled() and routing.overrides == AS_TRAINED:
                (layer,) = find_moe_layers(unit)
                layer.router.count(counts)
            if stats:
                layers.append(stats)
            if routed:
                routings.append(routed)
        names = layers[0] if layers else ()
        return x, aux, {n: torch.stack([layer[n] for layer in layers]) for n in names}, tuple(routings)


def begins_so(name: str, prefixes: Iterable[str]) -> bool:
    """Returns whether a name begins with one of the prefixes, in which a star stands for any text."""
    return any(fnmatchcase(name, f"{prefix}*") for prefix in prefixes)


def find_moe_layers(module: nn.Module) -> list[MoELayer]:
    """Returns the MoE layers within a module."""
    return [layer for layer in module.modules() if isinstance(layer, MoELayer)]


@cache
def unit_shapes(config: ModelConfig) -> Sequence[Mapping[str, torch.Size]]:
    """Shapes by parameter name, read from a model on the meta device: outside of its units, then of each."""
    with torch.device("meta"):
        model = config.build(seed=None)
    unit_of = {param: i for i, unit in enumerate(model.units(), start=1) for param in unit.parameters()}
    found: list[dict[str, torch.Size]] = [{} for _ in range(1 + len(model.units()))]
    for name, param in model.named_parameters():
        found[unit_of.get(param, 0)][name] = param.shape
    return found
