"""All router families of the papers on 8x8 digits, in minutes on a laptop.

Source: the families and capacities of Routers in Vision MoE (section 3.1), the slot counts of Soft MoE
(figure 6), at toy size. Toy data does not reproduce the papers' order of routers; it shows what each costs
and that all of it runs.
"""

from orchestrator.sweeps.catalog.arms import moe, soft_slots, token_choice
from orchestrator.sweeps.catalog.scales import Scale, base
from orchestrator.sweeps.catalog.space import families_space
from orchestrator.sweeps.sweep import Sweep


def quickstart(scale: Scale) -> Sweep:
    run, experts = base(scale, "quickstart"), scale.experts
    return Sweep(
        base=run,
        arms=(
            {f"dense-d{depth}": {"model.depth": depth} for depth in (run.model.depth // 2, run.model.depth)}
            | {
                # at this size the papers' scale of 1 leaves routing nearly uniform
                f"soft-e{e}-s{s}": soft_slots(e, s, scale_init=8.0)
                for e, s in ((experts // 2, 1), (experts, 1), (experts // 2, 2), (experts, 2), (experts, 4))
            }
            | {
                f"token-k{k}-c{c}": token_choice(experts, k, c)
                for k, c in ((1, 0.5), (1, 1.0), (1, 2.0), (2, 0.5), (2, 1.0))
            }
            | {f"expert-c{c}": moe("expert_choice", experts, capacity_factor=c) for c in (0.5, 1.0, 2.0)}
        ),
        claims=("family=expert_choice beats family=token_choice at equal capacity",),
        space=families_space(scale),
    )
