"""Operating points: what ``--set routing.*`` and ``--grid`` mean, and the points that are worth trying.

Source: V-MoE section 4.2 and appendix C (k, capacity and priority at inference); Implicit Bias in Soft MoE,
section 4.3 (expert subsets).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from moe.cost import model_costs
from moe.model import ModelConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from orchestrator.codec import override
from orchestrator.errors import UsageError

FIELDS = {  # setting of --set -> field of RoutingOverrides
    "routing.k": "k",
    "routing.capacity": "capacity_factor",
    "routing.priority": "priority",
    "routing.experts": "experts",
    "routing.subset_seed": "subset_seed",
    "routing.images_per_group": "images_per_group",
    "routing.random_blocks": "random_blocks",
}


def parse_point(assignments: Sequence[str]) -> RoutingOverrides:
    """Returns the point of ``routing.k=1`` and the like. Raises UsageError for other settings or values."""
    (point, *more) = parse_grid(assignments)
    if more:
        raise UsageError(f"{' '.join(assignments)}: give one value each; a list is written [0,5]")
    return point


def parse_grid(assignments: Sequence[str]) -> list[RoutingOverrides]:
    """Returns the product of ``routing.k=1,2`` and the like. A list has brackets: ``[0,5],[1]``."""
    choices: dict[str, list[Any]] = {}
    for text in assignments:
        name, equals, values = text.partition("=")
        if not equals or name not in FIELDS:
            raise UsageError(f"{text!r}: an operating point has {', '.join(FIELDS)}; write e.g. routing.k=1")
        choices.setdefault(FIELDS[name], []).extend(_values(values))
    try:
        return [
            override(AS_TRAINED, dict(zip(choices, values, strict=True)))
            for values in product(*choices.values())
        ]
    except UsageError as error:
        raise UsageError(f"{' '.join(assignments)}: {error}") from None


def _values(text: str) -> list[Any]:
    try:
        return json.loads(f"[{text}]")
    except ValueError:  # a word, such as max
        return text.split(",")


def point_name(point: RoutingOverrides) -> str:
    """The point as text: ``k=1 capacity=0.3``, or ``as trained`` without changes."""
    settings = settings_of(point).items()
    texts = [f"{name.removeprefix('routing.')}={_text(value)}" for name, value in settings]
    return " ".join(texts) or "as trained"


def point_key(point: RoutingOverrides) -> str:
    """`point_name` in characters that MLflow accepts in a metric's name."""
    return point_name(point).replace("=", "-").replace(" ", "_").replace(",", ".")


def settings_of(point: RoutingOverrides) -> Mapping[str, Any]:
    """The settings that differ from the model as trained: ``{"routing.k": 1}``."""
    values = {name: (getattr(point, field), getattr(AS_TRAINED, field)) for name, field in FIELDS.items()}
    return {name: value for name, (value, trained) in values.items() if value != trained}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def default_grid(config: ModelConfig) -> list[RoutingOverrides]:
    """The model as trained, and the settings that its router can run with, among them each image by itself. A
    dense model has none.
    """
    if not config.moe:
        return [AS_TRAINED]
    alone = [RoutingOverrides(images_per_group=1)] if config.images_per_group > 1 else []
    return possible(config, [*alone, *config.moe.router.grid(config.moe.num_experts)])


def possible(config: ModelConfig, wanted: Iterable[RoutingOverrides]) -> list[RoutingOverrides]:
    """The model as trained, then the wanted points that it can run."""
    points = dict.fromkeys(wanted)
    return [AS_TRAINED, *(p for p in points if p != AS_TRAINED and why_impossible(config, p) is None)]


def why_impossible(config: ModelConfig, point: RoutingOverrides) -> str | None:
    """The reason why a model cannot run at a point; None if it can."""
    try:
        config.check_overrides(point)
        model_costs(config, point)
    except ValueError as error:
        return str(error)
    return None
