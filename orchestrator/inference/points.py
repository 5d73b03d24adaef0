"""What a sweep's arms take to use, as costs of the points of its frontier."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from orchestrator.costs import ENERGY, MS, MS_P95, USD, known_costs
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point
from orchestrator.inference.measure import ENERGIES, MeasuredRow

T = TypeVar("T")
_TIMES = ("p50", "q25", "q75")

# cost -> its value, lower and upper end; not above 0 if it is not known
_COSTS: Mapping[str, Callable[[MeasuredRow], tuple[float, float, float]]] = {
    MS: lambda row: tuple(row[name] for name in _TIMES),
    MS_P95: lambda row: (row["p95"], row["p95"], row["p95_high"]),
    "infer/memory_mib": lambda row: (row["memory_mib"],) * 3,
    "infer/file_mb": lambda row: (row["file_mb"],) * 3,
    ENERGY: lambda row: tuple(row.get(name, math.nan) / row["batch"] for name in ENERGIES),
    USD: lambda row: tuple(
        row["usd_per_hour"] * row["threads"] * row[name] / row["batch"] / MS_PER_HOUR * 1e6 for name in _TIMES
    ),
}
_BATCH_COSTS: Mapping[str, Callable[[MeasuredRow], tuple[float, float, float]]] = {
    "infer/batch_ms_per_image": lambda row: tuple(row[name] / row["batch"] for name in _TIMES),
}
MS_PER_HOUR = 3.6e6
INFERENCE = (*_COSTS, *_BATCH_COSTS)


def with_inference(
    frontier: Frontier,
    rows: Sequence[MeasuredRow],
    batch_rows: Sequence[MeasuredRow] = (),
    *,
    usd_per_hour: float = math.nan,
) -> Frontier:
    """Returns the frontier with the costs of rows of `measure.measured_rows`: of single calls, and of a batch
    that is divided by its images. They replace those of any other measurement, and arms that were not
    measured have none. `usd_per_hour`: the price of a core, of which each thread takes one; NaN: unknown.
    """
    costs, spreads = dict[str, dict[str, float]](), dict[str, dict[str, tuple[float, float]]]()
    for group, known in ((rows, _COSTS), (batch_rows, _BATCH_COSTS)):
        for row in (row for row in group if not row["why_not"]):
            for name, cost in known.items():
                value, low, high = cost({**row, "usd_per_hour": usd_per_hour})
                if value > 0:
                    costs.setdefault(row["arm"], {})[name] = value
                if low < high:
                    spreads.setdefault(row["arm"], {})[name] = (low, high)
    if not costs:
        return frontier

    def measured(point: Point) -> Point:
        found, ends = costs.get(point.arm, {}), spreads.get(point.arm, {})
        unknown = math.nan if frontier.cost_name in INFERENCE else point.cost
        return replace(
            point,
            cost=found.get(frontier.cost_name, unknown),
            costs=_without(point.costs) | found,
            spreads=_without(point.spreads) | ends,
        )

    drawn = [name for name, cost in known_costs().items() if cost.drawn or name == frontier.cost_name]
    names = [name for name in INFERENCE if name in drawn]
    highest = {name: max((of[name] for of in costs.values() if name in of), default=0.0) for name in names}
    reference = {name: 1.1 * most for name, most in highest.items() if most}
    return replace(
        frontier,
        points=tuple(map(measured, frontier.points)),
        operating=tuple(map(measured, frontier.operating)),
        reference={**frontier.reference, **reference},
        note=" ".join(filter(None, [frontier.note, _how(rows or batch_rows, batch_rows, usd_per_hour)])),
    )


def _without(known: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in known.items() if name not in INFERENCE}


def _how(rows: Sequence[MeasuredRow], batch_rows: Sequence[MeasuredRow], usd_per_hour: float) -> str:
    row = next((row for row in rows if not row["why_not"]), rows[0])
    runtime = {"onnx": "ONNX files in onnxruntime", "torch": "eager torch"}[row["runtime"]]
    batch = f", batches of {batch_rows[0]['batch']} likewise" if batch_rows else ""
    threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
    doubt = "" if row["quiet"] else " Other work disturbed them: the order is right, the level may be high."
    price = f" Money is {usd_per_hour:g} USD an hour for each thread." if usd_per_hour > 0 else ""
    return (
        f"Times of inference are of {runtime}, {threads}, {row['precision']}, on {row['machine']}, measured"
        f" alone and in turns over {row['rounds']} rounds: medians and quartiles{batch}.{doubt}{price}"
    )
