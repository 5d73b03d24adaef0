"""Many small experts or few large ones: the same parameters in all, one slot per expert.

Source: Implicit Bias in Soft MoE, section 4 and appendix D: n experts whose hidden layers add up to the same
number; a model of one huge expert is theirs of two here, for a layer needs at least two.
"""

from orchestrator.sweeps.catalog.arms import soft_slots
from orchestrator.sweeps.catalog.scales import Scale, base
from orchestrator.sweeps.sweep import Sweep


def expert_count(scale: Scale) -> Sweep:
    run = base(scale, "expert_count")
    total = run.model.mlp_dim * scale.experts  # hidden units of all experts of a layer
    counts = [2**i for i in range(1, 8) if 2**i <= 4 * scale.experts and total % 2**i == 0]
    layers = f"last_{run.model.depth // 2}"
    arms = {f"n{n}": soft_slots(n, 1, layers=layers) | {"model.moe.expert_dim": total // n} for n in counts}
    return Sweep(base=run, arms=arms)
