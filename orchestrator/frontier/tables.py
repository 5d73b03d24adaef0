"""A frontier as a table for a paper: mean and error in one cell, in as many digits as the error leaves."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from orchestrator.costs import TIMES
from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point, as_shown, quartiles
from orchestrator.output import IN_BITS
from orchestrator.units import axis_title, unit_of

_SPECIAL = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "\xa0": "~"}
    | {TIMES: r"$\times$", "±": r"$\pm$"}
)
_WIDEST = 15  # characters in a line of the head: arm, quality and cost then fit a column of a paper


def latex(frontier: Frontier, columns: Sequence[str] = ()) -> str:
    """Returns a tabular of LaTeX with booktabs' lines: quality and cost of the arms, by cost, those on the
    frontier in bold; then the baselines. Fractions of quality are in percent, costs in the unit of the head.

    Args:
        columns: metrics of further costs and of statistics of routers (`Point.statistics`).

    Raises:
        UsageError: for a column that no arm has; it names those known.
    """
    points = sorted(frontier.points, key=lambda point: point.cost)
    numbers = [{**point.statistics, **point.costs, frontier.cost_name: point.cost} for point in points]
    known = sorted({name for each in numbers for name in each})
    for metric in columns:
        if metric not in known:
            raise UsageError(f"{frontier.name} has no column {metric!r}; known: {', '.join(known)}")
    in_bits = frontier.quality_name in IN_BITS
    arms = [rf"\textbf{{{_escaped(p.arm)}}}" if p in frontier.front else _escaped(p.arm) for p in points]
    qualities = [_quality(frontier.quality_name, p.quality, p.standard_error) for p in points]
    table = {"Arm": arms, axis_title(frontier.quality_name) + " (%)" * (not in_bits): qualities}
    for metric in (frontier.cost_name, *columns):
        values = [each.get(metric, math.nan) for each in numbers]
        unit = unit_of(metric, values)
        if metric.endswith("_frac"):
            table[unit.title.removesuffix(" frac") + " (%)"] = [with_error(100 * x, math.nan) for x in values]
        else:
            table[unit.title] = [
                _measured(replace(point, cost=value), metric, unit.size)
                for value, point in zip(values, points, strict=True)
            ]
    whole = (title.replace(f" {TIMES} ", f"\xa0{TIMES}\xa0") for title in table)  # a product stays in a line
    titles = [textwrap.wrap(title, _WIDEST)[::-1] for title in whole]
    head = [*zip_longest(*titles, fillvalue="")][::-1]  # a short title stands below
    baselines = [
        [
            _escaped(name),
            _quality(frontier.quality_name, quality, frontier.baseline_error(quality) or math.nan),
            *["--"] * (len(table) - 2),
        ]
        for name, quality in frontier.baselines.items()
    ]
    lines = [
        f"% {_escaped(frontier.subtitle)} Bold: on the frontier. Brackets: quartiles.",
        rf"\begin{{tabular}}{{@{{}}l{'r' * (len(table) - 1)}@{{}}}}",
        r"\toprule",
        *(_row(map(_escaped, each)) for each in head),
        r"\midrule",
        *map(_row, zip(*table.values(), strict=True)),
        *([r"\midrule"] if baselines else []),
        *map(_row, baselines),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join([*lines, ""])


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _quality(metric: str, quality: float, error: float) -> str:
    """Returns a quality with its error in percent, or in bits, where an unknown error leaves all digits."""
    if metric not in IN_BITS:
        return with_error(100 * quality, 100 * error)
    bits = as_shown(metric, quality)[1]
    if math.isfinite(error) and math.isfinite(bits):
        return with_error(bits, error / (quality * math.log(2)))
    return _number(bits)


def with_error(value: float, error: float) -> str:
    """Returns a value with its error, both to the error's first digit, or to its second if the first is 1,
    but to a decimal at least.
    """
    if not math.isfinite(value):
        return "--"
    if not (math.isfinite(error) and error > 0):
        return f"{value:.1f}"
    place = math.floor(math.log10(error))
    digits = max(1, -place + (error / 10**place < 2))
    return rf"${value:.{digits}f} \pm {error:.{digits}f}$"


def _measured(point: Point, metric: str, size: float) -> str:
    """Returns the cost of a point, with its quartiles in brackets if it was measured."""
    low, high = quartiles(point, metric)
    ends = f" ({_number(low / size)}--{_number(high / size)})" if low < high else ""
    return _number(point.cost / size) + ends


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "--"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return rf"${mantissa} \cdot 10^{{{int(exponent)}}}$"


def _escaped(text: str) -> str:
    return text.translate(_SPECIAL)
