"""Claims about a sweep as statements that can be checked: which arm has the higher quality, all else equal.

    router=expert_choice beats router=token_choice at equal size, capacity, affinity
    family=soft beats best family!=soft, family!=dense at equal size, capacity

A side is a list of conditions on settings; `best` before it takes the best of its points in each cell. A cell
is a combination of the settings named after `at equal` that has points on both sides; without `best` every
pair of points in it counts. Only complete points count. A setting that a point lacks equals nothing. Every
point has the settings `arm` and `family`.

Two points with several seeds each are compared by Welch's t test: a difference that is not significant at
5 % is undecided. Where a point has a single seed its error is unknown, and the values alone decide.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from scipy.special import stdtrit

from orchestrator.frontier.points import Point, is_complete

FORM = "[best] NAME=VALUE[, NAME!=VALUE ...] beats [best] NAME=VALUE[, ...] [at equal NAME[, NAME ...]]"

_SIGNIFICANCE = 0.05
_CONDITION = r"[^=!,]+!?=[^=!,]+?"
_SIDE = rf"(best\s+(?:of\s+)?)?({_CONDITION}(?:,{_CONDITION})*)"
_CLAIM = re.compile(rf"\s*{_SIDE}\s+beats\s+{_SIDE}(?:\s+at\s+equal\s+([^=,]+(?:,[^=,]+)*?))?\s*", re.DOTALL)

Outcome = Literal["better", "worse", "undecided"]


class Side(NamedTuple):
    conditions: tuple[tuple[str, str, bool], ...]  # setting, value, whether they must be equal
    best: bool  # only the best point of a cell takes part

    def members(self, points: Sequence[Point]) -> list[Point]:
        """The points of a cell that take part."""
        found = [point for point in points if self._holds(_settings(point))]
        return [max(found, key=lambda point: point.quality)] if self.best and found else found

    def _holds(self, settings: Mapping[str, str]) -> bool:
        return all((settings.get(name) == value) == equal for name, value, equal in self.conditions)


class Claim(NamedTuple):
    better: Side
    worse: Side
    equal: tuple[str, ...]

    def settings(self) -> set[str]:
        """The names of all settings that the claim mentions."""
        return {name for name, *_ in self.better.conditions + self.worse.conditions} | {*self.equal}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How often a claim holds. `failing` and `undecided` name each cell's settings, arms and qualities."""

    claim: str
    held: int
    failing: tuple[str, ...]
    undecided: tuple[str, ...]
    single_seeds: int  # cells in which a point has one seed, so that no error is known

    @property
    def holds(self) -> bool | None:
        """True if every cell holds, False if one fails, else None: undecided, or there is no cell."""
        if self.failing:
            return False
        return True if self.held and not self.undecided else None

    def __str__(self) -> str:
        cells = self.held + len(self.failing) + len(self.undecided)
        undecided = f", {len(self.undecided)} undecided" if self.undecided else ""
        single = f" ({self.single_seeds} with a single seed, error unknown)" if self.single_seeds else ""
        return f"{self.held} of {cells} comparisons hold{undecided}{single}"


def parse_claim(text: str) -> Claim:
    """Raises ValueError, with the form expected."""
    found = _CLAIM.fullmatch(text)
    if not found:
        raise ValueError(f"claim {text!r} is not of the form: {FORM}")
    best_better, better, best_worse, worse, equal = found.groups()
    names = tuple(name.strip() for name in equal.split(",")) if equal else ()
    return Claim(_parse_side(best_better, better), _parse_side(best_worse, worse), names)


def _parse_side(best: str | None, text: str) -> Side:
    parts = [map(str.strip, re.split("(!?=)", part)) for part in text.split(",")]
    conditions = tuple((name, _canonical(value), sign == "=") for name, sign, value in parts)
    return Side(conditions, best=best is not None)


def check_claim(text: str, points: Sequence[Point]) -> Verdict:
    """Compares the points of all cells. Raises ValueError if the text is not a claim."""
    claim = parse_claim(text)
    cells: dict[tuple[str, ...], list[Point]] = {}
    for point in filter(is_complete, points):
        settings = _settings(point)
        if all(name in settings for name in claim.equal):
            cells.setdefault(tuple(settings[name] for name in claim.equal), []).append(point)
    found: dict[Outcome, list[str]] = {"better": [], "worse": [], "undecided": []}
    single_seeds = 0
    for cell, members in cells.items():
        where = ", ".join(f"{name}={value}" for name, value in zip(claim.equal, cell, strict=True))
        for a, b in product(claim.better.members(members), claim.worse.members(members)):
            if a is not b:
                text_of = f"{where}: {a.arm} {a.quality_text}, {b.arm} {b.quality_text}"
                found[compare(a, b)].append(text_of.removeprefix(": "))
                single_seeds += min(len(a.qualities), len(b.qualities)) < 2
    return Verdict(
        claim=text,
        held=len(found["better"]),
        failing=tuple(found["worse"]),
        undecided=tuple(found["undecided"]),
        single_seeds=single_seeds,
    )


def compare(a: Point, b: Point) -> Outcome:
    """Whether the quality of `a` is better or worse than that of `b`, beyond the error of their seeds."""
    margin = 0.0
    if min(len(a.qualities), len(b.qualities)) > 1:
        variances = [point.standard_error**2 for point in (a, b)]
        parts = [v**2 / (len(p.qualities) - 1) for v, p in zip(variances, (a, b), strict=True)]
        freedom = sum(variances) ** 2 / sum(parts) if sum(parts) else 1
        quantile = float(stdtrit(freedom, 1 - _SIGNIFICANCE / 2))  # of Student's t
        margin = quantile * sum(variances) ** 0.5
    difference = a.quality - b.quality
    if abs(difference) <= margin:
        return "undecided"
    return "better" if difference > 0 else "worse"


def _settings(point: Point) -> dict[str, str]:
    own = {name: _canonical(value) for name, value in point.settings.items()}
    return {"arm": point.arm, "family": point.family} | own


def _canonical(value: str | float) -> str:
    """The same text for 1, 1.0 and "1.0"."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)
