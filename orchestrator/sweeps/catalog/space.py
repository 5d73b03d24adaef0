"""What a search may draw at a scale: a size, a family, and what that family has."""

from typing import Any

from orchestrator.sweeps.catalog.arms import GROUP
from orchestrator.sweeps.catalog.scales import Scale
from orchestrator.sweeps.search import Space, Suggest

_MOE = "model.moe"


def families_space(scale: Scale) -> Space:
    """Names of suggestions are the fields that they are for: earlier runs of any sweep can be read so."""
    sizes = {changes["model.width"]: changes for changes in scale.sizes.values()}
    depths = sorted({changes["model.depth"] for changes in scale.sizes.values()})
    counts = [scale.experts // 2, scale.experts, 2 * scale.experts]

    def space(trial: Suggest) -> dict[str, Any]:
        width = trial.suggest_categorical("model.width", list(sizes))
        changes = {name: sizes[width][name] for name in ("model.heads", "model.mlp_dim")}
        changes |= {"model.width": width, "model.depth": trial.suggest_categorical("model.depth", depths)}
        kinds = [None, "token_choice", "expert_choice", "soft"]
        kind = trial.suggest_categorical(f"{_MOE}.router.kind", kinds)
        if kind is None:
            return changes

        def ask(field: str, choices: list[Any]) -> None:
            changes[f"{_MOE}.{field}"] = trial.suggest_categorical(f"{_MOE}.{field}", choices)

        changes[f"{_MOE}.router.kind"] = kind
        ask("num_experts", counts)
        if kind == "soft":
            ask("router.slots_per_expert", [1, 2, 4])
            return changes
        changes[f"{_MOE}.images_per_group"] = GROUP
        ask("router.capacity_factor", [0.5, 1.0, 1.5, 2.0])
        if kind == "token_choice":
            ask("router.k", [1, 2])
            ask("router.priority", ["none", "max"])
        return changes

    return space
