"""Operating points of a sweep's models: measurements of the sweep, and points of its frontier."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from moe.overrides import RoutingOverrides
from orchestrator import storage
from orchestrator.checkpoint.models import ModelRef, load_checkpoint
from orchestrator.costs import FORWARD, cost_of
from orchestrator.errors import UsageError
from orchestrator.evaluation.points import parse_point
from orchestrator.frontier.frontier import Frontier, operating_front
from orchestrator.frontier.points import OPERATING_POINT, TOGETHER, Point, is_complete
from orchestrator.runs.measurements import measurements, metric_name, rows_of
from orchestrator.runs.run_directory import read_json
from orchestrator.sweeps.sweep import settings

OPERATING = "operating_points.json"  # a table of a measurement; in sweeps of 0.3 and before a file
AS_TRAINED = "as trained"
TIME = "perf/ms_per_image"
QUARTILES = (f"{TIME}_q25", f"{TIME}_q75")
COSTS = (FORWARD, TIME)
TIMING = (*QUARTILES, "batch", "device", "rounds", "repeats")
DETAILS = {"val/acc5": "accuracy @5", "val/loss": "loss", "batch": "timed batch", "device": "timed on"}

PointRow = Mapping[str, Any]


def picture(cost_name: str) -> str:
    """Returns the name of the picture over a cost."""
    cost = cost_of(cost_name)
    return (
        "operating.png"
        if cost_name == FORWARD
        else f"operating-{metric_name(cost.unit if cost else cost_name)}.png"
    )


def table_of(rows: Sequence[PointRow]) -> dict[str, list[Any]]:
    """Column -> values, as MLflow stores a table."""
    metrics = [name for name in rows[0] if name.startswith("val/")] if rows else []
    columns = ("run", "point", *metrics, *COSTS, *TIMING)
    return {name: [row[name] for row in rows] for name in columns}


def operating_rows(directory: str) -> Sequence[PointRow]:
    """Returns the rows that `jobs/evaluate.py --grid` measured last for the sweep in a directory; empty if it
    never ran on it. Times of different measurements do not compare.
    """
    tables = [each.tables[OPERATING] for each in measurements(directory) if OPERATING in each.tables]
    return rows_of(tables[-1]) if tables else read_json(storage.join(directory, OPERATING)) or []


def with_operating(frontier: Frontier, rows: Sequence[PointRow]) -> Frontier:
    """The frontier with its operating points.

    The time of a model as trained becomes the one that was measured beside its operating points, and is
    unknown without such a measurement: the time of a training's validation does not compare with these.

    An operating point is the mean over the seeds of an arm, and left out if a seed was not measured there.
    Nothing changes where quality is another metric.
    """
    if not rows or frontier.quality_name not in rows[0]:
        return frontier
    by_run: dict[str, dict[str, PointRow]] = {}
    for row in rows:
        by_run.setdefault(row["run"], {})[row["point"]] = row
    points, operating = [], []
    for point in frontier.points:
        seeds = [by_run.get(run_id, {}) for run_id in point.run_ids]
        trained = _timed(point, [seed.get(AS_TRAINED, {}) for seed in seeds], frontier.cost_name)
        points.append(trained)
        for name in seeds[0] if is_complete(point) else ():
            if name != AS_TRAINED and all(name in seed for seed in seeds):
                operating.append(_operating(trained, name, [seed[name] for seed in seeds], frontier))
    retrained = tuple(_timed(point, [{}], frontier.cost_name) for point in frontier.retrained)
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


def frontier_of_models(models: Sequence[ModelRef], rows: Mapping[str, Sequence[PointRow]]) -> Frontier:
    """The frontier of models as trained: the first of the rows of each location. Raises UsageError if models
    were trained for different qualities.
    """
    quality, *others = dict.fromkeys(model.run.task.quality for model in models)
    if others:
        raise UsageError(f"qualities of models differ, and do not compare: {', '.join([quality, *others])}")
    points = []
    for model in models:
        row, found = rows[model.location][0], settings(model.run)
        points.append(
            Point(
                arm=model.name,
                family=model.run.model.family(),
                cost=row[COSTS[0]],
                quality=row[quality],
                size=float(found["capacity"]),
                run_id=model.location,
                status="finished",
                costs={name: row[name] for name in COSTS},
                settings=found,
                load_run=load_checkpoint,
            )
        )
    chance = max(model.run.task.chance(model.run.model) for model in models)
    highest = max(point.cost for point in points)
    return Frontier(
        name="Operating points",
        quality_name=quality,
        cost_name=COSTS[0],
        points=tuple(points),
        reference={quality: chance, COSTS[0]: 1.1 * highest},
    )


def _timed(point: Point, seeds: Sequence[PointRow], cost_name: str) -> Point:
    """A trained point with the costs measured for its seeds as trained; its time is unknown without them."""
    costs = {cost: _mean(seeds, cost) for cost in COSTS if is_complete(point)}
    known = {cost: value for cost, value in costs.items() if math.isfinite(value)}
    time = known.get(TIME, math.nan)
    return replace(
        point,
        cost=time if cost_name == TIME else point.cost,
        costs={**point.costs, TIME: time, **known},
        spreads=_spreads(seeds) if TIME in known else point.spreads,
    )


def _operating(trained: Point, name: str, seeds: Sequence[PointRow], frontier: Frontier) -> Point:
    costs = {cost: _mean(seeds, cost) for cost in COSTS}
    details = {
        label: _mean(seeds, column) if column.startswith("val/") else seeds[0][column]
        for column, label in DETAILS.items()
        if column in seeds[0]
    }
    return replace(
        trained,
        arm=f"{trained.arm}: {name}",
        cost=costs.get(frontier.cost_name, math.nan),
        costs=costs,
        spreads=_spreads(seeds),
        quality=_mean(seeds, frontier.quality_name),
        qualities=each if len(each := tuple(seed[frontier.quality_name] for seed in seeds)) > 1 else (),
        details=details,
        settings={**trained.settings, **_group_in(name), OPERATING_POINT: name},
        load_run=None,
    )


def points_in_files(frontier: Frontier) -> dict[str, RoutingOverrides]:
    """Returns the operating points on the front over forward FLOPs of which files can be written, by name."""
    front = operating_front(frontier.at_cost(FORWARD))
    return {p.arm: point_of(p) for p in front if OPERATING_POINT in p.settings and p.in_file}


def point_of(point: Point) -> RoutingOverrides:
    """Returns the settings of an operating point, and for an arm those of its training."""
    return parse_point([f"routing.{part}" for part in str(point.settings.get(OPERATING_POINT, "")).split()])


def _group_in(name: str) -> dict[str, float]:
    """The number of images that the point of this name routes together; empty if it is that of training."""
    settings: dict[str, str] = {}
    for part in name.split():
        field, _, settings[field] = part.partition("=")
    return {TOGETHER: float(settings[TOGETHER])} if TOGETHER in settings else {}


def _how_timed(rows: Sequence[PointRow]) -> str:
    row = rows[0]
    return (
        f"Times per image are medians and quartiles over {row['rounds']} rounds of {row['repeats']} forward"
        f" passes in which all models and settings take turns: batch {row['batch']}, {row['device']}."
    )


def _spreads(seeds: Sequence[PointRow]) -> dict[str, tuple[float, float]]:
    low, high = QUARTILES
    return {TIME: (_mean(seeds, low), _mean(seeds, high))}


def _mean(rows: Sequence[PointRow], column: str) -> float:
    """The mean over seeds; NaN if one of them was not measured."""
    return fmean(row.get(column, math.nan) for row in rows)
