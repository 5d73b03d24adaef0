"""Experts x slots per token: what more experts bring at equal cost.

Source: Soft MoE, section 3.5 and figure 6: at each number of slots (or choices) per token the number of
experts varies, and the FLOPs of the experts do not; Soft MoE, expert choice and token choice with batch
prioritized routing.
"""

from typing import Any

from orchestrator.sweeps.catalog.arms import expert_choice, soft, token_choice
from orchestrator.sweeps.catalog.scales import Scale, base
from orchestrator.sweeps.sweep import Sweep


def slots_experts(scale: Scale) -> Sweep:
    run = base(scale, "slots_experts")
    tokens, arms = run.model.tokens(), dict[str, dict[str, Any]]()
    for per_token in (1, 2):
        for experts in (scale.experts // 4, scale.experts // 2, scale.experts, 2 * scale.experts):
            name = f"e{experts}-x{per_token}"
            arms[f"soft-{name}"] = soft(experts, per_token, tokens)
            arms[f"expert-{name}"] = expert_choice(experts, per_token)
            arms[f"token-{name}"] = token_choice(experts, per_token, priority="max")
    return Sweep(base=run, arms=arms)
