"""The sweeps of Implicit Bias in Soft MoE (Chung et al. 2024)."""

from typing import cast

from moe.models import AstroformerConfig
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


@named
def expert_count_cifar(scale: Scale) -> Sweep:
    """Many small experts or few large ones, in the two blocks of attention that end an Astroformer.

    Source: Implicit Bias in Soft MoE, section 4.4.1 and appendix D.2: n experts of one slot in place of the
    MLPs of Astroformer-1, without the skip connection around them. All together have the hidden units of 16
    MLPs, 49,152.
    """
    model = cast(AstroformerConfig, scale.base.model)
    total = 16 * 4 * model.widths[-1]
    return Sweep(
        base=scale.base,
        arms={
            f"n{n}": moe("soft", n, layers=f"last_{model.depths[-1]}", slots_per_expert=1)
            | {f"{MOE}.expert_dim": total // n, f"{MOE}.residual": False}
            for n in (2, 8, 16, 64, 128)
        },
    )
