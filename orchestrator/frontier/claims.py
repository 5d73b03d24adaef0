"""Claims about a sweep as statements that can be checked: which arm has the higher quality, all else equal.

    router=expert_choice beats router=token_choice at equal size, capacity, affinity
    family=soft beats best family=token_choice|expert_choice at equal size, capacity
    priority=max loses less than priority=none at equal k as capacity falls
    kind=soft-e16|fine beats kind=dense at equal cost

A side is a list of conditions on settings, which hold together; `|` separates alternatives. `best` before it
takes the best of its points in each cell. A cell is a combination of the settings named after `at equal` that
has points on both sides; without `best` every pair of points in it is a comparison. Only complete points
count. A setting that a point lacks equals nothing. Every point has the settings `arm`, `family` and `kind`,
which is the arm's name after the first dash: before it stands the name of its size.

Settings are equal if they are the same. Those of `NEAR` need not be: a point of the second side meets the
points of the first side whose number is the nearest by ratio (the smaller of two as near), and none if that
differs by the factor of `NEAR` or more.

With `cost` among the equal settings, every point of the first side meets the points of each kind of the
second as a curve (`paired.py`). Differences are paired by seed, and the 5 % are those of all comparisons at a
size together, by Holm. Two points whose difference is within .003 of 0, at 5 % in the same way, are equal,
and the claim fails.

`loses less` compares what the sides lose from the highest value of the falling setting to each lower one.

Points with several seeds each are compared by Welch's t test: a difference that is not significant at 5 % is
undecided. The error of a single seed is unknown. It counts as 0, the least that it can be, and a verdict that
rests on such comparisons says that it is one of the mean values.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from scipy.special import stdtrit

from orchestrator.frontier.paired import SIGNIFICANCE, Relation, decide, interval, meets, paired_differences
from orchestrator.frontier.points import Point, is_complete

FORM = (
    "[best] NAME=VALUE[|VALUE ...][, NAME!=VALUE ...] beats [best] NAME=VALUE[, ...]"
    " [at equal NAME[, NAME ...]], or .. loses less than .. [at equal ..] as NAME falls"
)
# Setting -> factor. Slots are whole: with 32 experts a capacity of 1 is .98 for 392 tokens and 1.306 for 49.
NEAR = {"capacity": 1.4}

COST = "cost"
EVERY_POINT = ("arm", "family", "kind", COST)  # has them

_CONDITION = r"[^=!,|]+!?=[^=!,|]+?(?:\|[^=!,|]+?)*"
_SIDE = rf"(best\s+(?:of\s+)?)?({_CONDITION}(?:,{_CONDITION})*)"
_NAMES = r"([^=,]+(?:,[^=,]+)*?)"
_CLAIM = re.compile(
    rf"\s*{_SIDE}\s+(?:beats\s+{_SIDE}(?:\s+at\s+equal\s+{_NAMES})?"
    rf"|loses\s+less\s+than\s+{_SIDE}(?:\s+at\s+equal\s+{_NAMES})?\s+as\s+([^=,\s]+)\s+falls)\s*",
    re.DOTALL,
)


class Condition(NamedTuple):
    name: str
    values: tuple[str, ...]
    equal: bool  # the setting must be one of the values, or none of them


class Side(NamedTuple):
    text: str
    conditions: tuple[Condition, ...]
    best: bool  # only the best point of a cell takes part

    def of(self, points: Iterable[Point]) -> list[Point]:
        """The points for which the conditions hold."""
        return [point for point in points if self._holds(_settings(point))]

    def taking_part(self, points: list[Point]) -> list[Point]:
        return [max(points, key=lambda point: point.quality)] if self.best and points else points

    def _holds(self, settings: Mapping[str, str]) -> bool:
        return all((settings.get(name) in values) == equal for name, values, equal in self.conditions)


class Claim(NamedTuple):
    better: Side
    worse: Side
    equal: tuple[str, ...]
    falling: str | None  # the setting from whose highest value losses count

    def settings(self) -> set[str]:
        """The names of all settings that the claim mentions."""
        names = {condition.name for condition in self.better.conditions + self.worse.conditions}
        return names | {*self.equal} | ({self.falling} if self.falling else set())


class Comparison(NamedTuple):
    """The qualities of `more` have the higher sum, if the claim is true."""

    where: str
    more: tuple[Point, ...]
    less: tuple[Point, ...]

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.where, _texts(self.more), _texts(self.less)]))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How often a claim holds: its comparisons with their outcomes."""

    claim: str
    outcomes: tuple[tuple[Comparison, Relation], ...]

    @property
    def holds(self) -> bool | None:
        """True if every comparison holds, False if one fails, else None: undecided, or there is none."""
        found = {outcome for _, outcome in self.outcomes}
        return False if found & {"worse", "equal"} else True if found == {"better"} else None

    @property
    def by_values_alone(self) -> bool:
        """Whether `holds` would be undecided without the comparisons that have a single seed."""
        errors_known = {outcome for comparison, outcome in self.outcomes if not has_single_seed(comparison)}
        if self.holds:
            return self.single_seeds > 0
        return self.holds is False and not errors_known & {"worse", "equal"}

    @property
    def single_seeds(self) -> int:
        """Comparisons in which a point has one seed, so that its error is unknown."""
        return sum(has_single_seed(comparison) for comparison, _ in self.outcomes)

    def of(self, outcome: Relation) -> tuple[str, ...]:
        """Each comparison with this outcome: its settings, arms and qualities."""
        return tuple(str(comparison) for comparison, found in self.outcomes if found == outcome)

    def __str__(self) -> str:
        if not self.outcomes:
            return "no complete comparison yet"
        word = {True: "true", False: "false", None: "undecided"}[self.holds]
        word += " of the mean values" * self.by_values_alone
        counts = {name: len(self.of(name)) for name in ("equal", "undecided")}
        open_ = "".join(f", {count} {name}" for name, count in counts.items() if count)
        one = "; 1 comparison has one seed, so it is not decided"
        more = f"; {self.single_seeds} comparisons have one seed, so they are not decided"
        single = (one if self.single_seeds == 1 else more) if self.single_seeds else ""
        return f"{word}: {len(self.of('better'))} of {len(self.outcomes)} comparisons hold{open_}{single}"


def parse_claim(text: str) -> Claim:
    """Raises ValueError, with the form expected."""
    found = _CLAIM.fullmatch(text)
    if not found:
        raise ValueError(f"claim {text!r} is not of the form: {FORM}")
    best, better, *beaten = found.groups()
    worse, falling = (beaten[:3], None) if beaten[1] else (beaten[3:6], beaten[6])
    names = tuple(name.strip() for name in worse[2].split(",")) if worse[2] else ()
    claim = Claim(_parse_side(best, better), _parse_side(*worse[:2]), names, falling)
    if COST in names and (falling or claim.better.best or claim.worse.best):
        raise ValueError(
            f"claim {text!r}: at equal cost all points are compared, so that none is the best, and"
            " nothing falls"
        )
    return claim


def _parse_side(best: str | None, text: str) -> Side:
    conditions = []
    for part in text.split(","):
        name, sign, values = re.split("(!?=)", part)
        conditions.append(Condition(name.strip(), tuple(map(_canonical, values.split("|"))), sign == "="))
    return Side(text.strip(), tuple(conditions), best=best is not None)


def check_claim(text: str, points: Sequence[Point]) -> Verdict:
    """Judges all comparisons of complete points. Raises ValueError if the text is not a claim."""
    claim = parse_claim(text)
    found = comparisons(claim, [point for point in points if is_complete(point)])
    if COST in claim.equal:
        return Verdict(claim=text, outcomes=tuple(_at_equal_cost(found)))
    return Verdict(claim=text, outcomes=tuple((each, compare(each.more, each.less)) for each in found))


def comparisons(claim: Claim, points: Iterable[Point]) -> list[Comparison]:
    """Returns the comparisons of a claim, whether or not the points are complete.

    Raises:
        ValueError: if the setting that falls is not a number.
    """
    points = list(points)
    if COST in claim.equal:
        return list(_with_curves(claim, points))
    if claim.falling is None:
        return [Comparison(_where(cell), (a,), (b,)) for cell, a, b in _pairs(claim, claim.equal, points)]
    found: dict[tuple[str, ...], list[tuple[float, Point, Point]]] = {}
    for _, a, b in _pairs(claim, (*claim.equal, claim.falling), points):
        cell = tuple(f"{name}={_settings(a)[name]}" for name in claim.equal)
        found.setdefault(cell, []).append((_number(a, claim.falling), a, b))
    losses = []
    for cell, pairs in found.items():
        highest = max(level for level, _, _ in pairs)
        tops = [(a, b) for level, a, b in pairs if level == highest]
        for (a, b), (level, low_a, low_b) in product(tops, [pair for pair in pairs if pair[0] < highest]):
            where = ", ".join([*cell, f"{claim.falling} from {highest:g} to {level:g}"])
            losses.append(Comparison(where, (low_a, b), (low_b, a)))
    return losses


def why_nothing(claim: Claim, points: Iterable[Point]) -> str:
    """The reason why a claim compares none of the points."""
    points = list(points)
    names = (*claim.equal, *([claim.falling] if claim.falling else []))
    names = tuple(name for name in names if name != COST)
    for side in (claim.better, claim.worse):
        if not (members := side.of(points)):
            return f"no arm has {side.text}"
        if lacking := [name for name in names if not any(name in _settings(point) for point in members)]:
            return f"no arm with {side.text} has {', '.join(lacking)}"
    if COST in claim.equal:
        return f"no kind with {claim.worse.text} has two arms around the cost of one with {claim.better.text}"
    if claim.falling and any(_pairs(claim, names, points)):
        return f"{claim.falling} has one value alone"
    differing = [name for name in names if not any(_pairs(claim, (name,), points))] or names
    return f"no two arms of its sides are equal in {', '.join(differing) or 'anything'}"


def _pairs(
    claim: Claim, names: Sequence[str], points: Sequence[Point]
) -> Iterator[tuple[dict[str, str], Point, Point]]:
    """Yields the settings and the points of each pair that `claim` compares at these equal settings.

    The text of a setting has both numbers where they differ.
    """
    near = next((name for name in names if name in NEAR), None)
    exact = [name for name in names if name != near]
    cells: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        settings = _settings(point)
        if all(name in settings for name in names):
            cells.setdefault(tuple(settings[name] for name in exact), []).append(point)
    for values, members in cells.items():
        first, second = claim.better.of(members), claim.worse.of(members)
        groups = _nearest_groups(first, second, near) if near else [(first, second)]
        for ours, theirs in groups:
            for a, b in product(claim.better.taking_part(ours), claim.worse.taking_part(theirs)):
                if a is not b:
                    cell = dict(zip(exact, values, strict=True))
                    if near:
                        numbers = dict.fromkeys([_settings(a)[near], _settings(b)[near]])
                        cell[near] = " ~ ".join(numbers)
                    yield {name: cell[name] for name in names}, a, b


def _with_curves(claim: Claim, points: Sequence[Point]) -> Iterator[Comparison]:
    """Yields every point of the first side with each curve of the second, for each cell of the settings
    beside the cost.
    """
    names = [name for name in claim.equal if name != COST]
    cells: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        settings = _settings(point)
        if all(name in settings for name in names):
            cells.setdefault(tuple(settings[name] for name in names), []).append(point)
    for values, members in cells.items():
        curves: dict[str, list[Point]] = {}
        for point in claim.worse.of(members):
            curves.setdefault(_settings(point)["kind"], []).append(point)
        for point, (kind, curve) in product(claim.better.of(members), curves.items()):
            if kind != _settings(point)["kind"] and meets(curve, point):
                yield Comparison(_where(dict(zip(names, values, strict=True))), (point,), tuple(curve))


def _at_equal_cost(found: Iterable[Comparison]) -> Iterator[tuple[Comparison, Relation]]:
    """Yields comparisons with curves and their outcomes: those of one size are decided together."""
    sizes: dict[str | None, list[tuple[Comparison, list[float]]]] = {}
    for each in found:
        values = paired_differences(each.more[0], each.less)
        sizes.setdefault(_settings(each.more[0]).get("size"), []).append((each, values))
    for same in sizes.values():
        outcomes = decide([values for _, values in same])
        for (each, values), outcome in zip(same, outcomes, strict=True):
            where = ", ".join(filter(None, [each.where, f"difference {interval(values)}"]))
            yield each._replace(where=where), outcome


def _nearest_groups(
    first: Sequence[Point], second: Sequence[Point], name: str
) -> Iterable[tuple[list[Point], list[Point]]]:
    """The points of `first` with each number, and the points of `second` whose nearest it is."""
    numbers = sorted({_number(point, name) for point in first})
    groups: dict[float, tuple[list[Point], list[Point]]] = {number: ([], []) for number in numbers}
    for point in first:
        groups[_number(point, name)][0].append(point)
    for point in second if groups else ():
        apart = {number: round(abs(math.log(number / _number(point, name))), 6) for number in groups}
        nearest = min(apart, key=lambda number: apart[number])
        if apart[nearest] < round(math.log(NEAR[name]), 6):
            groups[nearest][1].append(point)
    return groups.values()


def _number(point: Point, name: str) -> float:
    text = _settings(point)[name]
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text} of {point.arm} is not a number") from None


def compare(more: Sequence[Point], less: Sequence[Point]) -> Relation:
    """Whether the sum of the qualities of `more` is above that of `less`, beyond the error of their seeds."""
    seeded = [point for point in (*more, *less) if len(point.qualities) > 1]
    variances = [point.seed_error**2 for point in seeded]
    margin = 0.0
    if any(variances):
        parts = [v**2 / (len(point.qualities) - 1) for v, point in zip(variances, seeded, strict=True)]
        freedom = sum(variances) ** 2 / sum(parts)  # Welch and Satterthwaite
        quantile = float(stdtrit(freedom, 1 - SIGNIFICANCE / 2))  # of Student's t
        margin = quantile * sum(variances) ** 0.5
    difference = sum(point.quality for point in more) - sum(point.quality for point in less)
    if abs(difference) <= margin:
        return "undecided"
    return "better" if difference > 0 else "worse"


def has_single_seed(comparison: Comparison) -> bool:
    return any(len(point.qualities) < 2 for point in comparison.more + comparison.less)


def _settings(point: Point) -> dict[str, str]:
    own = {name: _canonical(value) for name, value in point.settings.items()}
    kind = point.arm.partition("-")[2] or point.arm
    return {"arm": point.arm, "family": point.family, "kind": kind} | own


def _canonical(value: str | float) -> str:
    """The same text for 1, 1.0 and "1.0"."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value).strip()


def _where(cell: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in cell.items())


def _texts(points: Sequence[Point]) -> str:
    return ", ".join(f"{point.arm} {point.quality_text}" for point in points)
