"""The points that papers print: drawn beside a sweep that measures the same, and as pages of their own."""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path

from moe.guests import guests, offered
from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point

# Names of ImageNet-1k as the last part of a path. A subset of it has another name.
IMAGENET = ("imagenet", "imagenet-1k", "imagenet1k", "imagenet2012", "in1k", "ilsvrc2012")
IMAGENET_CLASSES = 1000
# Our metric on ImageNet -> the papers'. Validation accuracy has none: the papers train on JFT and fine-tune.
SAME_ON_IMAGENET = {f"fewshot/acc_{shots}shot": f"imagenet/acc_{shots}shot" for shots in (1, 5, 10)}


# Parameters of the dense model in those of B, by the letter of its size: Soft MoE, table 1.
DENSE = {"S": 33 / 108, "B": 1.0, "L": 333 / 108, "H": 669 / 108}

# Figures and tables with a cost and a quality for each model: name -> source, quality, cost.
DRAWABLE: dict[str, tuple[str, str, str]] = offered("FIGURES")


def papers_metric(quality: str, data: str, classes: int | None = None) -> str | None:
    """The papers' name of a quality that was measured on the data set at a path; None if it is not theirs.

    Args:
        classes: of the data set, if known.
    """
    name = data.rstrip("/").rsplit("/", 1)[-1].lower()
    same = name in IMAGENET and classes in (None, IMAGENET_CLASSES)
    return SAME_ON_IMAGENET.get(quality) if same else None


def published(quality: str, cost: str) -> tuple[Point, ...]:
    """The published points with a quality; their cost is NaN where it is not printed."""
    points = {}
    for row in _rows():
        if row[quality]:
            point = _point(row, quality, cost)
            # Tables of one paper repeat runs.
            points.setdefault((point.family, point.quality, *point.costs.values()), point)
    return tuple(points.values())


def published_frontier(name: str) -> Frontier:
    """A figure or a table of a paper as a frontier. Raises UsageError for an unknown name."""
    if name not in DRAWABLE:
        raise UsageError(f"no published figure {name!r}; known: {', '.join(DRAWABLE)}")
    source, quality, cost = DRAWABLE[name]
    rows = [row for row in _rows() if row["source"] == source and row[quality] and row[cost]]
    points = tuple(replace(_point(row, quality, cost), size=_dense(row["model"])) for row in rows)
    # FLOPs of training are shown by one convention, that of the cost or 3 for a multiply-add.
    shown = {metric for p in points for metric in p.costs} - {"cost/train_flops_6mac"} | {cost}
    costs = {metric: 1.1 * max(p.costs.get(metric, 0.0) for p in points) for metric in sorted(shown)}
    return Frontier(
        name=name,
        cost_name=cost,
        quality_name=quality,
        points=points,
        reference={quality: 0.0, **costs},
        note=f"As printed in {source}; pretrained on {', '.join({row['pretrained_on']: 0 for row in rows})}."
        " Nothing of it was trained here.",
        size_title="Parameters of the dense model (B = 1)",
    )


def _dense(model: str) -> float:
    """The size of a model like "Soft MoE L/16 128E"; NaN without a letter of `DENSE`."""
    letter = re.search(r"\b([SBLH])/\d", model)
    return round(DENSE[letter[1]], 1) if letter else math.nan


def _rows() -> list[dict[str, str]]:
    folders = [Path(folder) for guest in guests() for folder in guest.__path__]
    tables = (path for folder in folders for path in folder.glob("*/published.csv"))
    return [row for table in sorted(tables) for row in csv.DictReader(table.open(encoding="utf-8"))]


def _point(row: dict[str, str], quality: str, cost: str) -> Point:
    # "Soft MoE S/16 128E 4M steps, cooldown 50k"
    model, steps, _ = re.match(r"(.+?)(?: ([0-9.]+)M steps(.*))?$", row["model"]).groups("")  # pyright: ignore[reportOptionalMemberAccess]
    costs = {name: float(text) for name, text in row.items() if name.startswith(("cost/", "perf/")) and text}
    return Point(
        arm=row["model"],
        family=row["family"],
        cost=costs.get(cost, math.nan),
        quality=float(row[quality]),
        size=float(row["slots_per_token"] or math.nan),
        run_id="",
        status="finished",
        details={"source": row["source"], "pretrained on": row["pretrained_on"]},
        costs=costs,
        settings={"model": model} | ({"steps": 1e6 * float(steps)} if steps else {}),
    )
