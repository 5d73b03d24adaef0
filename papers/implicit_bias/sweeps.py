"""The sweep of Implicit Bias in Soft MoE (Chung et al. 2024)."""

from orchestrator.sweeps.arms import MOE, moe, named
from orchestrator.sweeps.scales import Scale
from orchestrator.sweeps.sweep import Sweep
from papers.scales import last_half, vit_of


@named
def expert_count(scale: Scale) -> Sweep:
    """Many small experts or few large ones: the same parameters in all, one slot per expert.

    Source: Implicit Bias in Soft MoE, section 4 and appendix D: n experts in the last half of ViT-B/16 whose
    hidden layers add up to the same number, that of 16 dense MLPs (513M parameters). The numbers n of that
    model are not readable; those here are ours, and hold the 2, 8, 16, 64, 128 printed for CIFAR100, and the
    one huge expert of section 3.
    """
    model = vit_of(scale.base)
    total = model.mlp_dim * scale.experts // 2  # hidden units of all experts of a layer
    counts = [2**i for i in range(8) if 2**i <= 4 * scale.experts and total % 2**i == 0]
    layers = last_half(scale.base)
    arms = {
        f"n{n}": moe("soft", n, layers=layers, slots_per_expert=1) | {f"{MOE}.expert_dim": total // n}
        for n in counts
    }
    return Sweep(base=scale.base, arms=arms)
