"""Operating points of a sweep's models: a table of its MLflow run, and points of its frontier."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point, is_complete
from orchestrator.tracking.find import RunInfo

TABLE = "operating_points.json"  # artifact of the sweep's run; the tag of that name says how many it has
TAG = "operating_points"
AS_TRAINED = "as trained"
QUALITY = "val/acc1"
TIME = "perf/ms_per_image"
QUARTILES = (f"{TIME}_q25", f"{TIME}_q75")
COSTS = ("cost/forward_gflops_2mac", TIME)
PICTURES = {COSTS[0]: "operating.png", TIME: "operating-ms.png"}
TIMING = (*QUARTILES, "batch", "device", "rounds", "repeats")
COLUMNS = ("run", "point", QUALITY, "val/acc5", "val/loss", *COSTS, *TIMING)
DETAILS = {"val/acc5": "accuracy @5", "val/loss": "loss", "batch": "timed batch", "device": "timed on"}

Row = Mapping[str, Any]


def table_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in COLUMNS}


def read_operating(sweep: RunInfo) -> list[Row]:
    """The rows of `jobs/operating_points.py`; none if it did not look at the sweep."""
    if TAG not in sweep.tags:
        return []
    found = json.loads(sweep.read_text(TABLE))
    return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]


def with_operating(frontier: Frontier, rows: Sequence[Row]) -> Frontier:
    """The frontier with its operating points. The time of a model as trained is then the one that was taken
    beside theirs; without one it is unknown, for the time of a training's validation compares to none.

    A point is the mean over the seeds of an arm, its quartiles too, and is left out where one of them has it
    not. There are none where quality is another metric.
    """
    if frontier.quality_name != QUALITY or not rows:
        return frontier
    by_run: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_run.setdefault(row["run"], {})[row["point"]] = row
    points, operating = [], []
    for point in map(_untimed, frontier.points):
        seeds = [by_run.get(run_id, {}) for run_id in point.run_ids]
        for name in seeds[0] if is_complete(point) else ():
            if not all(name in seed for seed in seeds):
                continue
            same = [seed[name] for seed in seeds]
            costs = {cost: _mean(same, cost) for cost in COSTS}
            if name == AS_TRAINED:
                point = replace(point, costs={**point.costs, **costs}, spreads=_spreads(same))
            else:
                operating.append(_operating(point, name, same, costs, frontier.cost_name))
        points.append(point)
    retrained = tuple(map(_untimed, frontier.retrained))
    note = f"{frontier.note} {_how_timed(rows)}".strip()
    times = [point.costs[TIME] for point in points if point.costs[TIME] > 0]
    reference = {**frontier.reference, **({TIME: 1.1 * max(times)} if times else {})}
    return replace(
        frontier,
        points=tuple(points),
        retrained=retrained,
        operating=tuple(operating),
        reference=reference,
        note=note,
    )


def _how_timed(rows: Sequence[Row]) -> str:
    row = rows[0]
    if any(row.get(column) is None for column in TIMING):
        return "Times per image are medians whose quartiles are unknown, so no gain in time is claimed."
    return (
        f"Times per image are medians and quartiles over {row['rounds']} rounds of {row['repeats']} forward"
        f" passes in which all models and settings take turns: batch {row['batch']}, {row['device']}."
    )


def _untimed(point: Point) -> Point:
    return replace(point, costs={**point.costs, TIME: math.nan})


def _operating(
    trained: Point, name: str, same: Sequence[Row], costs: Mapping[str, float], cost_name: str
) -> Point:
    shown = [(label, same[0][column]) for column, label in DETAILS.items() if same[0].get(column) is not None]
    return replace(
        trained,
        arm=f"{trained.arm}: {name}",
        cost=costs.get(cost_name, math.nan),
        costs=costs,
        spreads=_spreads(same),
        quality=_mean(same, QUALITY),
        qualities=(),
        details=dict(shown),
        settings={**trained.settings, "operating point": name},
    )


def _spreads(same: Sequence[Row]) -> dict[str, tuple[float, float]]:
    low, high = QUARTILES
    return {TIME: (_mean(same, low), _mean(same, high))}


def _mean(rows: Sequence[Row], column: str) -> float:
    """NaN where a row has no such column: tables of earlier versions have no quartiles."""
    values: list[Any] = [row.get(column) for row in rows]
    return math.nan if None in values else fmean(values)
