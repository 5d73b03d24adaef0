"""The contract between routers and the MoE layer: what a router's config answers, what its module returns.

A `Routing` turns tokens into a static, expert-major buffer of slots and back again:

    x_GSD --dispatch--> x_END --experts--> y_END --combine--> y_GSD

Dimensions used in `moe/`:
    B images   G groups routed on their own   S tokens per group   D model width   F hidden width   H heads
    E experts   C slots per expert and group   K experts per token, or of a subset   N = G*C slots per expert
    M rows of any number per expert   R ranks

Source: one formula for all routers, Liu et al. 2024, "Routers in Vision MoE", eq. 2 and 5.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from moe.config import Family
from moe.init import Draw, split
from moe.overrides import AS_TRAINED, RoutingOverrides


class RoutingInput(NamedTuple):
    """The arguments of `Model.forward` after images, as a forward pass hands them to its units.

    A tuple, within which FSDP casts tensors as it does those of other arguments.

    Attributes:
        valid: (B,), 0 for padding images, which take no capacity, else 1; None: all are valid.
        keys: (B,) int64 seeds of router noise and dropout; None, as in evaluation, turns both off.
        overrides: the operating point.
        stats, routings: whether the output has the routers' statistics, and their routings.
    """

    valid: Tensor | None = None
    keys: Tensor | None = None
    overrides: RoutingOverrides = AS_TRAINED
    stats: bool = False
    routings: bool = False


class LayerShape(NamedTuple):
    """Sizes of an MoE layer: S tokens per image, images per group, E experts, C slots per expert, width D."""

    tokens: int
    images: int
    experts: int
    slots: float
    dim: int

    def rows(self) -> float:
        """Rows that the experts compute per image."""
        return self.experts * self.slots / self.images


class Statistic(NamedTuple):
    """A number that says how a router routes. Reports have its mean over layers and experts.

    Attributes:
        per: what the run's table of routing (`orchestrator.training.routing_table`) has a row for, beside the
            mean: nothing, each ``layer``, or each ``expert`` of each layer. Its values are then (E,).
    """

    unit: str
    meaning: str
    per: Literal["", "layer", "expert"] = ""


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Family, ABC, default="token_choice"):
    """The settings of a router, and what others need to know of it before it is built.

    Attributes:
        described: the statistics of the router (`Routing.stats`) by name. A router that has more than those
            of `routing_stats` adds its own to them.
    """

    described: ClassVar[Mapping[str, Statistic]] = {
        "unchosen_frac": Statistic(
            "fraction", "tokens that choose no expert or that no expert chooses, before capacity"
        ),
        "dropped_frac": Statistic("fraction", "tokens in no slot, after capacity"),
        "load_mean": Statistic("tokens", "tokens per expert and routing group"),
        "load_cv": Statistic("-", "standard deviation of the experts' load, divided by its mean"),
        "load_min": Statistic("tokens", "load of the least used expert"),
        "load_max": Statistic("tokens", "load of the most used expert"),
        "max_violation": Statistic(
            "-", "load of the most used expert over the mean load of the routing group, less 1"
        ),
        "seats_mean": Statistic("slots", "slots that hold a token"),
        "seats_max": Statistic("slots", "the most slots that hold one token"),
        "gate_entropy_nats": Statistic("nats", "entropy of a token's gates over the experts"),
        "flip_frac": Statistic("fraction", "choices that router noise changed"),
        "transport_residual": Statistic("-", "largest violation of a transport plan's constraints"),
        "slot_similarity": Statistic("-", "mean cosine between the dispatch weights of two slots"),
        "bias_range": Statistic("-", "largest less smallest bias that balances the choices of experts"),
        "open_frac": Statistic("fraction", "experts that a token chooses or that choose it, before capacity"),
    }

    @property
    def can_overflow(self) -> bool:
        """Whether tokens choose their experts, which may have no slot for them."""
        return False

    @property
    def reads_keys(self) -> bool:
        """Whether the router reads the keys of tokens, which seed noise. They take some 25 kernels."""
        return True

    def family(self) -> str:
        """Returns the routing algorithm, as pages name it."""
        return self.kind

    @abstractmethod
    def build(self, *, dim: int, num_experts: int) -> "Router":
        """Returns the router; `init_weights` sets its weights by its `draws`."""

    @abstractmethod
    def slots(self, *, num_tokens: int, num_experts: int) -> float:
        """Returns C, the slots per expert in a group of `num_tokens`, or raises ValueError. Without
        slots, C is the mean number of rows of an expert."""

    def eval_config(self) -> Self:
        """Returns the config in evaluation mode, where capacity may differ from training."""
        return self

    def leaks_future(self, *, num_tokens: int, num_experts: int) -> str:
        """Returns why the output of a token may depend on later tokens of its group; empty if it never does.

        Auxiliary losses see the whole group; they are a signal of training, and no leak.
        """
        return f"a router of kind {self.kind!r} has not said that it is causal"

    def active_experts(self, num_experts: int) -> float:
        """Returns the number of experts that process a token, on average."""
        return num_experts

    def grid(self, num_experts: int) -> list[RoutingOverrides]:
        """Returns operating points worth trying in a trained model: by default subsets of experts."""
        powers = {2**power for power in range(num_experts.bit_length())}
        subsets = sorted({*powers, 3 * num_experts // 4})
        return [RoutingOverrides(experts=count) for count in subsets if count < num_experts]

    def gate_macs(self, layer: LayerShape) -> float:
        """Returns the multiply-adds per image that weigh experts: by default one matrix of D x E."""
        return layer.tokens * layer.dim * layer.experts

    def mix_macs(self, layer: LayerShape, kept: int) -> float:
        """Returns the multiply-adds of dispatch and combine per image, with `kept` experts combined: by
        default none, because gather and scatter only move tokens."""
        return 0

    def saved(self, layer: LayerShape) -> tuple[float, float]:
        """Returns the numbers that the layer keeps per image for the backward pass, beside the experts': rows
        of D in the compute dtype, and numbers in float32."""
        return 3 * layer.rows(), layer.tokens * layer.experts  # index_add keeps what it adds, for its shape


class Router(nn.Module, ABC):
    """A router's module.

    Its state that no gradient changes is in buffers, which are saved, replicated over ranks, and not rounded
    to less than float32. `before_step` and `after_batch` change it (`moe.router_state`).

    Attributes:
        counts: what passes of training counted since the last update, int64; None if the router counts
            nothing. A buffer that is not saved.
        frozen: whether training leaves the state as it is.
    """

    counts: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", None, persistent=False)
        self.frozen = False

    @abstractmethod
    def draws(self) -> dict[str, Draw]:
        """Returns the distribution of the initial values of each parameter and buffer."""

    def before_step(self, step: int) -> None:
        """Called before the first forward pass of update `step` of a training, which counts from 0."""

    def after_batch(self, routers: Sequence["Router"]) -> None:
        """Called after the last backward pass of an update and before the optimiser, if the router counts.

        routers: all of the model that count, this one among them; their `counts` are of the global batch.
        """

    def count(self, counts: Tensor) -> None:
        """Adds what a pass of training counted, `Routing.counts`, unless the router is frozen."""
        assert self.counts is not None
        if not self.frozen:
            self.counts += counts

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype.itemsize < torch.float32.itemsize:
                setattr(self, name, before[name].to(buffer.device))
        return self

    @abstractmethod
    def forward(
        self,
        x_GSD: Tensor,
        valid_GS: Tensor,
        keys_GS: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        random_GS: Tensor | None = None,
        return_stats: bool = True,
    ) -> "Routing":
        """Routes groups of S tokens.

        Args:
            valid_GS: 1 for tokens, 0 for padding, which gets no slot.
            keys_GS: seed random noise; None: there is none.
            overrides: settings of an operating point.
            random_GS: seeds random logits in place of learned ones, as a baseline.
            return_stats: whether the routing has `stats` and `load_GE`.
        """


@dataclass(frozen=True, kw_only=True)
class Routing(ABC):
    """The result of a router. All shapes are static in G, S, E and C.

    Attributes:
        gates_GSE: weight of each expert in each token's combination, before any token is dropped.
        aux_G: auxiliary loss of each group, weighted by the router's config; zeros if the router has none.
        load_GE: number of tokens that choose each expert (soft routing: mass assigned to it); detached. None
            if no statistics were requested.
        stats: what to log, with the names of `RouterConfig.described`: detached scalars, or (E,) of what
            is told per expert; none if they were not requested.
        kept_GE: boolean mask of the experts whose outputs are combined; None if all are.
        counts: what is added to the router's `counts` if this was a pass of training; None if it counts
            nothing.
        count_E: rows of each expert, if the experts have rows of any number; None: each has G*C slots.
    """

    gates_GSE: Tensor
    aux_G: Tensor
    load_GE: Tensor | None = None
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    kept_GE: Tensor | None = None
    counts: Tensor | None = None
    count_E: Tensor | None = None

    @abstractmethod
    def only(self, expert_GK: Tensor) -> Self:
        """Restricts the routing to K experts of each group.

        Its buffers are (K, G*C, D): block k holds, in the rows of group g, the slots of expert_GK[g, k].
        """

    @abstractmethod
    def dispatch(self, x_GSD: Tensor) -> Tensor:
        """Fills the slots: (G, S, D) -> (E, G*C, D)."""

    @abstractmethod
    def combine(self, y_END: Tensor) -> Tensor:
        """Mixes slot outputs back into tokens: (E, G*C, D) -> (G, S, D)."""

    def keys(self, keys_GS: Tensor, x_END: Tensor) -> Tensor:
        """Returns a key for each row that `dispatch` returned, (E, G*C), from those of tokens."""
        E, N, _ = x_END.shape
        return split(split(keys_GS[:, 0], E), N // len(keys_GS)).transpose(0, 1).flatten(1)


@dataclass(frozen=True, kw_only=True)
class GatherRouting(Routing):
    """A routing whose slots hold at most one whole token (token choice, expert choice).

    `token_GEC` is the token in the slot, S if it is empty; `weight_GEC` weighs the slot's output.
    """

    token_GEC: Tensor
    weight_GEC: Tensor

    def only(self, expert_GK: Tensor) -> Self:
        return replace(
            self,
            token_GEC=_select_experts(self.token_GEC, 1, expert_GK),
            weight_GEC=_select_experts(self.weight_GEC, 1, expert_GK),
        )

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        D = x_GSD.shape[-1]
        # Row S of zeros fills empty slots.
        x_padded = torch.cat([x_GSD, x_GSD.new_zeros(x_GSD.shape[0], 1, D)], 1)
        return x_padded.flatten(0, 1).index_select(0, self._rows_EN()).view(self.token_GEC.shape[1], -1, D)

    def combine(self, y_END: Tensor) -> Tensor:
        G, S, _ = self.gates_GSE.shape
        weight_EN = self.weight_GEC.transpose(0, 1).flatten(1).unsqueeze(-1)
        weighted = (y_END * weight_EN.to(y_END.dtype)).flatten(0, 1)
        out = weighted.new_zeros(G * (S + 1), y_END.shape[-1]).index_add_(0, self._rows_EN(), weighted)
        return out.view(G, S + 1, -1)[:, :S]

    def _rows_EN(self) -> Tensor:
        """Row of each slot's token in the padded (G * (S + 1), D), expert-major and flat."""
        G, S, _ = self.gates_GSE.shape
        offset_G = torch.arange(G, device=self.token_GEC.device) * (S + 1)
        return (self.token_GEC + offset_G[:, None, None]).transpose(0, 1).flatten()


@dataclass(frozen=True, kw_only=True)
class SoftRouting(Routing):
    """A routing whose slots are mixes of all tokens, and whose tokens are mixes of all slots.

    `dispatch_GSEC` sums to 1 over S, `combine_GSEC` over (E, C).
    """

    dispatch_GSEC: Tensor
    combine_GSEC: Tensor

    def only(self, expert_GK: Tensor) -> Self:
        return replace(
            self,
            dispatch_GSEC=_select_experts(self.dispatch_GSEC, 2, expert_GK),
            combine_GSEC=_select_experts(self.combine_GSEC, 2, expert_GK),
        )

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        return torch.einsum("gsec,gsd->egcd", self.dispatch_GSEC.to(x_GSD.dtype), x_GSD).flatten(1, 2)

    def combine(self, y_END: Tensor) -> Tensor:
        G, _, _, C = self.combine_GSEC.shape
        # With one slot per expert both are views; einsum would also copy the weights with more.
        y_slots = y_END.unflatten(1, (G, C)).transpose(0, 1).flatten(1, 2)
        return torch.bmm(self.combine_GSEC.to(y_END.dtype).flatten(2), y_slots)


@dataclass(frozen=True, kw_only=True)
class DenseRouting(Routing):
    """A routing whose experts process every token (C = S); only the mix of their outputs is routed.

    `weight_GSE` sums to 1 over E, unless experts are left out. With `scale_inputs` experts see tokens times
    their weight.
    """

    weight_GSE: Tensor
    scale_inputs: bool = False

    def only(self, expert_GK: Tensor) -> Self:
        return replace(self, weight_GSE=_select_experts(self.weight_GSE, 2, expert_GK))

    def dispatch(self, x_GSD: Tensor) -> Tensor:
        x_END = x_GSD.flatten(0, 1).expand(self.weight_GSE.shape[-1], -1, -1)
        if not self.scale_inputs:
            return x_END
        return x_END * self.weight_GSE.flatten(0, 1).T.unsqueeze(-1).to(x_END.dtype)

    def combine(self, y_END: Tensor) -> Tensor:
        G, S, _ = self.weight_GSE.shape
        y_EGSD = y_END.unflatten(1, (G, S))
        return torch.einsum("gse,egsd->gsd", self.weight_GSE.to(y_END.dtype), y_EGSD)


def _select_experts(x: Tensor, dim: int, expert_GK: Tensor) -> Tensor:
    """Selects each group's own K of the E experts along `dim`."""
    shape = [1] * x.ndim
    shape[0], shape[dim] = expert_GK.shape
    return x.take_along_dim(expert_GK.view(shape), dim)


def at_least_fp32(x: Tensor) -> Tensor:
    """Casts to float32 at least.

    Routers compute in float32 under bfloat16 weights, where counts would be rounded, and in float64 in
    float64 models.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def routing_stats(
    *,
    gates_GSE: Tensor,
    load_GE: Tensor,
    chosen_GS: Tensor,
    seats_GS: Tensor,
    valid_GS: Tensor,
    flip_G: Tensor | None = None,
    residual_G: Tensor | None = None,
    slot_similarity_G: Tensor | None = None,
    bias_E: Tensor | None = None,
) -> dict[str, Tensor]:
    """Computes the statistics of `RouterConfig.described`, detached float32 scalars, over the valid tokens of
    all groups that are not padding alone.

    Args:
        gates_GSE, load_GE: as in `Routing`.
        chosen_GS: number of experts that the token chooses or that choose it, before capacity; tokens with 0
            are ``unchosen_frac``, and its share of all experts ``open_frac``.
        seats_GS: number of slots that hold the token; tokens with 0 are ``dropped_frac``.
        valid_GS: 1 for real tokens, 0 for padding.
        flip_G: share of the group's choices that router noise changed (``flip_frac``).
        residual_G: largest violation of the transport plan's constraints (``transport_residual``).
        slot_similarity_G: mean cosine between the dispatch weights of two slots.
        bias_E: what balances the choices; its largest less its smallest is ``bias_range``.
    """
    gates_GSE, load_GE = gates_GSE.detach(), at_least_fp32(load_GE.detach())
    # A bfloat16 mask would round the counts.
    valid_GS = valid_GS.to(torch.float32)
    tokens = valid_GS.sum().clamp(min=1)
    filled_G = valid_GS.amax(1)
    groups = filled_G.sum().clamp(min=1)
    mean_G = load_GE.mean(-1)

    def over_tokens(value_GS: Tensor) -> Tensor:
        return (value_GS * valid_GS).sum() / tokens

    def over_groups(value_G: Tensor | None) -> Tensor:
        return filled_G.new_zeros(()) if value_G is None else (value_G.detach() * filled_G).sum() / groups

    stats = {
        "unchosen_frac": over_tokens((chosen_GS == 0).float()),
        "dropped_frac": over_tokens((seats_GS == 0).float()),
        "load_mean": over_groups(mean_G),
        "load_cv": over_groups(load_GE.std(-1, correction=0) / mean_G.clamp(min=1e-9)),
        "load_min": over_groups(load_GE.amin(-1)),
        "load_max": over_groups(load_GE.amax(-1)),
        "max_violation": over_groups(load_GE.amax(-1) / mean_G.clamp(min=1e-9) - 1),
        "seats_mean": over_tokens(seats_GS.float()),
        "seats_max": over_groups((seats_GS * valid_GS).amax(1)),
        "gate_entropy_nats": over_tokens(-(gates_GSE * gates_GSE.clamp(min=1e-30).log()).sum(-1)),
        "flip_frac": over_groups(flip_G),
        "transport_residual": over_groups(residual_G),
        "slot_similarity": over_groups(slot_similarity_G),
        "bias_range": over_groups(None) if bias_E is None else bias_E.max() - bias_E.min(),
        "open_frac": over_tokens(chosen_GS.float()) / load_GE.shape[-1],
    }
    return {name: value.float() for name, value in stats.items()}
