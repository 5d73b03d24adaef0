"""Which operating points of a model are worth a look.

Source: V-MoE section 4.2 and appendix C (k, capacity and priority at inference); Implicit Bias in Soft MoE,
section 4.3 (expert subsets).
"""

from collections.abc import Iterable
from itertools import product

from moe.cost import forward_macs
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers import ExpertChoiceConfig, TokenChoiceConfig
from moe.vit import ViTConfig, check_overrides

CAPACITIES = (0.15, 0.3, 0.5, 0.75, 1.0, 1.5)
PRIORITIES = ("none", "max")


def default_grid(config: ViTConfig) -> list[RoutingOverrides]:
    """The model as trained, and what its router can do else; a dense model can do nothing else."""
    if not config.moe:
        return [AS_TRAINED]
    router, E = config.moe.router, config.moe.num_experts
    if isinstance(router, TokenChoiceConfig):
        ks = sorted({1, 2, 4, router.k})
        wanted = [
            RoutingOverrides(k=k, capacity_factor=capacity, priority=priority)
            for k, capacity, priority in product(ks, CAPACITIES, PRIORITIES)
        ]
    elif isinstance(router, ExpertChoiceConfig):
        wanted = [RoutingOverrides(capacity_factor=capacity) for capacity in (*CAPACITIES, 2.0)]
        wanted += [RoutingOverrides(experts=E * quarters // 4) for quarters in (1, 2, 3)]
    else:
        subsets = sorted({*(2**power for power in range(E.bit_length())), 3 * E // 4})
        wanted = [RoutingOverrides(experts=experts) for experts in subsets if experts < E]
    return possible(config, wanted)


def possible(config: ViTConfig, wanted: Iterable[RoutingOverrides]) -> list[RoutingOverrides]:
    """The model as trained, then those that it can run: its router has the setting, and room for a token."""
    points = dict.fromkeys(wanted)
    return [AS_TRAINED, *(p for p in points if p != AS_TRAINED and why_impossible(config, p) is None)]


def why_impossible(config: ViTConfig, point: RoutingOverrides) -> str | None:
    """What keeps a model from running at a point; None if nothing does."""
    try:
        check_overrides(config, point)
        forward_macs(config, point)
    except ValueError as error:
        return str(error)
    return None
