"""Soft MoE: slots are convex mixes of tokens; nothing is dropped, nothing to balance.

Source: Puigcerver et al. 2023, "From Sparse to Soft Mixtures of Experts", https://arxiv.org/abs/2308.00951,
algorithms 1 and 2; ablations of section 3.6. Where the text differs, two things follow the authors' code: the
l2 norm has its epsilon under the root, and only the logits are normalised: experts process mixes of the
tokens themselves. Slot i belongs to expert i // C, as in the text.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from moe.config import NonNegativeFloat, PositiveInt
from moe.init import Draw, constant, gaussian, lecun_normal, split
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routing import LayerShape, Router, RouterConfig, SoftRouting, at_least_fp32, routing_stats

Mix = Literal["soft", "uniform", "identity"]


@dataclass(frozen=True, kw_only=True)
class SoftConfig(RouterConfig):
    """Soft MoE and its ablations.

    Attributes:
        slots_per_expert: slots of each expert.
        total_slots: slots of all experts together; replaces `slots_per_expert` if it is set.
        normalize: l2-normalise tokens and slot parameters, times a learned scale (section 2.3), with the
            epsilon of the authors' code (``vmoe``) or of algorithm 2 (``paper``); ``none`` does not
            normalise.
        scale_init: initial value of the learned scale.
        dispatch, combine: learned weights (``soft``), equal weights (``uniform``), or token i <-> slot i
            (``identity``), which needs as many slots as tokens.
        noise_std: standard deviation of the training noise on the logits; it is not divided by E.
    """

    kind: Literal["soft"] = "soft"
    slots_per_expert: PositiveInt = 1
    total_slots: PositiveInt | None = None
    normalize: Literal["vmoe", "paper", "none"] = "vmoe"
    scale_init: float = 1.0
    dispatch: Mix = "soft"
    combine: Mix = "soft"
    noise_std: NonNegativeFloat = 0.0

    @property
    def reads_keys(self) -> bool:
        return self.noise_std > 0

    def build(self, *, dim: int, num_experts: int) -> "SoftRouter":
        return SoftRouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """Returns C, the slots per expert; only ``identity`` depends on `num_tokens`. Raises ValueError if
        `total_slots` does not divide over the experts, or ``identity`` does not fit."""
        slots = self.num_slots(num_experts)
        if "identity" in (self.dispatch, self.combine) and num_experts * slots != num_tokens:
            raise ValueError(
                f"identity needs a slot per token: {num_experts} experts x {slots} slots are not"
                f" {num_tokens} tokens"
            )
        return slots

    def num_slots(self, num_experts: int) -> int:
        if self.total_slots is None:
            return self.slots_per_expert
        if self.total_slots % num_experts:
            raise ValueError(f"total_slots={self.total_slots} does not divide over {num_experts} experts")
        return self.total_slots // num_experts

    def learned(self) -> bool:
        """Returns whether the router has parameters."""
        return "soft" in (self.dispatch, self.combine)

    def leaks_future(self, *, num_tokens: int, num_experts: int) -> str:
        if self.dispatch == self.combine == "identity":
            return ""
        return "slots are mixes of all tokens: only identity dispatch and combine keep them apart"

    def gate_macs(self, layer: LayerShape) -> float:
        return layer.tokens * layer.dim * layer.experts * layer.slots if self.learned() else 0

    def mix_macs(self, layer: LayerShape, kept: int) -> float:
        return 2 * layer.tokens * kept * layer.slots * layer.dim  # two matmuls

    def saved(self, layer: LayerShape) -> tuple[float, float]:
        unit_x = layer.tokens * layer.dim if self.learned() and self.normalize != "none" else 0
        return 2 * layer.rows(), 2 * layer.tokens * layer.experts * layer.slots + unit_x


class SoftRouter(Router):
    undecayed: ClassVar = ("phi_DEC",)

    def __init__(self, config: SoftConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config = config
        self.shape = (num_experts, config.num_slots(num_experts))
        if config.learned():
            self.phi_DEC = nn.Parameter(torch.empty(dim, *self.shape))
            if config.normalize != "none":
                self.scale = nn.Parameter(torch.empty(1))

    def draws(self) -> dict[str, Draw]:
        if not self.config.learned():
            return {}
        # The authors' initialiser includes the experts in the fan.
        dim, num_experts, _ = self.phi_DEC.shape
        return {"phi_DEC": lecun_normal(dim * num_experts), "scale": constant(self.config.scale_init)}

    def forward(
        self,
        x_GSD: Tensor,
        valid_GS: Tensor,
        keys_GS: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        random_GS: Tensor | None = None,
        return_stats: bool = True,
    ) -> SoftRouting:
        G, S, _ = x_GSD.shape
        config = overrides.apply(self.config)
        config.slots(num_tokens=S, num_experts=self.shape[0])
        logits_GSEC = self._logits(x_GSD, keys_GS, random_GS) if config.learned() else None
        dispatch_GSEC = self._mix(config.dispatch, logits_GSEC, x_GSD, valid_GS, over_tokens=True)
        combine_GSEC = self._mix(config.combine, logits_GSEC, x_GSD, valid_GS, over_tokens=False)
        gates_GSE = combine_GSEC.sum(-1)
        load_GE = (gates_GSE.detach() * valid_GS.unsqueeze(-1)).sum(1)
        kept_GE = overrides.kept(load_GE)
        if kept_GE is not None:
            combine_GSEC = combine_GSEC * kept_GE[:, None, :, None]
        routing = SoftRouting(
            dispatch_GSEC=dispatch_GSEC,
            combine_GSEC=combine_GSEC,
            gates_GSE=gates_GSE,
            aux_G=combine_GSEC.new_zeros(G),
            kept_GE=kept_GE,
        )
        if not return_stats:
            return routing
        # Every slot mixes all tokens; with `identity` it holds one token.
        slots = 1 if config.dispatch == "identity" else self.shape[0] * self.shape[1]
        seats_GS = torch.full_like(valid_GS, slots, dtype=torch.float32)
        stats = routing_stats(
            gates_GSE=gates_GSE,
            load_GE=load_GE,
            chosen_GS=seats_GS,
            seats_GS=seats_GS,
            valid_GS=valid_GS,
            slot_similarity_G=mean_cosine(dispatch_GSEC.detach().flatten(2)),
        )
        return replace(routing, load_GE=load_GE, stats=stats)

    def _logits(self, x_GSD: Tensor, keys_GS: Tensor | None, random_GS: Tensor | None) -> Tensor:
        unit_x, unit_phi = at_least_fp32(x_GSD), at_least_fp32(self.phi_DEC)
        if self.config.normalize != "none":
            normalized = l2_normalize if self.config.normalize == "vmoe" else l2_normalize_as_printed
            unit_x, unit_phi = normalized(unit_x, dim=-1), self.scale * normalized(unit_phi, dim=0)
        logits_GSEC = torch.einsum("gsd,dec->gsec", unit_x, unit_phi)
        slots = self.shape[0] * self.shape[1]
        if random_GS is not None:
            logits_GSEC = gaussian(split(random_GS, slots)).view_as(logits_GSEC).to(logits_GSEC.dtype)
        if keys_GS is not None and self.config.noise_std:
            noise = gaussian(split(keys_GS, slots)).view_as(logits_GSEC)
            logits_GSEC = logits_GSEC + self.config.noise_std * noise.to(logits_GSEC.dtype)
        return logits_GSEC

    def _mix(
        self, mix: Mix, logits_GSEC: Tensor | None, x_GSD: Tensor, valid_GS: Tensor, *, over_tokens: bool
    ) -> Tensor:
        """Returns weights (G, S, E, C) that sum to 1 over valid tokens (dispatch) or over slots (combine)."""
        G, S, _ = x_GSD.shape
        dtype = torch.promote_types(x_GSD.dtype, torch.float32)
        valid_GS11 = valid_GS.to(dtype)[..., None, None]
        if mix == "identity":
            eye = torch.eye(S, dtype=dtype, device=x_GSD.device).view(S, *self.shape).expand(G, -1, -1, -1)
            return eye * valid_GS11 if over_tokens else eye
        if mix == "uniform":
            slots = self.shape[0] * self.shape[1]
            share = valid_GS11 / valid_GS11.sum(1, keepdim=True).clamp(min=1) if over_tokens else 1 / slots
            return x_GSD.new_ones(G, S, *self.shape, dtype=dtype) * share
        assert logits_GSEC is not None
        if not over_tokens:
            return logits_GSEC.flatten(2).softmax(-1).view_as(logits_GSEC)
        # Finite, so that a group of padding alone gives a uniform mix and not NaN.
        lowest = torch.finfo(torch.float32).min
        return logits_GSEC.masked_fill(~valid_GS.bool()[..., None, None], lowest).softmax(1)


def l2_normalize(x: Tensor, *, dim: int) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6), as in the authors' code; value and gradient are finite at 0."""
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + 1e-6)


def l2_normalize_as_printed(x: Tensor, *, dim: int) -> Tensor:
    """Returns x / (|x| + 1e-6), algorithm 2 of the paper, which differs for tiny x."""
    return x / (torch.linalg.vector_norm(x, dim=dim, keepdim=True) + 1e-6)


def mean_cosine(columns_GSN: Tensor) -> Tensor:
    """Mean cosine of pairs of columns, (G,): 1 if all are equal, 0 if orthogonal or if there is one column.

    The sum over all pairs is the squared length of the sum of unit columns, so no (N, N) array is needed.
    """
    N = columns_GSN.shape[-1]
    square_GN = columns_GSN.square().sum(1)
    # An empty column stays 0.
    scale_GN = square_GN.clamp(min=1e-24).rsqrt()
    sum_GS = (columns_GSN * scale_GN.unsqueeze(1)).sum(-1)
    return (sum_GS.square().sum(1) - (square_GN * scale_GN.square()).sum(1)) / max(1, N * (N - 1))
