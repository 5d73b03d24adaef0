"""How metrics and their values are shown: titles, and units that a person reads."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from moe.guests import offered
from orchestrator.costs import PARAMS, TIMES, cost_of
from orchestrator.output import IN_BITS, UNKNOWN

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_SPLITS = {"train": "Training", "val": "Validation"}


class Unit(NamedTuple):
    """How values of a metric are shown: the title of their axis or column, the symbol of the unit in it, and
    how much of the metric's own unit that is.
    """

    title: str
    symbol: str
    size: float = 1.0


def axis_title(metric: str) -> str:
    """A metric's title with its unit or convention; a metric that is not listed keeps its name, in words if
    it is a task's: the accuracy of the best answer is ``accuracy @1``.
    """
    if cost := cost_of(metric):
        return cost.title or metric
    if shots := re.fullmatch(r"fewshot/acc_(\d+)shot", metric):
        return f"{shots[1]}-shot accuracy of frozen features"
    split, _, name = IN_BITS.get(metric, metric).partition("/")
    if split == "moe":
        return name.replace("_", " ").capitalize()
    if split not in _SPLITS:
        return offered("TITLES").get(metric, metric)  # of metrics that papers print
    return f"{_SPLITS[split]} {re.sub(r'^acc(?=[0-9])', 'accuracy @', name).replace('_', ' ')}"


def unit_of(metric: str, values: Iterable[float]) -> Unit:
    """Returns how these values are shown together. FLOP and parameters get the prefix by which the smallest
    value above 0 is at least 1, so that 2.5e-4 GFLOP are 250 kFLOP; other units stay as they are.
    """
    title, cost = axis_title(metric), cost_of(metric)
    least = min((value for value in values if 0 < value < math.inf), default=math.nan)
    flop = re.search(r"\b([kMGTPEZY]?)FLOP\b", title)
    if not flop and metric != PARAMS:
        return Unit(title, cost.unit.strip("-") if cost else "")
    own = shown = _PREFIXES.index(flop[1] if flop else "")
    if not math.isnan(least):
        shown = min(max(own + math.floor(math.log10(least) / 3), 0), len(_PREFIXES) - 1)
    symbol = _PREFIXES[shown] + ("FLOP" if flop else "")
    if flop:
        title = title.replace(flop[0], symbol)
    elif symbol:
        title += f" ({symbol})"
    return Unit(title, symbol, 1000.0 ** (shown - own))


def amount(metric: str, value: float) -> str:
    """Returns a single value of a metric with its unit."""
    unit = unit_of(metric, [value])
    return f"{number(value / unit.size)} {unit.symbol}".rstrip()


def number(value: float) -> str:
    """Four significant digits, three and a power of ten where that is shorter, a dash where unknown."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}{TIMES}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
