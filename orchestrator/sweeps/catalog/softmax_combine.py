"""Weigh the experts' outputs by the softmax, or by the transport plan that sent the tokens?

Source: Routers in Vision MoE, section 3.4 and figure 3: Sinkhorn token choice with k of 1 and 2, its combine
tensor from the softmax or from the plan; expert choice beside it.
"""

from typing import Any

from orchestrator.sweeps.catalog.arms import expert_choice, sinkhorn, token_choice
from orchestrator.sweeps.catalog.scales import Scale, base
from orchestrator.sweeps.sweep import Sweep

CLAIMS = ("combine=softmax beats combine=affinity at equal family, k, capacity",)


def softmax_combine(scale: Scale) -> Sweep:
    arms: dict[str, dict[str, Any]] = {}
    for combine in ("softmax", "affinity"):
        for k in (1, 2):
            arms[f"token-k{k}-{combine}"] = sinkhorn(token_choice(scale.experts, k, combine=combine))
        for c in (1, 2):
            arms[f"expert-c{c}-{combine}"] = sinkhorn(expert_choice(scale.experts, c, combine=combine))
    return Sweep(base=base(scale, "softmax_combine"), arms=arms, claims=CLAIMS)
