"""Settings of an arm by short names, for claims, filters and hover texts."""

from moe.cost import slots_per_token
from orchestrator.codec import flat
from orchestrator.config import RunConfig

# `router` and `capacity` say these
_LEFT_OUT = ("kind", "capacity_factor", "slots_per_expert", "total_slots")


def settings(run: RunConfig) -> dict[str, str | float]:
    """``family`` (`ViTConfig.family`), ``router`` (its kind), ``size``, ``capacity`` (expert slots per token:
    k * C, c, or slots / tokens) and every field of the router; of its affinity, the kind alone.
    """
    model = run.model
    found: dict[str, str | float] = {
        "family": model.family(),
        "router": model.moe.router.kind if model.moe else "dense",
        "size": f"w{model.width}d{model.depth}p{model.patch_size}",
        "capacity": round(slots_per_token(model), 3),
        "experts": float(model.moe.num_experts if model.moe else 1),
    }
    if model.moe:
        fields = flat(model.moe.router) | {"images_per_group": model.moe.images_per_group}
        for name, value in fields.items():
            if name.endswith(".kind"):
                found[name.removesuffix(".kind")] = str(value)
            elif "." not in name and name not in _LEFT_OUT and value is not None:
                found[name] = value if isinstance(value, str) else float(value)
    return found
