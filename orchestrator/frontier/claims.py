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
from typing import Literal

from scipy.special import stdtrit

from orchestrator.frontier.points import Point, is_complete

FORM = "[best] NAME=VALUE[, NAME!=VALUE ...] beats [best] NAME=VALUE[, ...] [at equal NAME[, NAME ...]]"

_SIGNIFICANCE = 0.05

Outcome = Literal["better", "worse", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Side:
    conditions: tuple[
        tuple[str, str, bool], ...
    ]  # setting, value, whether it must have the value or must not
    best: bool  # only the best point of a cell takes part

    def holds(self, settings: Mapping[str, str]) -> bool:
        return all((settings.get(name) == value) == wanted for name, value, wanted in self.conditions)


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    better: Side
    worse: Side
    equal: tuple[str, ...]

    def settings(self) -> set[str]:
        """Names of all settings that the claim mentions."""
        sides = (self.better, self.worse)
        return {name for side in sides for name, _, _ in side.conditions} | {*self.equal}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How often a claim holds. `failing` and `undecided` name each cell's settings, arms and qualities."""

    claim: str
    held: int
    failing: tuple[str, ...]
    undecided: tuple[str, ...]
    single_seeds: int  # cells in which a point has one seed, so that no error is known

    @property
    def cells(self) -> int:
        return self.held + len(self.failing) + len(self.undecided)

    @property
    def holds(self) -> bool | None:
        """True if every cell holds, False if one fails, else None: undecided, or there is no cell."""
        if self.failing:
            return False
        return True if self.held and not self.undecided else None

    def __str__(self) -> str:
        undecided = f", {len(self.undecided)} undecided" if self.undecided else ""
        single = f" ({self.single_seeds} by single seeds, error unknown)" if self.single_seeds else ""
        return f"{self.held}/{self.cells} cells{undecided}{single}"


def parse_claim(text: str) -> Claim:
    """Raises: ValueError with the form expected."""
    found = re.fullmatch(r"\s*(.+?)\s+beats\s+(.+?)(?:\s+at\s+equal\s+(.+?))?\s*", text, flags=re.DOTALL)
    if not found:
        raise ValueError(f"claim {text!r} is not of the form: {FORM}")
    better, worse, equal = found.groups()
    names = tuple(name.strip() for name in equal.split(",")) if equal else ()
    if not all(names) or any("=" in name for name in names):
        raise ValueError(
            f"claim {text!r} needs names of settings after 'at equal', got {equal!r}; form: {FORM}"
        )
    return Claim(text=text, better=_side(better, text), worse=_side(worse, text), equal=names)


def check_claim(text: str, points: Sequence[Point]) -> Verdict:
    """Raises: ValueError if the text is no claim."""
    claim = parse_claim(text)
    cells: dict[tuple[str, ...], tuple[list[Point], list[Point]]] = {}
    for point in filter(is_complete, points):
        settings = _settings(point)
        if all(name in settings for name in claim.equal):
            sides = cells.setdefault(tuple(settings[name] for name in claim.equal), ([], []))
            for side, members in zip((claim.better, claim.worse), sides, strict=True):
                if side.holds(settings):
                    members.append(point)
    found: dict[Outcome, list[str]] = {"better": [], "worse": [], "undecided": []}
    single_seeds = 0
    for cell, (better, worse) in cells.items():
        for a, b in product(_entrants(claim.better, better), _entrants(claim.worse, worse)):
            if a is not b:
                found[compare(a, b)].append(_cell_text(claim, cell, a, b))
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
    difference = a.quality - b.quality
    if min(len(a.qualities), len(b.qualities)) > 1:
        variances = [point.standard_error**2 for point in (a, b)]
        parts = [v**2 / (len(p.qualities) - 1) for v, p in zip(variances, (a, b), strict=True)]
        freedom = sum(variances) ** 2 / sum(parts) if sum(parts) else 1
        quantile = float(stdtrit(freedom, 1 - _SIGNIFICANCE / 2))  # of Student's t
        margin = quantile * sum(variances) ** 0.5
    else:
        margin = 0.0
    if abs(difference) <= margin:
        return "undecided"
    return "better" if difference > 0 else "worse"


def _side(text: str, claim: str) -> Side:
    bare = re.sub(r"^best\s+(of\s+)?", "", text)
    conditions = []
    for part in bare.split(","):
        found = re.fullmatch(r"\s*([^=!]+?)\s*(!?=)\s*([^=]+?)\s*", part)
        if not found:
            raise ValueError(
                f"claim {claim!r}: {part.strip()!r} is not NAME=VALUE or NAME!=VALUE; form: {FORM}"
            )
        name, sign, value = found.groups()
        conditions.append((name, _canonical(value), sign == "="))
    return Side(conditions=tuple(conditions), best=bare != text)


def _settings(point: Point) -> dict[str, str]:
    own = {name: _canonical(value) for name, value in point.settings.items()}
    return {"arm": point.arm, "family": point.family} | own


def _canonical(value: str | float) -> str:
    """The same text for 1, 1.0 and "1.0"."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)


def _entrants(side: Side, points: list[Point]) -> list[Point]:
    return [max(points, key=lambda point: point.quality)] if side.best and points else points


def _cell_text(claim: Claim, cell: tuple[str, ...], *points: Point) -> str:
    where = ", ".join(f"{name}={value}" for name, value in zip(claim.equal, cell, strict=True))
    arms = ", ".join(f"{point.arm} {point.quality_text}" for point in points)
    return f"{where}: {arms}".removeprefix(": ")
