"""A frontier as a table for a paper: mean and error in one cell, in as many digits as the error leaves."""

import math

from orchestrator.frontier.figure import axis_title, number
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import as_shown

_SPECIAL = str.maketrans({char: f"\\{char}" for char in "&%$#_{}"} | {"\\": r"\textbackslash{}"})


def latex(frontier: Frontier) -> str:
    """Returns a tabular of LaTeX with booktabs' lines: arms by cost, those on the frontier in bold. Fractions
    are in percent.
    """
    points = sorted(frontier.points, key=lambda point: point.cost)
    costs = (frontier.cost_name, *frontier.panels)
    titles = [axis_title(name) for name in (frontier.quality_name, *costs)]
    percent = as_shown(frontier.quality_name, 0.5)[0] == frontier.quality_name  # and not in bits
    titles[0] += " (%)" * percent
    rows = [["arm", *titles]]
    for point in points:
        known = {**point.costs, frontier.cost_name: point.cost}
        value, error = point.quality, point.standard_error
        if not percent:
            value, error = as_shown(frontier.quality_name, value)[1], math.nan
        name = rf"\textbf{{{_escaped(point.arm)}}}" if point in frontier.front else _escaped(point.arm)
        cells = [with_error(100 * value, 100 * error) if percent else number(value)]
        cells += [_number(known.get(cost, math.nan)) for cost in costs]
        rows.append([name, *cells])
    head, *body = (" & ".join(row) + r" \\" for row in [[*map(_escaped, rows[0])], *rows[1:]])
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(titles)}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
    ]
    return "\n".join([f"% {_escaped(frontier.subtitle)}", *lines, r"\end{tabular}", ""])


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


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "--"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return rf"${mantissa} \cdot 10^{{{int(exponent)}}}$"


def _escaped(text: str) -> str:
    return text.translate(_SPECIAL).replace("\N{MULTIPLICATION SIGN}", r"$\times$").replace("±", r"$\pm$")
