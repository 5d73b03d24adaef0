"""Soft MoE: slots are convex mixes of tokens; nothing is dropped, nothing to balance.

Source: Puigcerver et al. 2023, "From Sparse to Soft Mixtures of Experts", https://arxiv.org/abs/2308.00951,
algorithms 1 and 2. Two things follow the authors' code where the text differs: the l2 norm has its epsilon
under the root, and it touches only the logits: the experts see the tokens as they came.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moe.init import Draw, constant, lecun_normal
from moe.routing import SoftRouting, at_least_fp32, routing_stats


@dataclass(frozen=True, kw_only=True)
class SoftConfig:
    kind: Literal["soft"] = "soft"
    slots_per_expert: int = 1
    normalize: bool = True  # l2-normalise tokens and slot parameters, times a learned scale (section 2.3)
    scale_init: float = 1.0

    def __post_init__(self) -> None:
        if self.slots_per_expert < 1:
            raise ValueError(f"slots_per_expert must be at least 1, got {self.slots_per_expert}")

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """C: slots per expert, whatever the number of tokens."""
        return self.slots_per_expert


class SoftRouter(nn.Module):
    def __init__(self, config: SoftConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config = config
        self.phi_DEC = nn.Parameter(torch.empty(dim, num_experts, config.slots_per_expert))
        if config.normalize:
            self.scale = nn.Parameter(torch.empty(1))

    def draws(self) -> dict[str, Draw]:
        dim, num_experts, _ = self.phi_DEC.shape  # the authors' initialiser counts the experts into the fan
        return {"phi_DEC": lecun_normal(dim * num_experts), "scale": constant(self.config.scale_init)}

    def forward(self, x_GSD: Tensor, valid_GS: Tensor) -> SoftRouting:
        unit_x, unit_phi = at_least_fp32(x_GSD), at_least_fp32(self.phi_DEC)
        if self.config.normalize:
            unit_x, unit_phi = l2_normalize(unit_x, dim=-1), self.scale * l2_normalize(unit_phi, dim=0)
        logits_GSEC = torch.einsum("gsd,dec->gsec", unit_x, unit_phi)
        # finite, so that a group of padding alone gives a uniform mix and not NaN
        masked_GSEC = logits_GSEC.masked_fill(
            ~valid_GS.bool()[..., None, None], torch.finfo(torch.float32).min
        )
        dispatch_GSEC = masked_GSEC.softmax(1)
        combine_GSEC = logits_GSEC.flatten(2).softmax(-1).view_as(logits_GSEC)
        return SoftRouting(
            dispatch_GSEC=dispatch_GSEC,
            combine_GSEC=combine_GSEC,
            aux_G=logits_GSEC.new_zeros(len(x_GSD)),
            stats=routing_stats(
                gates_GSE=combine_GSEC.sum(-1),
                load_GE=(combine_GSEC * valid_GS[..., None, None]).sum((1, 3)),
                seats_GS=torch.ones_like(valid_GS),  # every token is in every slot
                valid_GS=valid_GS,
            ),
        )


def l2_normalize(x: Tensor, *, dim: int) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6), the authors' normalisation; finite, with a finite gradient, at 0."""
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + 1e-6)
