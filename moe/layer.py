"""The MoE layer: a router decides, experts compute."""

import re
from dataclasses import dataclass

from torch import Tensor, nn

from moe.experts import Experts
from moe.routers import RouterConfig, TokenChoiceConfig, build_router
from moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Attributes:
    layers: which blocks are MoE: ``every_2`` (1, 3, 5, .. as V-MoE), ``last_<n>`` (the last n, as Soft
    MoE), or
        block indices from 0.
    images_per_group: images that are routed together and compete for capacity; results depend on it, never
    on the
        number of ranks.
    """

    layers: tuple[int, ...] | str = "every_2"
    num_experts: int = 8
    images_per_group: int = 1
    router: RouterConfig = TokenChoiceConfig()

    def __post_init__(self) -> None:
        if self.num_experts < 2:
            raise ValueError(f"num_experts must be at least 2, got {self.num_experts}")
        if self.images_per_group < 1:
            raise ValueError(f"images_per_group must be at least 1, got {self.images_per_group}")
        if isinstance(self.layers, str) and not re.fullmatch(r"every_2|last_[1-9]\d*", self.layers):
            raise ValueError(f"layers must be every_2, last_<n> or block indices, got {self.layers!r}")

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Indices of the MoE blocks of a model with `depth` blocks.

        Raises:
            ValueError: if there is none, or one lies outside the model.
        """
        if self.layers == "every_2":
            found = tuple(range(1, depth, 2))
        elif isinstance(self.layers, str):
            count = int(self.layers.removeprefix("last_"))
            found = tuple(range(depth - count, depth))
        else:
            found = tuple(sorted(set(self.layers)))
        if not found or found[0] < 0 or found[-1] >= depth:
            raise ValueError(
                f"layers={self.layers!r} does not fit depth={depth}: blocks are 0 .. {depth - 1}"
            )
        return found


class MoELayer(nn.Module):
    def __init__(self, config: MoEConfig, *, dim: int, hidden: int) -> None:
        super().__init__()
        self.images_per_group = config.images_per_group
        self.router = build_router(config.router, dim=dim, num_experts=config.num_experts)
        self.experts: nn.Module = Experts(config.num_experts, dim, hidden)

    def forward(self, x_BSD: Tensor, valid_B: Tensor) -> tuple[Tensor, Routing]:
        """Routes groups of `images_per_group` consecutive images; padding images (0 in `valid_B`) take no
        slots.

        Returns:
            (B, tokens per image, D), and the routing of the groups.

        Raises:
            ValueError: if the images do not fill the groups.
        """
        B, tokens, _ = x_BSD.shape
        if B % self.images_per_group:
            raise ValueError(f"images_per_group={self.images_per_group} does not divide a batch of {B}")
        x_GSD = x_BSD.reshape(B // self.images_per_group, self.images_per_group * tokens, -1)
        valid_GS = valid_B.unsqueeze(1).expand(-1, tokens).reshape(x_GSD.shape[:2])
        routing = self.router(x_GSD, valid_GS)
        y_GSD = routing.combine(self.experts(routing.dispatch(x_GSD)))
        return y_GSD.reshape(x_BSD.shape), routing
