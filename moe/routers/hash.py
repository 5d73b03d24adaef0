"""Hash routing: a token's expert follows from a fixed rule that learns nothing, as a baseline.

Source: Roller et al. 2021, "Hash Layers for Large Sparse Models", https://arxiv.org/abs/2106.04426, where the
expert is a random function of the id of a word. Patches of images have no ids. They are told apart by their
place, or by the signs of fixed random projections (Charikar 2002), which bring similar tokens together.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.config import PositiveFloat
from moe.init import Draw, gaussian, mix, normal, split
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers.choice import CapacityConfig, gather_routing
from moe.routers.token_choice import fill_slots
from moe.routing import GatherRouting, LayerShape, Router, at_least_fp32


@dataclass(frozen=True, kw_only=True)
class HashConfig(CapacityConfig):
    """Hash routing: one expert per token, whose output counts fully. Tokens beyond the capacity are dropped.

    Attributes:
        by: ``place`` of the token in its group; ``content``, the signs of its products with random vectors,
            two more than would tell the experts apart.
        salt: another number is another rule by place.
    """

    kind: Literal["hash"] = "hash"
    by: Literal["place", "content"] = "place"
    salt: int = 0
    capacity_factor: PositiveFloat = 2.0  # a random function sends some experts far more than their share

    def build(self, *, dim: int, num_experts: int) -> "HashRouter":
        return HashRouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """Returns C, the slots per expert in a group of `num_tokens`."""
        return min(self.capacity(num_tokens, num_experts), num_tokens)

    def leaks_future(self, *, num_tokens: int, num_experts: int) -> str:
        return ""  # tokens are seated in their order

    def active_experts(self, num_experts: int) -> float:
        return 1

    def gate_macs(self, layer: LayerShape) -> float:
        return layer.tokens * layer.dim * num_planes(layer.experts) if self.by == "content" else 0


class HashRouter(Router):
    """The router; the random vectors of a rule by content are a buffer, which checkpoints keep."""

    def __init__(self, config: HashConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config, self.num_experts = config, num_experts
        if config.by == "content":
            self.register_buffer("planes", torch.empty(dim, num_planes(num_experts)))

    def draws(self) -> dict[str, Draw]:
        return {"planes": normal(1.0)}

    def forward(
        self,
        x_GSD: Tensor,
        valid_GS: Tensor,
        keys_GS: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        random_GS: Tensor | None = None,
        return_stats: bool = True,
    ) -> GatherRouting:
        config = overrides.apply(self.config if self.training else self.config.eval_config())
        S, E = int(x_GSD.shape[1]), self.num_experts
        if random_GS is not None:
            expert_GS = gaussian(split(random_GS, E)).argmax(-1)
        elif config.by == "content":
            expert_GS = by_signs(at_least_fp32(x_GSD), self.get_buffer("planes"), E)
        else:
            expert_GS = by_number(torch.arange(S, device=x_GSD.device), E, config.salt).expand(valid_GS.shape)
        gates_GSE = F.one_hot(expert_GS, E).to(at_least_fp32(x_GSD).dtype)
        capacity = config.slots(num_tokens=S, num_experts=E)
        return gather_routing(
            fill_slots(expert_GS.unsqueeze(-1), valid_GS, num_experts=E, capacity=capacity),
            chosen_GSE=gates_GSE * at_least_fp32(valid_GS).unsqueeze(-1) if return_stats else None,
            weights_GSE=gates_GSE,
            gates_GSE=gates_GSE,
            valid_GS=valid_GS,
            overrides=overrides,
            aux_G=gates_GSE.new_zeros(gates_GSE.shape[0]),
        )


def num_planes(num_experts: int) -> int:
    """Returns the number of signs of a code: with four times as many codes as experts their loads differ
    less."""
    return math.ceil(math.log2(num_experts)) + 2


def by_signs(x_GSD: Tensor, planes_DB: Tensor, num_experts: int) -> Tensor:
    """Returns an expert for each token, (G, S): the number whose bits are the signs, modulo the experts."""
    bits_GSB = (x_GSD @ planes_DB.to(x_GSD.dtype) > 0).long()
    return (bits_GSB << torch.arange(planes_DB.shape[1], device=x_GSD.device)).sum(-1) % num_experts


def by_number(number_S: Tensor, num_experts: int, salt: int) -> Tensor:
    """Returns a random expert for each int64 number, the same for the same number."""
    hashed_S = mix(number_S ^ salt, 0)
    # The remainder of an unsigned number, of which the last bit is taken off to stay positive.
    half_S = (hashed_S >> 1) & ((1 << 63) - 1)
    return (half_S % num_experts * 2 + (hashed_S & 1)) % num_experts
