"""Capacity in training, with and without batch prioritized routing: how far can it fall?

Source: V-MoE, sections 2.4 and 4, table 2 and figure 4: top-k routing in every second block, buffers of
C = k * tokens * capacity / experts, filled in the order of the tokens or of their priority.
"""

from typing import Any

from orchestrator.sweeps.catalog.arms import token_choice
from orchestrator.sweeps.catalog.scales import Scale, base
from orchestrator.sweeps.sweep import Sweep

CLAIMS = ("priority=max beats priority=none at equal k, capacity",)


def capacity(scale: Scale) -> Sweep:
    arms: dict[str, dict[str, Any]] = {"dense": {}}
    for k in (1, 2):
        for factor in (0.25, 0.5, 1.05, 1.5):
            arms[f"k{k}-c{factor}"] = token_choice(scale.experts, k, factor)
            arms[f"k{k}-c{factor}-bpr"] = token_choice(scale.experts, k, factor, priority="max")
    return Sweep(base=base(scale, "capacity"), arms=arms, claims=CLAIMS)
