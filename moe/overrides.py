"""Routing settings of a trained model that can be changed without new weights.

A checkpoint with overrides is an operating point. Source: V-MoE sections 4.1-4.2 and 5 (k, capacity,
priority, random router at inference); Implicit Bias in Soft MoE section 4.3 (expert subsets).
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from moe.config import Config, PositiveInt
from moe.init import mix, split, uniform

Priority = Literal["none", "max", "sum", "weight"]
Dropless = Literal["dropless"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RoutingOverrides(Config):
    """Changes to the routers of a model.

    Attributes:
        k, capacity_factor, priority: replace the router's own values; None keeps them.
        experts: the experts whose outputs are combined: a number, for those with the largest weight in each
            group (algorithm 1 of Implicit Bias in Soft MoE), or a tuple of experts; None: all experts.
        subset_seed: draws as many `experts` at random instead, for each layer and each group by its place in
            the batch: the baseline of algorithm 1 (section 4.4).
        images_per_group: routes so many images together, a divisor of the model's own number. With 1 no
            answer depends on other images.
        random_blocks: indices of MoE blocks whose router is replaced by random logits, N(0, 1) per token.
        first_group: how many groups of the batch lie on the ranks before this one, so that what is drawn by
            the place in the batch does not depend on the number of ranks.
    """

    k: int | None = None
    capacity_factor: float | Dropless | None = None
    priority: Priority | None = None
    experts: int | tuple[int, ...] | None = None
    subset_seed: int | None = None
    images_per_group: PositiveInt | None = None
    random_blocks: tuple[int, ...] = ()
    first_group: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("experts", "random_blocks"):
            indices = getattr(self, name)
            if isinstance(indices, tuple) and len(set(indices)) < len(indices):
                raise ValueError(f"{name} must be distinct indices, got {indices}")
        if self.subset_seed is not None and not isinstance(self.experts, int):
            raise ValueError(
                f"subset_seed={self.subset_seed!r} draws a number of experts: experts={self.experts!r}"
            )

    def apply(self, config: T) -> T:
        """Returns the router's config with the overrides. Raises ValueError if this kind of router has no
        such setting, or refuses the value."""
        changes = {}
        for name in ("k", "capacity_factor", "priority"):
            if getattr(self, name) is not None:
                if not hasattr(config, name):
                    raise ValueError(f"a router of kind {config.kind!r} has no {name} to override")  # pyright: ignore[reportAttributeAccessIssue]
                changes[name] = getattr(self, name)
        return replace(config, **changes) if changes else config  # pyright: ignore[reportArgumentType, reportCallIssue]

    def num_kept(self, num_experts: int) -> int:
        """Returns the number of experts of a group whose outputs are combined. Raises ValueError if there are
        no such experts."""
        if self.experts is None:
            return num_experts
        if isinstance(self.experts, int):
            if not 1 <= self.experts <= num_experts:
                raise ValueError(f"experts={self.experts} must lie in 1 .. {num_experts}")
            return self.experts
        if not self.experts or not all(0 <= e < num_experts for e in self.experts):
            raise ValueError(f"experts={self.experts} must be indices in 0 .. {num_experts - 1}")
        return len(self.experts)

    def kept(self, weight_GE: Tensor) -> Tensor | None:
        """Returns the boolean mask (G, E) of the experts whose outputs are combined; None if all are. Raises
        ValueError if there are no such experts."""
        k = self.num_kept(weight_GE.shape[-1])
        if self.experts is None:
            return None
        if isinstance(self.experts, int):
            if self.subset_seed is not None:
                groups = torch.arange(len(weight_GE), device=weight_GE.device) + self.first_group
                weight_GE = uniform(split(mix(groups, self.subset_seed), weight_GE.shape[-1]))
            best_GK = weight_GE.argsort(dim=-1, descending=True, stable=True)[:, :k]
            return torch.zeros_like(weight_GE, dtype=torch.bool).scatter(1, best_GK, True)
        listed = torch.zeros(weight_GE.shape[-1], dtype=torch.bool, device=weight_GE.device)
        listed[list(self.experts)] = True
        return listed.expand_as(weight_GE)


AS_TRAINED = RoutingOverrides()
