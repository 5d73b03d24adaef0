"""Configs of models that earlier versions wrote, in today's words."""

from collections.abc import Mapping
from typing import Any


def upgraded_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a model's config as today's version writes it."""
    without = {"num_classes"} if model.get("kind") in ("decoder", "two_towers") else set()  # until 0.2
    return {name: value for name, value in model.items() if name not in without}
