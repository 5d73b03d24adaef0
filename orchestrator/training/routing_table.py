"""The table of a run's routing: statistics per layer, or per layer and expert, of its last report.

Which these are, routers say (`moe.routing.Statistic.per`). A report has means over all layers and experts.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe.config import members
from moe.model import ModelConfig
from moe.routers import RouterConfig
from orchestrator.runs.measurements import table
from orchestrator.runs.metrics_file import Metrics

PREFIX = "routing"  # of names of values that are for the table, and not for the report


def in_table(stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns those of a model's statistics that the table has: (layers,), or (layers, E) per expert."""
    described = {name: each for router in members(RouterConfig) for name, each in router.described.items()}
    return {
        f"{PREFIX}/{name}": layers
        for name, layers in stats.items()
        if name in described and described[name].per
    }


def parted(values: Metrics) -> tuple[Metrics, Metrics]:
    """Returns the values that are reported, and those of the table, whose names end in their places."""
    of_table = {name: value for name, value in values.items() if name.startswith(f"{PREFIX}/")}
    return {name: value for name, value in values.items() if name not in of_table}, of_table


def routing_table(values: Metrics, model: ModelConfig, step: int) -> dict[str, Any]:
    """Returns the table. ``block`` counts the model's units from 0; ``expert`` is None in rows of a layer."""
    blocks, rows = model.moe_blocks(), []
    for name, value in values.items():
        _, statistic, layer, *expert = name.split("/")
        rows.append((step, statistic, blocks[int(layer)], int(expert[0]) if expert else None, value))
    return table(
        dict(zip(("step", "statistic", "block", "expert", "value"), zip(*rows, strict=True), strict=True))
    )
