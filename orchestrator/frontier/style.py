"""How frontiers look, on the page and in the picture: router families, marker sizes, axis titles, numbers.

Source: colours after Okabe and Ito, "Color Universal Design" (2008), told apart in the common colour vision
deficiencies. The blue is lighter than theirs: each has a contrast of 3 or more to white and to #14171c.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from orchestrator.frontier.points import Point, is_complete

UNKNOWN = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
INK, MUTED = "#1d2430", "#5b6675"  # of text, on white
DOMINATED_OPACITY = 0.4
NOTHING_YET = "No finished trial with a known cost and quality"
SIZE_TITLE = "Expert slots per token"

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")

_AXIS_TITLES = {
    "cost/train_flops_6mac": f"Training FLOPs (6 {TIMES} MAC)",
    "cost/train_flops_3mac": f"Training FLOPs (3 {TIMES} MAC)",
    "cost/forward_gflops_2mac": f"Forward GFLOPs per image (2 {TIMES} MAC)",
    "cost/device_s": "Device time (s)",
    "cost/tpuv3_days": "Training TPUv3 days (chips)",
    "cost/params": "Parameters",
    "perf/ms_per_image": "Inference time per image (ms)",
    "perf/step_ms": "Step time (ms)",
    "perf/mem_peak_gib": "Peak device memory (GiB)",
    "val/acc1": "Validation accuracy @1",
    **{f"fewshot/acc_{shots}shot": f"{shots}-shot accuracy of frozen features" for shots in (1, 5, 10, 25)},
    "imagenet/acc1": "ImageNet accuracy @1, fine-tuned",
    "imagenet/acc_10shot": "ImageNet accuracy, 10-shot",
    "jft300m/prec1": "JFT-300M precision @1",
    "jft4b/prec1": "JFT-4B precision @1",
}


@dataclass(frozen=True, kw_only=True)
class FamilyStyle:
    colour: str
    symbol: str  # plotly
    marker: str  # matplotlib
    glyph: str  # text


_FAMILIES = {
    "dense": FamilyStyle(colour="#CC79A7", symbol="square", marker="s", glyph="■"),
    "soft": FamilyStyle(colour="#D55E00", symbol="circle", marker="o", glyph="●"),
    "token_choice": FamilyStyle(colour="#2B87C8", symbol="triangle-up", marker="^", glyph="▲"),
    "sinkhorn_token_choice": FamilyStyle(colour="#7A78D8", symbol="triangle-down", marker="v", glyph="▼"),
    "expert_choice": FamilyStyle(colour="#009E73", symbol="diamond", marker="D", glyph="◆"),
    "sinkhorn_expert_choice": FamilyStyle(colour="#7A8F00", symbol="diamond-tall", marker="d", glyph="♦"),
    "sparse_transport_expert_choice": FamilyStyle(colour="#A0643C", symbol="pentagon", marker="p", glyph="⬟"),
}
_SPARE_LOOKS = (
    ("#9A7D0A", "triangle-left", "<", "◀"),
    ("#A5619B", "triangle-right", ">", "▶"),
    ("#7F7F7F", "hexagon", "h", "⬢"),
)


def family_styles(families: Iterable[str]) -> dict[str, FamilyStyle]:
    """The style of each family present: the known ones as in the table, the others in alphabetical order."""
    present = {*families}
    styles = {family: style for family, style in _FAMILIES.items() if family in present}
    for index, family in enumerate(sorted(present - styles.keys())):
        colour, symbol, marker, glyph = _SPARE_LOOKS[index % len(_SPARE_LOOKS)]
        styles[family] = FamilyStyle(colour=colour, symbol=symbol, marker=marker, glyph=glyph)
    return styles


def family_label(family: str) -> str:
    return family.replace("_", " ").capitalize()


def marker_px(size: float) -> float:
    """Marker diameter in pixels at 96 per inch: area grows with the slots per token, within bounds."""
    return min(max(13 * math.sqrt(size), 7), 32) if size > 0 else 7


def key_sizes(points: Iterable[Point]) -> tuple[float, ...]:
    """At most four sizes, smallest first, that explain the markers drawn; empty if all are alike."""
    sizes = sorted({point.size for point in points if is_complete(point) and math.isfinite(point.size)})
    if len(sizes) > 4:
        sizes = [sizes[round(step * (len(sizes) - 1) / 3)] for step in range(4)]
    return tuple(sizes) if len(sizes) > 1 else ()


def axis_title(metric: str) -> str:
    """A metric's title with its unit or convention; one not listed stands as it is, its unit in its name."""
    return _AXIS_TITLES.get(metric, metric)


def number(value: float) -> str:
    """Four significant digits, three and a power of ten where that is shorter, a dash where unknown."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}{TIMES}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def number_with_quartiles(value: float, quartiles: tuple[float, float]) -> str:
    """As `number`, with the quartiles in brackets if they differ."""
    low, high = quartiles
    return f"{number(value)} ({number(low)} - {number(high)})" if low < high else number(value)


def fraction(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else UNKNOWN


def detail(value: str | float) -> str:
    return number(value) if isinstance(value, float) else str(value)


def web_link(url: str | None) -> str | None:
    """The address if it is http or https: a `javascript:` address would run in the reader's browser."""
    return url if url and urlsplit(url).scheme in {"http", "https"} else None
