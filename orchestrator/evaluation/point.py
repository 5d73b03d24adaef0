"""Operating points by name: what `--set routing.*` says, and what tables and metrics call it."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from moe.overrides import AS_TRAINED, RoutingOverrides
from orchestrator.errors import UsageError

FIELDS = {  # of RoutingOverrides, by what users call them
    "k": "k",
    "capacity": "capacity_factor",
    "priority": "priority",
    "experts": "experts",
    "random_blocks": "random_blocks",
}
HELP = (
    "routing.k=1, routing.capacity=0.3, routing.priority=none|max|sum, routing.experts=2 (the best 2 of each"
    " group) or [0,5] (these), routing.random_blocks=[1]"
)


def parse_point(assignments: Sequence[str]) -> RoutingOverrides:
    """Of ``routing.k=1`` and the like. Raises UsageError for what is no setting, or no value of it."""
    changes: dict[str, Any] = {}
    for text in assignments:
        field, equals, value = text.partition("=")
        if not equals or (name := FIELDS.get(field.removeprefix("routing."))) is None or "." not in field:
            raise UsageError(f"--set {text!r}: an operating point has {HELP}")
        if name in changes:
            raise UsageError(f"--set {' '.join(assignments)}: {field} is named twice")
        changes[name] = _value(field, value)
    try:
        return RoutingOverrides(**changes)
    except ValueError as error:
        raise UsageError(f"--set {' '.join(assignments)}: {error}") from None


def parse_grid(assignments: Sequence[str]) -> list[RoutingOverrides]:
    """The product of ``routing.k=1,2`` and the like; lists in brackets: ``experts=[0,5],[1]``."""
    choices: dict[str, list[str]] = {}
    for text in assignments:
        field, _, values = text.partition("=")
        if field in choices:
            raise UsageError(f"--grid {' '.join(assignments)}: write the values of {field} in one, as 1,2")
        choices[field] = [f"{field}={value}" for value in _split(values)]
    return [parse_point(point) for point in product(*choices.values())]


def point_name(point: RoutingOverrides) -> str:
    """``k=1 capacity=0.3``; ``as trained`` without changes."""
    return " ".join(f"{field}={_shown(value)}" for field, value in settings_of(point).items()) or "as trained"


def point_key(point: RoutingOverrides) -> str:
    """`point_name` of characters that MLflow takes in a metric's name."""
    return point_name(point).replace("=", "-").replace(" ", "_").replace(",", ".")


def settings_of(point: RoutingOverrides) -> Mapping[str, Any]:
    """What differs from the model as trained, by what users call it."""
    return {
        field: getattr(point, name)
        for field, name in FIELDS.items()
        if getattr(point, name) != getattr(AS_TRAINED, name)
    }


def _value(field: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        if field.endswith("priority"):
            return text
        raise UsageError(f"--set {field}={text}: write a number, or a list as [0,5]") from None
    if field.endswith("random_blocks") and isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _split(values: str) -> Sequence[str]:
    """At the commas that stand in no brackets."""
    parts, depth = [""], 0
    for character in values:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
