"""Token choice: every token chooses its K best experts, each of which has room for C tokens.

Source: Riquelme et al. 2021, "Scaling Vision with Sparse MoE", https://arxiv.org/abs/2106.05974: softmax,
then top-k (section 2.3); buffer capacity (2.4); first choices before second choices (algorithm 1); batch
prioritized routing (section 4.1, algorithm 2). With a Sinkhorn plan in place of the softmax: Routers in
Vision MoE, section 2.2, which uses no auxiliary loss.

The auxiliary losses balance the experts. Each gives one value per group, the mean over its valid tokens; the
caller averages. Squared coefficients of variation are var / mean^2 with the population variance, because the
gradient of the standard deviation at zero variance is NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.config import NonNegativeFloat, PositiveFloat, PositiveInt
from moe.overrides import Priority, RoutingOverrides
from moe.routers.affinity import Gating, SinkhornConfig, SoftmaxConfig
from moe.routers.choice import CapacityConfig, ChoiceRouter
from moe.routing import at_least_fp32


@dataclass(frozen=True, kw_only=True)
class TokenChoiceConfig(CapacityConfig):
    """Token choice.

    Attributes:
        k: experts that each token chooses.
        affinity: the score by which tokens choose.
        combine: weigh outputs by the softmax (V-MoE; Routers, section 2.2) or by the affinity itself.
        topk: whether the k largest gates of the softmax over all experts weigh the outputs (``after``), or a
            softmax over the k largest logits (``before``, which V-MoE's section 2.3 compares; Shazeer et al.
            2017).
        priority: the token that is seated first: the earlier token (``none``), the token with the largest
            affinity (``max``), or with the largest sum over its choices (``sum``; batch prioritized routing).
        noise_std: standard deviation of the training noise on the logits, times E.
        importance_weight, load_weight, gshard_balance_weight, z_weight: weights of the auxiliary losses; the
            load loss needs noise.
    """

    kind: Literal["token_choice"] = "token_choice"
    k: PositiveInt = 1
    capacity_factor: PositiveFloat = 1.05  # V-MoE section 3.1
    affinity: SoftmaxConfig | SinkhornConfig = SoftmaxConfig()
    combine: Literal["softmax", "affinity"] = "softmax"
    topk: Literal["after", "before"] = "after"
    priority: Literal["none", "max", "sum"] = "none"
    noise_std: NonNegativeFloat = 1.0  # V-MoE section 2.3
    # The authors' released configs.
    importance_weight: NonNegativeFloat = 0.005
    load_weight: NonNegativeFloat = 0.005
    gshard_balance_weight: NonNegativeFloat = 0.0
    z_weight: NonNegativeFloat = 0.0

    @property
    def can_overflow(self) -> bool:
        return True

    @property
    def reads_keys(self) -> bool:
        return self.noise_std > 0

    def family(self) -> str:
        return self.affinity.family(self.kind)

    def build(self, *, dim: int, num_experts: int) -> "TokenChoiceRouter":
        return TokenChoiceRouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """Returns C, the slots per expert in a group of `num_tokens`."""
        if self.k > num_experts:
            raise ValueError(f"k={self.k} exceeds num_experts={num_experts}")
        return self.capacity(num_tokens * self.k, num_experts)

    def leaks_future(self, *, num_tokens: int, num_experts: int) -> str:
        if self.affinity.sees_group and (self.k < num_experts or self.combine == "affinity"):
            return self.affinity.sees_group
        return seating_leaks(self, num_tokens=num_tokens, num_experts=num_experts)

    def active_experts(self, num_experts: int) -> float:
        return self.k

    def grid(self, num_experts: int) -> list[RoutingOverrides]:
        points = product(sorted({1, 2, 4, self.k}), self.CAPACITIES, ("none", "max"))
        return [RoutingOverrides(k=k, capacity_factor=c, priority=first) for k, c, first in points]


class TokenChoiceRouter(ChoiceRouter):
    def choose(self, config: TokenChoiceConfig, plan_GSE: Tensor, valid_GS: Tensor, capacity: int) -> Tensor:
        return top_experts(plan_GSE, config.k)

    def chosen(self, choice: Tensor, valid_GS: Tensor) -> Tensor:
        return chosen_by(choice, valid_GS, self.num_experts)

    def seat(
        self,
        config: TokenChoiceConfig,
        choice: Tensor,
        plan_GSE: Tensor,
        valid_GS: Tensor,
        capacity: int,
    ) -> Tensor:
        priority_GS = queue_priority(plan_GSE, choice, config.priority)
        return fill_slots(choice, valid_GS, priority_GS, num_experts=self.num_experts, capacity=capacity)

    def weights(self, config: TokenChoiceConfig, choice: Tensor, gated: Gating) -> Tensor:
        weights_GSE = super().weights(config, choice, gated)
        if config.topk == "after":
            return weights_GSE
        # The softmax over some logits is the softmax over all, divided by their share.
        chosen_GSK = weights_GSE.gather(-1, choice)
        total_GS1 = chosen_GSK.sum(-1, keepdim=True).clamp(min=torch.finfo(chosen_GSK.dtype).tiny)
        return torch.zeros_like(weights_GSE).scatter(-1, choice, chosen_GSK / total_GS1)

    def aux_loss(self, config: TokenChoiceConfig, gated: Gating, valid_GS: Tensor) -> Tensor:
        logits_GSE, noisy_GSE, gates_GSE, *_ = gated
        noise = noisy_GSE is not logits_GSE
        aux_G = gates_GSE.new_zeros(gates_GSE.shape[0])
        if config.importance_weight:
            clean_GSE = logits_GSE.softmax(-1) if noise else gates_GSE
            aux_G = aux_G + config.importance_weight * importance_loss(clean_GSE, valid_GS)
        if config.load_weight and noise:
            std = config.noise_std / self.num_experts
            loss_G = load_loss(logits_GSE, noisy_GSE, valid_GS, k=config.k, std=std)
            aux_G = aux_G + config.load_weight * loss_G
        if config.gshard_balance_weight:
            aux_G = aux_G + config.gshard_balance_weight * gshard_loss(gates_GSE, valid_GS)
        if config.z_weight:
            aux_G = aux_G + config.z_weight * z_loss(logits_GSE, valid_GS)
        return aux_G


def seating_leaks(config: Any, *, num_tokens: int, num_experts: int) -> str:
    """Returns why the seats of a token may depend on later tokens, as `RouterConfig.leaks_future`, for a
    config with k and priority.
    """
    if config.slots(num_tokens=num_tokens, num_experts=num_experts) >= num_tokens:
        return ""
    way_out = f"capacity_factor={num_experts / config.k:g}, which drops no token"
    if config.priority != "none":
        return (
            f"priority={config.priority!r} seats the best tokens of the group first: use none, or {way_out}"
        )
    if config.k > 1:
        return (
            f"with k={config.k} the second choice of a token is seated after the first choices of later"
            f" tokens: use k=1, or {way_out}"
        )
    return ""


def chosen_by(expert_GSK: Tensor, valid_GS: Tensor, num_experts: int) -> Tensor:
    """Returns chosen_GSE: 1 for each expert that a valid token chose."""
    valid_GSK = at_least_fp32(valid_GS).unsqueeze(-1).expand(expert_GSK.shape)
    return valid_GSK.new_zeros(*valid_GS.shape, num_experts).scatter(-1, expert_GSK, valid_GSK)


def top_experts(affinity_GSE: Tensor, k: int) -> Tensor:
    """Returns each token's k best experts, best first, ties to the lower index: (G, S, K).

    `argmax` returns the first of equal values; `topk` returns any, and a stable sort is slower at small k.
    """
    left_GSE, best = affinity_GSE.detach(), []
    for _ in range(k):
        best.append(left_GSE.argmax(-1, keepdim=True))
        left_GSE = left_GSE.scatter(-1, best[-1], -torch.inf)
    return torch.cat(best, -1)


def queue_priority(affinity_GSE: Tensor, expert_GSK: Tensor, priority: Priority) -> Tensor | None:
    """Returns the score by which tokens queue, (G, S); None for the order of the tokens."""
    if priority == "max":
        return affinity_GSE.detach().amax(-1)
    if priority == "sum":
        return affinity_GSE.detach().gather(-1, expert_GSK).sum(-1)
    return None


def fill_slots(
    expert_GSK: Tensor,
    valid_GS: Tensor,
    priority_GS: Tensor | None = None,
    *,
    num_experts: int,
    capacity: int,
) -> Tensor:
    """Seats tokens in their experts' queues: all first choices, then all second choices, and so on.

    Within a choice, tokens queue by descending priority (ties to the earlier token) or in token order.
    Padding tokens queue for no expert. This is V-MoE algorithms 1 and 2 without their loops: a stable sort by
    expert of the choice-major list keeps the queue order, and an assignment's seat is its distance from the
    first assignment of its expert.

    Returns:
        token_GEC as in `GatherRouting`.
    """
    _, S, K = expert_GSK.shape
    # Padding queues for expert E, which does not exist.
    expert_GSK = torch.where(valid_GS.bool().unsqueeze(-1), expert_GSK, num_experts)
    place_GS = None if priority_GS is None else priority_GS.argsort(dim=1, descending=True, stable=True)
    if place_GS is not None:
        expert_GSK = expert_GSK.gather(1, place_GS.unsqueeze(-1).expand(-1, -1, K))

    def token_of(order_GQ: Tensor) -> Tensor:
        return order_GQ % S if place_GS is None else place_GS.gather(1, order_GQ % S)

    # Q = K*S assignments, choice-major.
    queue_GQ = expert_GSK.transpose(1, 2).flatten(1)
    return _seat_queue(queue_GQ, token_of, empty=S, num_experts=num_experts, capacity=capacity)


def fill_by_weight(
    expert_GSK: Tensor, weight_GSK: Tensor, valid_GS: Tensor, *, num_experts: int, capacity: int
) -> Tensor:
    """Seats the choices of the largest weights of each expert, best first, ties to the earlier token: what
    `best_of` returns, by sorting the choices of the tokens instead of all tokens for each expert.
    """
    _, S, K = expert_GSK.shape
    queue_GQ = torch.where(valid_GS.bool().unsqueeze(-1), expert_GSK, num_experts).flatten(1)
    place_GQ = weight_GSK.detach().flatten(1).argsort(dim=1, descending=True, stable=True)
    return _seat_queue(
        queue_GQ.gather(1, place_GQ),
        lambda order_GQ: place_GQ.gather(1, order_GQ) // K,
        empty=S,
        num_experts=num_experts,
        capacity=capacity,
    )


def _seat_queue(
    queue_GQ: Tensor, token_of: Callable[[Tensor], Tensor], *, empty: int, num_experts: int, capacity: int
) -> Tensor:
    """Returns token_GEC of assignments to experts (num_experts: to none) that are seated in this order.

    `token_of` returns the tokens of places in the queue.
    """
    G, Q = queue_GQ.shape
    sorted_GQ, order_GQ = queue_GQ.sort(dim=1, stable=True)
    first_GE = torch.searchsorted(
        sorted_GQ, torch.arange(num_experts + 1, device=queue_GQ.device).expand(G, -1).contiguous()
    )
    seat_GQ = torch.arange(Q, device=queue_GQ.device) - first_GE.gather(1, sorted_GQ)

    # One more slot collects the dropped assignments and is then cut off.
    overflow = num_experts * capacity
    kept_GQ = (seat_GQ < capacity) & (sorted_GQ < num_experts)
    slot_GQ = torch.where(kept_GQ, sorted_GQ * capacity + seat_GQ, overflow)
    token_slots = order_GQ.new_full((G, overflow + 1), empty).scatter(1, slot_GQ, token_of(order_GQ))
    return token_slots[:, :overflow].unflatten(1, (num_experts, capacity))


def importance_loss(gates_GSE: Tensor, valid_GS: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' summed gates without noise, (G, S, E) -> (G,).

    It is 0 at perfect balance and E - 1 if all gates select one expert. Source: V-MoE appendix A; Routers,
    appendix A.
    """
    return _squared_cv((gates_GSE * valid_GS.unsqueeze(-1)).sum(1))


def load_loss(logits_GSE: Tensor, noisy_GSE: Tensor, valid_GS: Tensor, *, k: int, std: float) -> Tensor:
    """Squared coefficient of variation of the experts' probability to be chosen if noise were drawn again.

    A token's threshold is its k-th largest noisy logit. Source: Routers, appendix A, eq. 12-15, with the
    standard deviation 1/E of V-MoE and of the authors' code, not the variance.
    """
    threshold_GS1 = noisy_GSE.topk(k, dim=-1).values[..., -1:]
    chance_GSE = 0.5 * torch.erfc((threshold_GS1 - logits_GSE) / (std * 2**0.5))
    return _squared_cv((chance_GSE * valid_GS.unsqueeze(-1)).sum(1))


def gshard_loss(gates_GSE: Tensor, valid_GS: Tensor) -> Tensor:
    """Returns E * sum_e (share of tokens whose first choice is e) * (mean gate of e); 1 at perfect balance.

    Source: GShard; Switch, eq. 4. Only the mean gates have a gradient.
    """
    E = gates_GSE.shape[-1]
    valid_GS = at_least_fp32(valid_GS)
    share_GS1 = (valid_GS / valid_GS.sum(1, keepdim=True).clamp(min=1)).unsqueeze(-1)
    first_GSE = F.one_hot(gates_GSE.detach().argmax(-1), E)
    return E * ((first_GSE * share_GS1).sum(1) * (gates_GSE * share_GS1).sum(1)).sum(-1)


def z_loss(logits_GSE: Tensor, valid_GS: Tensor) -> Tensor:
    """Mean squared log-sum-exp of the logits, which keeps them small. Source: ST-MoE, eq. 5."""
    valid_GS = at_least_fp32(valid_GS)
    z_GS = logits_GSE.logsumexp(-1).square() * valid_GS
    return z_GS.sum(1) / valid_GS.sum(1).clamp(min=1)


def _squared_cv(value_GE: Tensor) -> Tensor:
    return value_GE.var(-1, correction=0) / value_GE.mean(-1).square().clamp(min=1e-9)
