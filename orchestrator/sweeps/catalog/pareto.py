"""Families x sizes x capacities: the frontier of quality against the cost of training.

Source: Soft MoE, section 3.3 and figure 3: dense models, token choice with batch prioritized routing and k
of 1 and 2, expert choice with c of 0.5, 1 and 2, and Soft MoE, from the smallest size to the largest; MoE in
the last half of the blocks. One slot per expert where the paper has it: as many experts as tokens need.
"""

from typing import Any

from orchestrator.codec import override
from orchestrator.sweeps.catalog.arms import expert_choice, soft, token_choice
from orchestrator.sweeps.catalog.scales import Scale, base
from orchestrator.sweeps.catalog.space import families_space
from orchestrator.sweeps.sweep import Sweep

CLAIMS = (
    "family=soft beats best family=token_choice,family=expert_choice at equal size",
    "best family=soft beats family=dense at equal size",
)


def pareto(scale: Scale) -> Sweep:
    run = base(scale, "pareto")
    arms: dict[str, dict[str, Any]] = {}
    for name, changes in scale.sizes.items():
        model = override(run, changes).model
        last_half = {"model.moe.layers": f"last_{model.depth // 2}"}
        families = (
            {f"token-k{k}": token_choice(scale.experts, k, priority="max") for k in (1, 2)}
            | {f"expert-c{c}": expert_choice(scale.experts, c) for c in (0.5, 1, 2)}
            | {f"soft-x{x}": soft(scale.experts, x, model.tokens()) for x in (0.5, 1, 2)}
        )
        arms[f"{name}-dense"] = dict(changes)
        arms |= {f"{name}-{family}": {**changes, **arm, **last_half} for family, arm in families.items()}
    return Sweep(base=run, arms=arms, claims=CLAIMS, space=families_space(scale))
