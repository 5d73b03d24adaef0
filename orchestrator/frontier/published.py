"""Points that the papers printed, for reference beside a sweep's own: drawn hollow, never counted.

`published.csv` holds them in our metrics: fractions and FLOPs, where the papers have percent and exaFLOPs.
Soft MoE counts 3 FLOPs of training for a multiply-add of the forward pass, V-MoE 6: each is given in both.
V-MoE has core-days, two to a chip of TPUv3. JFT-300M and JFT-4B have different classes, so they are two
metrics. `imagenet/acc1` is after fine-tuning.
"""

import csv
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, kw_only=True)
class Published:
    source: str  # paper and table
    model: str
    family: str
    cost: float
    quality: float


def published(quality_name: str, cost_name: str) -> tuple[Published, ...]:
    """The points that have both metrics; none where a metric is not among the papers'."""
    table = files("orchestrator.frontier").joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(
        Published(
            source=row["source"],
            model=row["model"],
            family=row["family"],
            cost=float(row[cost_name]),
            quality=float(row[quality_name]),
        )
        for row in csv.DictReader(table.splitlines())
        if row.get(cost_name) and row.get(quality_name)
    )
