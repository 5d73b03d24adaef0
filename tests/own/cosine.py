"""Cosine expert choice: an expert picks the tokens whose direction is nearest to its own.

Source: expert choice of Zhou et al. 2022, with the cosine of Chi et al. 2022 as the score.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe import (
    AS_TRAINED,
    CapacityConfig,
    Draw,
    GatherRouting,
    PositiveFloat,
    Router,
    RoutingOverrides,
    at_least_fp32,
    best_tokens,
    gather_routing,
    gaussian,
    lecun_normal,
    split,
)


@dataclass(frozen=True, kw_only=True)
class CosineConfig(CapacityConfig):
    """Cosine expert choice.

    Attributes:
        temperature: cosines are divided by it before the softmax over the experts.
    """

    kind: Literal["cosine"] = "cosine"
    temperature: PositiveFloat = 0.1

    def build(self, *, dim: int, num_experts: int) -> "CosineRouter":
        return CosineRouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        return min(self.capacity(num_tokens, num_experts), num_tokens)


class CosineRouter(Router):
    def __init__(self, config: CosineConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config = config
        self.direction_DE = nn.Parameter(torch.empty(dim, num_experts))

    def draws(self) -> dict[str, Draw]:
        return {"direction_DE": lecun_normal(self.direction_DE.shape[0])}

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
        G, S, _ = x_GSD.shape
        E = self.direction_DE.shape[1]

        unit_x = F.normalize(at_least_fp32(x_GSD), dim=-1)
        logits_GSE = unit_x @ F.normalize(at_least_fp32(self.direction_DE), dim=0) / config.temperature
        if random_GS is not None:
            logits_GSE = gaussian(split(random_GS, E)).to(logits_GSE.dtype)
        gates_GSE = logits_GSE.softmax(-1)

        slots = config.slots(num_tokens=S, num_experts=E)
        token_GEC = best_tokens(gates_GSE, valid_GS, slots)
        chosen_GES = gates_GSE.new_zeros(G, E, S + 1).scatter(2, token_GEC, 1.0)
        return gather_routing(
            token_GEC,
            chosen_GSE=chosen_GES[..., :S].transpose(1, 2) if return_stats else None,
            weights_GSE=gates_GSE,
            gates_GSE=gates_GSE,
            valid_GS=valid_GS,
            overrides=overrides,
            aux_G=gates_GSE.new_zeros(G),
        )
