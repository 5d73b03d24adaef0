"""What the arms of several sweeps have in common: a router's fields, written as changes of a run."""

from typing import Any

GROUP = 8  # images whose tokens compete for buffers, as in V-MoE's released configs; Soft MoE: always one


def moe(kind: str, num_experts: int, *, layers: str = "every_2", **router: Any) -> dict[str, Any]:
    """A MoE arm; `router`: fields of the router, those of its affinity as ``affinity_kind``."""
    fields: dict[str, Any] = {"layers": layers, "num_experts": num_experts, "router.kind": kind}
    fields |= {f"router.{name.replace('affinity_', 'affinity.')}": value for name, value in router.items()}
    return {f"model.moe.{name}": value for name, value in fields.items()}


def token_choice(num_experts: int, k: int, capacity: float = 1.0, **others: Any) -> dict[str, Any]:
    """C = round(k * T * capacity / E) slots per expert (V-MoE, section 2.4)."""
    arm = moe("token_choice", num_experts, k=k, capacity_factor=capacity, **others)
    return arm | {"model.moe.images_per_group": GROUP}


def expert_choice(num_experts: int, c: float, **others: Any) -> dict[str, Any]:
    """C = round(c * T / E) slots per expert (Routers in Vision MoE, section 3.1)."""
    arm = moe("expert_choice", num_experts, capacity_factor=c, **others)
    return arm | {"model.moe.images_per_group": GROUP}


def sinkhorn(arm: dict[str, Any]) -> dict[str, Any]:
    """The arm with its tokens sent by the entropic plan. Clark et al. train it without auxiliary losses."""
    changed = arm | {"model.moe.router.affinity.kind": "sinkhorn"}
    if arm["model.moe.router.kind"] == "token_choice":
        off = ("noise_std", "importance_weight", "load_weight")
        changed |= {f"model.moe.router.{name}": 0.0 for name in off}
    return changed


def soft(num_experts: int, slots_per_token: float, tokens: int, **others: Any) -> dict[str, Any]:
    """As many slots per expert as bring `slots_per_token` about, at least one."""
    slots = max(1, round(slots_per_token * tokens / num_experts))
    return soft_slots(num_experts, slots, **others)


def soft_slots(num_experts: int, slots_per_expert: int, **others: Any) -> dict[str, Any]:
    return moe("soft", num_experts, slots_per_expert=slots_per_expert, **others)
