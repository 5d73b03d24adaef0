"""Soft MoE with parts of its routing taken out: which part carries the gain?

Source: Soft MoE, section 3.6 and table 2: dispatch and combine learned, uniform, or the identity (token i to
slot i), and the dense model; MoE in the last half of the blocks. The identity needs as many slots as tokens.
"""

from orchestrator.sweeps.catalog.arms import moe
from orchestrator.sweeps.catalog.scales import Scale, base
from orchestrator.sweeps.sweep import Sweep

_ROWS = {  # of table 2: dispatch, combine
    "soft": ("soft", "soft"),
    "soft-uniform": ("soft", "uniform"),
    "uniform-soft": ("uniform", "soft"),
    "uniform": ("uniform", "uniform"),
    "identity": ("identity", "identity"),
}


def ablations(scale: Scale) -> Sweep:
    run = base(scale, "ablations")
    tokens, layers = run.model.tokens(), f"last_{run.model.depth // 2}"
    experts = max(e for e in range(1, 2 * scale.experts + 1) if tokens % e == 0)
    arms = {
        name: moe(
            "soft",
            experts,
            layers=layers,
            slots_per_expert=tokens // experts,
            dispatch=dispatch,
            combine=combine,
        )
        for name, (dispatch, combine) in _ROWS.items()
    }
    return Sweep(base=run, arms={"dense": {}, **arms})
