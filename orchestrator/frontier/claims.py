"""Claims about a sweep as statements that can be checked: who has the higher quality, all else being equal.

    router=expert_choice beats router=token_choice at equal size, capacity, affinity
    family=soft beats best family!=soft, family!=dense at equal size, capacity

A side is conditions on settings; `best` before it takes the best of its points in each cell. A cell is what
is equal in the named settings and has points of both sides; without `best` each pair in it counts. Only
complete points count. A setting that a point lacks equals nothing. Every point has the settings `arm` and
`family`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from orchestrator.frontier.points import Point, is_complete

FORM = "[best] NAME=VALUE[, NAME!=VALUE ...] beats [best] NAME=VALUE[, ...] [at equal NAME[, NAME ...]]"


@dataclass(frozen=True, kw_only=True)
class Condition:
    name: str
    value: str
    wanted: bool  # False: must not be this value

    def holds(self, settings: Mapping[str, str]) -> bool:
        return (settings.get(self.name) == self.value) == self.wanted


@dataclass(frozen=True, kw_only=True)
class Side:
    conditions: tuple[Condition, ...]
    best: bool  # only the best of a cell takes part


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    better: Side
    worse: Side
    equal: tuple[str, ...]

    def settings(self) -> set[str]:
        """Names of all that it goes by."""
        sides = (self.better, self.worse)
        return {one.name for side in sides for one in side.conditions} | {*self.equal}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How often a claim holds. With no cell it is neither right nor wrong."""

    claim: str
    held: int
    cells: int
    failing: tuple[str, ...]  # each cell that fails: what is equal in it, and both arms with their qualities

    def __str__(self) -> str:
        return f"{self.held}/{self.cells} cells"


def parse_claim(text: str) -> Claim:
    """Raises: ValueError with the form expected."""
    found = re.fullmatch(r"\s*(.+?)\s+beats\s+(.+?)(?:\s+at\s+equal\s+(.+?))?\s*", text, flags=re.DOTALL)
    if not found:
        raise ValueError(f"claim {text!r} is not of the form: {FORM}")
    better, worse, equal = found.groups()
    names = tuple(name.strip() for name in equal.split(",")) if equal else ()
    if not all(names) or any("=" in name for name in names):
        raise ValueError(
            f"claim {text!r} wants names of settings after 'at equal', got {equal!r}; form: {FORM}"
        )
    return Claim(text=text, better=_side(better, text), worse=_side(worse, text), equal=names)


def check_claim(text: str, points: Sequence[Point]) -> Verdict:
    """Raises: ValueError if the text is no claim."""
    claim = parse_claim(text)
    settings = [_settings(point) for point in points]
    cells: dict[tuple[str, ...], tuple[list[Point], list[Point]]] = {}
    for point, of_point in zip(points, settings, strict=True):
        if is_complete(point) and all(name in of_point for name in claim.equal):
            sides = cells.setdefault(tuple(of_point[name] for name in claim.equal), ([], []))
            for side, members in zip((claim.better, claim.worse), sides, strict=True):
                if all(condition.holds(of_point) for condition in side.conditions):
                    members.append(point)
    pairs = [
        (cell, high, low)
        for cell, (better, worse) in cells.items()
        for high, low in product(_entrants(claim.better, better), _entrants(claim.worse, worse))
        if high is not low
    ]
    failing = tuple(_failure(claim, *pair) for pair in pairs if not pair[1].quality > pair[2].quality)
    return Verdict(claim=text, held=len(pairs) - len(failing), cells=len(pairs), failing=failing)


def _side(text: str, claim: str) -> Side:
    bare = re.sub(r"^best\s+(of\s+)?", "", text)
    conditions = []
    for part in bare.split(","):
        found = re.fullmatch(r"\s*([^=!]+?)\s*(!?=)\s*([^=]+?)\s*", part)
        if not found:
            raise ValueError(
                f"claim {claim!r}: {part.strip()!r} is no NAME=VALUE or NAME!=VALUE; form: {FORM}"
            )
        name, sign, value = found.groups()
        conditions.append(Condition(name=name, value=_canonical(value), wanted=sign == "="))
    return Side(conditions=tuple(conditions), best=bare != text)


def _settings(point: Point) -> dict[str, str]:
    own = {name: _canonical(value) for name, value in point.settings.items()}
    return {"arm": point.arm, "family": point.family} | own


def _canonical(value: str | float) -> str:
    """One text for 1, 1.0 and "1.0"."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)


def _entrants(side: Side, points: list[Point]) -> list[Point]:
    return [max(points, key=lambda point: point.quality)] if side.best and points else points


def _failure(claim: Claim, cell: tuple[str, ...], high: Point, low: Point) -> str:
    where = ", ".join(f"{name}={value}" for name, value in zip(claim.equal, cell, strict=True))
    return f"{where}: {high.arm} {high.quality:.4f}, {low.arm} {low.quality:.4f}".removeprefix(": ")
