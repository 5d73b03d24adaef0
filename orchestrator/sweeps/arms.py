"""The parts of the named sweeps: arms, their routers, and the space of a search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.checkpoint.models import ModelRef
from orchestrator.sweeps.answers import Space, Suggest
from orchestrator.sweeps.scales import UNCHANGED, Changes, Scale
from orchestrator.sweeps.sweep import Sweep

Arm = dict[str, Any]  # dotted changes of a run

MOE = "model.moe"
# Images whose tokens compete for slots, as in V-MoE's released configs; Soft MoE: always one. With several,
# the answer to an image depends on the others: sweeps that follow no paper route each image by itself.
GROUP = 8


@dataclass(frozen=True, kw_only=True)
class NamedSweep:
    """A sweep that is called after its function, which gets the scale with the changes of the user.

    Attributes:
        task: kind of the task of its runs: a scale whose base has another one needs a recipe for the sweep.
        has_own_model: runs at the scales alone that have a recipe for it.
        needs_weights: starts from trained weights (`train.init_from`).
        from_models: makes its arms of trained models, which the user names.
    """

    make: Callable[[Scale], Sweep]
    task: str = "classification"
    has_own_model: bool = False
    needs_weights: bool = False
    from_models: Callable[[Sweep, Sequence[ModelRef]], Sweep] | None = None

    @property
    def name(self) -> str:
        return self.make.__name__

    def __call__(self, scale: Scale, changes: Changes = UNCHANGED) -> Sweep:
        sweep = self.make(scale.of(self.name, changes))
        return replace(sweep, base=replace(sweep.base, name=self.name))

    def runs_at(self, scale: Scale) -> bool:
        """Returns whether the sweep has a recipe at a scale."""
        if self.has_own_model and self.name not in scale.bases:
            return False
        return scale.of(self.name, UNCHANGED).base.task.kind == self.task


def named(**traits: Any) -> Callable[[Callable[[Scale], Sweep]], NamedSweep]:
    """Returns a decorator that makes a `NamedSweep` of a function."""
    return lambda make: NamedSweep(make=make, **traits)


def moe(kind: str, num_experts: int, *, layers: str | tuple[int, ...] = "every_2", **router: Any) -> Arm:
    """An arm with experts; `router`: fields of the router, the kind of its affinity as ``affinity_kind``."""
    fields: Arm = {"layers": layers, "num_experts": num_experts, "router.kind": kind}
    fields |= {f"router.{name.replace('affinity_', 'affinity.')}": value for name, value in router.items()}
    return {f"{MOE}.{name}": value for name, value in fields.items()}


def grouped(kind: str, num_experts: int, *, images: int = GROUP, **others: Any) -> Arm:
    """An arm whose experts have slots for the tokens of some images together."""
    return moe(kind, num_experts, **others) | {f"{MOE}.images_per_group": images}


def token_choice(num_experts: int, k: int, capacity: float = 1.0, **others: Any) -> Arm:
    """C = round(k * T * capacity / E) slots per expert (V-MoE, section 2.4)."""
    return grouped("token_choice", num_experts, k=k, capacity_factor=capacity, **others)


def expert_choice(num_experts: int, c: float, **others: Any) -> Arm:
    """C = round(c * T / E) slots per expert (Routers in Vision MoE, section 3.1)."""
    return grouped("expert_choice", num_experts, capacity_factor=c, **others)


def soft(num_experts: int, slots_per_token: float, tokens: int, **others: Any) -> Arm:
    """The number of slots per expert that comes nearest to `slots_per_token`, at least one."""
    slots = max(1, round(slots_per_token * tokens / num_experts))
    return moe("soft", num_experts, slots_per_expert=slots, **others)


def seeds(scale: Scale, count: int) -> tuple[int, ...]:
    """Returns `count` seeds that follow from the seed of the base: others for every base."""
    first = count * scale.base.train.seed
    return tuple(range(first, first + count))


def families_space(scale: Scale, *, images: int = GROUP) -> Space:
    """Returns the search space at a scale: size, family, and the fields of each family. Token choice and
    expert choice route so many images together.

    Names of suggestions are the fields that they are for, so that earlier runs of any sweep can be read.
    """
    sizes = {changes["model.width"]: changes for changes in scale.sizes.values()}
    depths = sorted({changes["model.depth"] for changes in scale.sizes.values()})
    counts = [scale.experts // 2, scale.experts, 2 * scale.experts]

    def space(trial: Suggest) -> Arm:
        width = trial.suggest_categorical("model.width", list(sizes))
        changes = {name: sizes[width][name] for name in ("model.heads", "model.mlp_dim")}
        changes |= {"model.width": width, "model.depth": trial.suggest_categorical("model.depth", depths)}
        kinds = [None, "token_choice", "expert_choice", "soft"]
        kind = trial.suggest_categorical(f"{MOE}.router.kind", kinds)
        if kind is None:
            return changes

        def ask(field: str, choices: list[Any]) -> None:
            changes[f"{MOE}.{field}"] = trial.suggest_categorical(f"{MOE}.{field}", choices)

        changes[f"{MOE}.router.kind"] = kind
        ask("num_experts", counts)
        if kind == "soft":
            ask("router.slots_per_expert", [1, 2, 4])
            return changes
        changes[f"{MOE}.images_per_group"] = images
        ask("router.capacity_factor", [0.5, 1.0, 1.5, 2.0])
        if kind == "token_choice":
            ask("router.k", [1, 2])
            ask("router.priority", ["none", "max"])
        return changes

    return space
