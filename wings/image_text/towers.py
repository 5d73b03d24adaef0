"""Sweeps of two towers: changes of the image tower, and arms with towers that are trained already."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moe.codec import to_dict
from orchestrator.checkpoint.models import ModelRef
from orchestrator.codec import override
from orchestrator.errors import UsageError
from orchestrator.planning.preflight import check_claims
from orchestrator.sweeps.scales import Changes
from orchestrator.sweeps.sweep import Sweep


def in_image_tower(changes: Changes) -> dict[str, Any]:
    """Returns changes of a model as those of the image tower of two."""
    return {name.replace("model.", "model.image.", 1): value for name, value in changes.items()}


def beside_towers(sweep: Sweep, towers: Sequence[ModelRef]) -> Sweep:
    """Returns the sweep with an arm for each tower, called after its run, in place of its own arms, and with
    those of its claims that are about such arms.

    Images come to a tower as in its own training's evaluation.

    Raises:
        UsageError: for towers of the same name.
    """
    names = [tower.name.replace("/trials/", "-").replace("/", "-") for tower in towers]
    if equal := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"two towers are called {equal[0]}")
    arms = {}
    for name, tower in zip(names, towers, strict=True):
        arms[name] = {"model.image": to_dict(tower.run.model), "train.init_from": tower.location}
        arms[name] |= {f"data.{field}": value for field, value in tower.run.data.eval_settings().items()}
    base = override(sweep.base, {"model.image": to_dict(towers[0].run.model)})  # what is printed of all
    found = replace(sweep, base=base, arms=arms, published={}, claims=())
    return replace(found, claims=tuple(claim for claim in sweep.claims if _compares(claim, found)))


def _compares(claim: str, sweep: Sweep) -> bool:
    """Returns whether a claim is about some of the towers."""
    try:
        return bool(check_claims(replace(sweep, claims=(claim,))))
    except UsageError:
        return False
