"""Expert choice: every expert picks its C best tokens, so the load is balanced by construction.

Source: Zhou et al. 2022, https://arxiv.org/abs/2202.09368; Routers in Vision MoE, section 2.3 and algorithm
2; with a Sinkhorn plan in place of the softmax, section 2.4; with a sparsity-constrained plan, section 2.5.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers.affinity import AffinityConfig, SoftmaxConfig, SparseTransportConfig, gating
from moe.routers.choice import CapacityConfig, GatedRouter, gather_routing
from moe.routing import GatherRouting


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceConfig(CapacityConfig):
    """Expert choice.

    Attributes:
        affinity: the score by which experts pick.
        combine: weigh outputs by the softmax (Routers, section 2.2) or by the affinity itself.
        noise_std: standard deviation of the training noise on the logits, times E.
    """

    kind: Literal["expert_choice"] = "expert_choice"
    affinity: AffinityConfig = SoftmaxConfig()
    combine: Literal["softmax", "affinity"] = "softmax"
    noise_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_std < 0:
            raise ValueError(f"noise_std must not be negative, got {self.noise_std}")
        if self.combine == "affinity" and isinstance(self.affinity, SparseTransportConfig):
            raise ValueError(
                "combine='affinity' would train no router: the sparse_transport plan has no gradient;"
                " use combine='softmax' or another affinity"
            )

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """C: slots per expert in a group of `num_tokens`."""
        slots = self.capacity(num_tokens, num_experts)
        if slots > num_tokens:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} asks each of {num_experts} experts for {slots} of"
                f" only {num_tokens} tokens; use at most {num_experts}, and a smaller capacity_multiple_of"
            )
        return slots


class ExpertChoiceRouter(GatedRouter):
    def __init__(self, config: ExpertChoiceConfig, *, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.config = config

    def forward(
        self,
        x_GSD: Tensor,
        valid_GS: Tensor,
        keys_GS: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        random_GS: Tensor | None = None,
    ) -> GatherRouting:
        config = overrides.apply(self.config)
        capacity = config.slots(num_tokens=x_GSD.shape[1], num_experts=self.num_experts)
        gated = gating(
            config.affinity, x_GSD, self.gate_DE, valid_GS, keys_GS, random_GS, config.noise_std, capacity
        )
        gates_GSE = gated.gates_GSE
        token_GEC = best_tokens(gated.plan_GSE, valid_GS, capacity)
        flip_G = None
        if gated.clean_plan_GSE is not None:
            clean_GEC = best_tokens(gated.clean_plan_GSE, valid_GS, capacity)
            flip_G = flip_share(clean_GEC, token_GEC, valid_GS.shape[1])
        return gather_routing(
            token_GEC,
            weights_GSE=gates_GSE if config.combine == "softmax" else gated.plan_GSE,
            gates_GSE=gates_GSE,
            valid_GS=valid_GS,
            overrides=overrides,
            aux_G=gates_GSE.new_zeros(len(gates_GSE)),
            load_GE=(token_GEC < x_GSD.shape[1]).sum(-1),
            residual_G=gated.residual_G,
            flip_G=flip_G,
        )


def best_tokens(affinity_GSE: Tensor, valid_GS: Tensor, capacity: int) -> Tensor:
    """Returns each expert's best tokens, best first, ties to the earlier token, as token_GEC."""
    valid_GES = valid_GS.bool().unsqueeze(1).expand(-1, affinity_GSE.shape[-1], -1)
    preference_GES = torch.where(valid_GES, affinity_GSE.detach().transpose(1, 2), -1.0)  # padding is last
    picked_GEC = preference_GES.argsort(dim=-1, descending=True, stable=True)[..., :capacity]
    return torch.where(valid_GES.gather(2, picked_GEC), picked_GEC, valid_GS.shape[1])


def flip_share(clean_GEC: Tensor, noisy_GEC: Tensor, num_tokens: int) -> Tensor:
    """Returns the share of the experts' picks that noise changes, (G,)."""
    G, E, _ = clean_GEC.shape
    still_GES = torch.zeros(G, E, num_tokens + 1, device=clean_GEC.device).scatter(2, noisy_GEC, 1.0)
    picked_GEC = (clean_GEC < num_tokens).float()
    still_G = (still_GES.gather(2, clean_GEC) * picked_GEC).sum((1, 2))
    return 1 - still_G / picked_GEC.sum((1, 2)).clamp(min=1)
