"""Top-k gating of today's language models: how scores are made, chosen, weighed and balanced is each a field.

Sources: DeepSeek-V3 (https://arxiv.org/abs/2412.19437) and its released code, torchtitan, Megatron-Core and
OLMo-core, which agree in what is here but where docs/routers.md says so; Chi et al. 2022, "On the
Representation Collapse of Sparse MoE", https://arxiv.org/abs/2204.09179, and Tutel for cosines.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.config import NonNegativeFloat, PositiveFloat, PositiveInt
from moe.init import Draw, constant, lecun_normal, normal, zeros
from moe.overrides import AS_TRAINED, Dropless, Priority, RoutingOverrides
from moe.routers.affinity import gate_logits
from moe.routers.balance import BalanceConfig, Level, NoBalanceConfig, frequency, frequency_loss
from moe.routers.choice import CapacityConfig, gather_routing, rows_routing
from moe.routers.token_choice import (
    chosen_by,
    fill_by_weight,
    fill_slots,
    queue_priority,
    seating_leaks,
    top_experts,
    z_loss,
)
from moe.routing import LayerShape, Router, Routing, at_least_fp32

# Of the division by the sum of weights.
EPS = 1e-20
MAX_SCALE = 100.0  # of cosines
Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, kw_only=True)
class TopKConfig(CapacityConfig):
    """Top-k gating.

    Attributes:
        capacity_factor, eval_capacity_factor: slots per assignment; or ``dropless``: no slots, every expert
            computes all tokens that chose it (`moe.rows`).
        k: experts that each token chooses.
        score: what is made of the logits: their ``softmax`` over the experts, ``sigmoid``, or
            ``sqrtsoftplus``, sqrt(log(1 + e^z)). The k largest are chosen, and weigh the outputs.
        normalise: divide the weights of a token by their sum over its k experts. With k = 1 they stay: else
            all were 1, and the router would not learn.
        scale: the weights are multiplied by it, last.
        cosine: logits are cosines of tokens and experts, divided by a learned temperature.
        projection: width of a learned projection of the tokens before their cosine; None: there is none.
        temperature: where the learned temperature starts.
        balance: the bias that balances the choices.
        balance_weight: weight of the loss E * sum_e (share of choices of e) * (mean gate of e).
        balance_level: the tokens whose shares count: of a routing ``group`` (an image, if images_per_group
            is 1), of a ``pass``, so that results depend on the microbatch and on the number of workers, or of
            the ``batch`` before.
        z_weight: weight of the mean squared log-sum-exp of the logits.
        priority: the token that an expert seats first: that with the largest ``weight``, or all first choices
            before all second choices, and among them the earlier token (``none``), or that with the largest
            score (``max``) or sum over its choices (``sum``).
    """

    kind: Literal["top_k"] = "top_k"
    capacity_factor: PositiveFloat | Dropless = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]
    eval_capacity_factor: PositiveFloat | Dropless | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    k: PositiveInt = 1
    score: Score = "softmax"
    normalise: bool = False
    scale: PositiveFloat = 1.0
    cosine: bool = False
    projection: PositiveInt | None = None
    temperature: PositiveFloat = 0.07
    balance: BalanceConfig = NoBalanceConfig()
    balance_weight: NonNegativeFloat = 0.0
    balance_level: Level = "group"
    z_weight: NonNegativeFloat = 0.0
    priority: Priority = "weight"

    CAPACITIES: ClassVar = (*CapacityConfig.CAPACITIES, "dropless")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance.unit_scores and self.score == "sqrtsoftplus":
            raise ValueError(
                f"balance={self.balance.kind} needs scores in 0..1: use score=sigmoid or score=softmax, not"
                f" {self.score}"
            )
        if self.projection and not self.cosine:
            raise ValueError(f"projection={self.projection} is of tokens before their cosine: set cosine too")

    @property
    def can_overflow(self) -> bool:
        return self.capacity_factor != "dropless"

    def build(self, *, dim: int, num_experts: int) -> "TopKRouter":
        return TopKRouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens: int, num_experts: int) -> float:
        if self.k > num_experts:
            raise ValueError(f"k={self.k} exceeds num_experts={num_experts}")
        if self.capacity_factor == "dropless":
            return num_tokens * self.k / num_experts
        return self.capacity(num_tokens * self.k, num_experts)

    def leaks_future(self, *, num_tokens: int, num_experts: int) -> str:
        if self.capacity_factor == "dropless":
            return ""
        return seating_leaks(self, num_tokens=num_tokens, num_experts=num_experts)

    def active_experts(self, num_experts: int) -> float:
        return self.k

    def grid(self, num_experts: int) -> list[RoutingOverrides]:
        ks = sorted({1, 2, 4, self.k})
        return [
            RoutingOverrides(k=k, capacity_factor=c) for k in ks if k <= num_experts for c in self.CAPACITIES
        ]

    def mix_macs(self, layer: LayerShape, kept: int) -> float:
        # The choices of a token are added by a matmul, also those that have no expert.
        return layer.rows() * layer.dim if self.capacity_factor == "dropless" else 0

    def saved(self, layer: LayerShape) -> tuple[float, float]:
        rows, numbers = super().saved(layer)
        return (
            rows - layer.rows() if self.capacity_factor == "dropless" else rows
        ), numbers  # nothing is added

    def gate_macs(self, layer: LayerShape) -> float:
        width = self.projection or layer.dim
        return layer.tokens * (width * layer.experts + (layer.dim * width if self.projection else 0))


class TopKRouter(Router):
    """The router. Its buffers are `bias_E`, and `share_E`, the shares of choices in the last batch; both only
    where the config needs them.
    """

    bias_E: Tensor
    share_E: Tensor

    def __init__(self, config: TopKConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config, self.num_experts = config, num_experts
        self.lagged = config.balance_weight > 0 and config.balance_level == "batch"
        self.gate_DE = nn.Parameter(torch.empty(config.projection or dim, num_experts))
        if config.projection:
            self.project_DP = nn.Parameter(torch.empty(dim, config.projection))
            self.project_bias_P = nn.Parameter(torch.empty(config.projection))
        if config.cosine:
            self.log_scale = nn.Parameter(torch.empty(1))
        if config.balance.rows:
            self.register_buffer("bias_E", torch.empty(num_experts))
        if self.lagged:
            self.register_buffer("share_E", torch.empty(num_experts))
        if rows := config.balance.rows + self.lagged:
            counts_RE = torch.empty(rows, num_experts, dtype=torch.int64)
            self.register_buffer("counts", counts_RE, persistent=False)

    def draws(self) -> dict[str, Draw]:
        return {
            "gate_DE": normal(0.01) if self.config.cosine else lecun_normal(self.gate_DE.shape[0]),
            "project_DP": lecun_normal(len(getattr(self, "project_DP", self.gate_DE))),
            "project_bias_P": zeros(),
            "log_scale": constant(-math.log(self.config.temperature)),
            "bias_E": zeros(),
            "share_E": constant(1 / self.num_experts),
            "counts": zeros(),
        }

    def after_batch(self, routers: object) -> None:
        assert self.counts is not None
        balance, rows = self.config.balance, self.config.balance.rows
        if rows:
            self.bias_E.copy_(balance.next_bias(self.bias_E, self.counts[:rows], self.config.k))
        if self.lagged:
            share_E = self.counts[-1].to(self.share_E) / self.counts[-1].sum().clamp(min=1)
            self.share_E.copy_(share_E)

    def logits(self, x_GSD: Tensor, random_GS: Tensor | None) -> Tensor:
        """Returns the logits of tokens and experts, in float32 at least."""
        if not self.config.cosine or random_GS is not None:
            return gate_logits(x_GSD, self.gate_DE, random_GS)
        x_GSD, gate_DE = at_least_fp32(x_GSD), at_least_fp32(self.gate_DE)
        if self.config.projection:
            x_GSD = x_GSD @ at_least_fp32(self.project_DP) + at_least_fp32(self.project_bias_P)
        return cosines(x_GSD, gate_DE, at_least_fp32(self.log_scale))

    def forward(
        self,
        x_GSD: Tensor,
        valid_GS: Tensor,
        keys_GS: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        random_GS: Tensor | None = None,
        return_stats: bool = True,
    ) -> Routing:
        config = overrides.apply(self.config if self.training else self.config.eval_config())
        E, has_bias = self.num_experts, config.balance.rows > 0
        if config.capacity_factor == "dropless" and torch.compiler.is_exporting():
            # A graph has rows of fixed numbers: a slot for every token in each expert computes the same.
            config = replace(config, capacity_factor=E / config.k)
        slots = config.slots(num_tokens=int(x_GSD.shape[1]), num_experts=E)
        logits_GSE = self.logits(x_GSD, random_GS)
        scores_GSE = score(logits_GSE, config.score)
        gates_GSE = scores_GSE
        if config.score != "softmax":
            gates_GSE = scores_GSE / scores_GSE.sum(-1, keepdim=True).clamp(min=EPS)
        choice = top_experts(scores_GSE + self.bias_E if has_bias else scores_GSE, config.k)
        chosen_GSE = chosen_by(choice, valid_GS, E)
        weights_GSE = weigh(scores_GSE, choice, config)
        aux_G, level = gates_GSE.new_zeros(gates_GSE.shape[0]), config.balance_level
        counted: list[Tensor] = []
        if self.training and has_bias:
            counted = [config.balance.count(scores_GSE.detach(), self.bias_E, chosen_GSE, valid_GS)]
        if config.balance_weight:
            # The bias has no part in the loss.
            unbiased_GSE = (
                chosen_by(top_experts(scores_GSE, config.k), valid_GS, E) if has_bias else chosen_GSE
            )
            share_GE = self.share_E.unsqueeze(0) if self.lagged else frequency(unbiased_GSE, level)
            aux_G = aux_G + config.balance_weight * frequency_loss(gates_GSE, share_GE, valid_GS, level)
            if self.training and self.lagged:
                counted.append(unbiased_GSE.long().sum((0, 1)).unsqueeze(0))
        if config.z_weight:
            aux_G = aux_G + config.z_weight * z_loss(logits_GSE, valid_GS)
        rest: dict[str, Any] = {
            "weights_GSE": weights_GSE,
            "gates_GSE": gates_GSE,
            "valid_GS": valid_GS,
            "overrides": overrides,
            "aux_G": aux_G,
            "bias_E": self.bias_E if has_bias else None,
            "counts": torch.cat(counted) if counted else None,
        }
        if config.capacity_factor == "dropless":
            return rows_routing(choice, chosen_GSE=chosen_GSE, return_stats=return_stats, **rest)
        if config.priority == "weight":
            weight_GSK = weights_GSE.gather(-1, choice)
            token_GEC = fill_by_weight(choice, weight_GSK, valid_GS, num_experts=E, capacity=int(slots))
        else:
            first_GS = queue_priority(scores_GSE, choice, config.priority)
            token_GEC = fill_slots(choice, valid_GS, first_GS, num_experts=E, capacity=int(slots))
        return gather_routing(token_GEC, chosen_GSE=chosen_GSE if return_stats else None, **rest)


def score(logits_GSE: Tensor, how: Score) -> Tensor:
    """Returns the scores of logits; none is negative."""
    if how == "softmax":
        return logits_GSE.softmax(-1)
    if how == "sigmoid":
        return logits_GSE.sigmoid()
    # The gradient of the root is infinite at 0.
    return F.softplus(logits_GSE).clamp(min=torch.finfo(logits_GSE.dtype).tiny).sqrt()


def weigh(scores_GSE: Tensor, expert_GSK: Tensor, config: TopKConfig) -> Tensor:
    """Returns weights_GSE of the experts that a token chose, from its scores without a bias."""
    if config.normalise and config.k > 1:
        total_GS1 = scores_GSE.gather(-1, expert_GSK).sum(-1, keepdim=True)
        scores_GSE = scores_GSE / (total_GS1 + EPS)
    return config.scale * scores_GSE


def cosines(x_GSP: Tensor, gate_PE: Tensor, log_scale: Tensor) -> Tensor:
    """Returns exp(log_scale), at most `MAX_SCALE`, times the cosines of tokens and experts; 0 for a token of
    zeros.
    """
    scale = log_scale.clamp(max=math.log(MAX_SCALE)).exp()
    return scale * (F.normalize(x_GSP, dim=-1, eps=1e-12) @ F.normalize(gate_PE, dim=0, eps=1e-12))
