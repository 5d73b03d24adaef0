"""The table of runs of the study on Fashion-MNIST, and differences between its arms at equal cost.

Arms may have different seeds so far: they are compared with those that they share.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench.harness import RESULTS
from orchestrator.frontier.claims import parse_claim
from orchestrator.frontier.paired import Relation, decide, meets, paired_differences
from orchestrator.frontier.points import Point
from orchestrator.sweeps.catalog import make_sweep
from orchestrator.sweeps.sweep import Sweep

TABLE, ONE_RATE = RESULTS / "study.json", RESULTS / "study-one-rate.json"
COST, VAL, TEST = "cost/train_flops_6mac", "val/acc1", "test/acc1"

Arms = dict[str, dict[str, Any]]
Table = Mapping[str, Any]


def read_table(path: Path) -> dict[str, Any] | None:
    """Returns a table of runs; that of the earlier study has its seeds in one place."""
    if not path.exists():
        return None
    table = json.loads(path.read_text())
    for entry in table["arms"].values():
        entry.setdefault("seeds", table["seeds"])
    return table


def sweep_of(table: Table) -> Sweep:
    return make_sweep(table.get("sweep", "study"), "tiny")


def widths(table: Table) -> list[str]:
    return sorted({arm.partition("-")[0] for arm in table["arms"]}, key=lambda width: int(width[1:]))


def kinds(table: Table) -> list[str]:
    """Returns the kinds of arms in the order of the sweep."""
    planned = dict.fromkeys(arm.partition("-")[2] for arm in sweep_of(table).arms)
    return [kind for kind in planned if any(arm.partition("-")[2] == kind for arm in table["arms"])]


def by_seed(entry: Mapping[str, Any], quality: str) -> dict[int, float]:
    values = [curve[-1] for curve in entry[VAL]] if quality == VAL else entry[quality]
    return dict(zip(entry["seeds"], values, strict=True))


def judged_by(table: Table) -> str:
    """Returns the test accuracy if every arm has it, else that on the validation images."""
    return TEST if all(TEST in entry for entry in table["arms"].values()) else VAL


class Difference(NamedTuple):
    """An arm minus the arms of a kind at equal cost, for each seed that all of them have."""

    arm: str
    against: str
    values: list[float]


def against(table: Table, quality: str, arm: str, kind: str) -> Difference | None:
    """Returns the difference of an arm to the two arms of a kind whose costs are around its own; None if a
    kind has no such arms, or fewer than two seeds are shared.
    """
    arms: Arms = table["arms"]
    near = sorted((a for a in arms if a.partition("-")[2] == kind), key=lambda a: arms[a][COST])
    right = min(max(1, sum(arms[a][COST] < arms[arm][COST] for a in near)), len(near) - 1)
    three = (arm, *near[right - 1 : right + 1])
    found = {each: by_seed(arms[each], quality) for each in three}
    seeds = sorted(set.intersection(*(set(values) for values in found.values())))
    if len(three) < 3 or len(seeds) < 2:
        return None
    point, *curve = (_point(each, arms[each][COST], [found[each][seed] for seed in seeds]) for each in three)
    return Difference(arm, kind, paired_differences(point, curve)) if meets(curve, point) else None


def _point(arm: str, cost: float, values: Sequence[float]) -> Point:
    return Point(
        arm=arm,
        family="",
        cost=cost,
        quality=fmean(values),
        qualities=tuple(values),
        size=1,
        run_id=arm,
        status="finished",
    )


def outcomes(table: Table, claim: str) -> list[tuple[Difference, Relation]]:
    """Returns the comparisons of a claim, those of each width decided together."""
    read, points = parse_claim(claim), [_point(arm, entry[COST], [0]) for arm, entry in table["arms"].items()]
    others = dict.fromkeys(point.arm.partition("-")[2] for point in read.worse.of(points))
    found: list[tuple[Difference, Relation]] = []
    for width in widths(table):
        arms = [point.arm for point in read.better.of(points) if point.arm.startswith(f"{width}-")]
        each = [against(table, judged_by(table), arm, kind) for arm in arms for kind in others]
        known = [difference for difference in each if difference]
        found += zip(known, decide([difference.values for difference in known]), strict=True)
    return found


def pair(table: Table, more: str, less: str) -> list[float]:
    if not {more, less} <= table["arms"].keys():
        return []
    first, second = (by_seed(table["arms"][arm], judged_by(table)) for arm in (more, less))
    return [first[seed] - second[seed] for seed in first if seed in second]
