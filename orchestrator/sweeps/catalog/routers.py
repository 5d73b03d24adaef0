"""Six routers x capacity x architecture: which router is best at equal cost?

Source: Routers in Vision MoE (Liu et al.), section 3.1, figures 1 and 2: softmax and Sinkhorn token choice
with k of 1 and 2; softmax, Sinkhorn and sparsity-constrained expert choice, and Soft MoE, with c of 1 and 2;
MoE in every second block. Beside them the dense model of each size.
"""

from typing import Any

from orchestrator.codec import override
from orchestrator.sweeps.catalog.arms import expert_choice, sinkhorn, soft, token_choice
from orchestrator.sweeps.catalog.scales import Scale, base
from orchestrator.sweeps.sweep import Sweep

CLAIMS = (  # of the abstract and section 3
    "router=expert_choice beats router=token_choice at equal size, capacity, affinity",
    "family=soft beats best family!=soft, family!=dense at equal size, capacity",
    "family=sinkhorn_token_choice beats family=token_choice at equal size, k",
)


def routers(scale: Scale) -> Sweep:
    run = base(scale, "routers")
    arms: dict[str, dict[str, Any]] = {}
    for name, changes in scale.sizes.items():
        tokens = override(run, changes).model.tokens()
        arms[f"{name}-dense"] = dict(changes)
        for router, arm in six_routers(scale.experts, tokens).items():
            arms[f"{name}-{router}"] = {**changes, **arm}
    return Sweep(base=run, arms=arms, claims=CLAIMS)


def six_routers(experts: int, tokens: int) -> dict[str, dict[str, Any]]:
    """The twelve arms of one architecture."""
    found: dict[str, dict[str, Any]] = {}
    for k in (1, 2):
        found[f"softmax-tc-k{k}"] = token_choice(experts, k)
        found[f"sinkhorn-tc-k{k}"] = sinkhorn(token_choice(experts, k))
    for c in (1, 2):
        found[f"softmax-ec-c{c}"] = expert_choice(experts, c)
        found[f"sinkhorn-ec-c{c}"] = sinkhorn(expert_choice(experts, c))
        sparse = {"model.moe.router.affinity.kind": "sparse_transport"}
        found[f"sparse-ec-c{c}"] = expert_choice(experts, c) | sparse
        found[f"soft-c{c}"] = soft(experts, c, tokens)
    return found
