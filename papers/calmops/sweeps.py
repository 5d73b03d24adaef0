"""The sweep of the calmops article on Soft MoE."""

from orchestrator.sweeps.arms import Arm, moe, named
from orchestrator.sweeps.scales import Scale
from orchestrator.sweeps.sweep import Sweep
from papers.scales import last_half


@named()
def mixtures(scale: Scale) -> Sweep:
    """Every expert for every token, weighed by the router: what each part of the mixture brings.

    Source: the calmops article "SoftMoE: Beyond Hard Expert Selection": 16 experts (here those of the scale),
    temperature 1.0 that decays by 0.99 at each step, and its variants; it prints no results. Every arm costs
    as many MLPs as it has experts.
    """
    variants: dict[str, Arm] = {
        "token": {},
        "image": {"level": "image"},
        "hierarchical": {"level": "hierarchical"},
        "mlp-gate": {"gate": "mlp"},
        "scaled-inputs": {"scale_inputs": True},
    }
    half = last_half(scale.base)
    arms: dict[str, Arm] = {"dense": {}}
    for name, fields in variants.items():
        arms[name] = moe("mixture", scale.experts, layers=half, temperature_decay=0.99, **fields)
    arms["constant-temperature"] = moe("mixture", scale.experts, layers=half)
    arms["learned-temperature"] = moe("mixture", scale.experts, layers=half, learn_temperature=True)
    return Sweep(base=scale.base, arms=arms)
