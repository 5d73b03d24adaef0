"""Configs of models that earlier versions wrote, in today's words."""

from collections.abc import Mapping
from typing import Any


def upgraded_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a model's config as today's version writes it."""
    without = {"num_classes"} if model.get("kind") in ("decoder", "two_towers") else set()  # until 0.2
    return {name: renamed(value) for name, value in model.items() if name not in without}


def renamed(value: Any) -> Any:
    """Returns a part of a config whose token choice has today's word for its loss of GShard."""
    if not isinstance(value, Mapping):
        return value
    old = value.get("kind") == "token_choice"  # the loss of top-k kept the name
    return {
        "gshard_balance_weight" if old and n == "balance_weight" else n: renamed(v) for n, v in value.items()
    }
