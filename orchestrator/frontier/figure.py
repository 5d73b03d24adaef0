"""What a plot of a frontier shows, as plain data: `drawing.py` turns it into a plotly or a matplotlib figure.

Source: colours after Okabe and Ito, "Color Universal Design" (2008), distinct in the common colour vision
deficiencies. The blue is lighter than theirs: each has a contrast of 3 or more to white and to #14171c.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from orchestrator.frontier.points import UNKNOWN, Point, front_points, quartiles

TIMES = "\N{MULTIPLICATION SIGN}"
INK, MUTED = "#1d2430", "#5b6675"  # of text on white
GREY = "#7d8896"  # of lines, on white and on #14171c
NOTHING_YET = "No finished trial with a known cost and quality"
SIZE_TITLE = "Expert slots per token"
# What marks and lines mean, from the back to the front, and a sign for each. The statuses of points are among
# these roles.
ROLES = {
    "family": ("Frontier of each family", "┈"),
    "dense": ("Dense alone", "╌"),
    "published": ("Published, not counted", "○"),
    "diverged": ("Diverged, on the cost axis", TIMES),
    "operating_front": ("MoE models with operating points", "┈"),
    "operating": ("Operating point, not trained anew", "+"),
    "dominated": ("Dominated", "◌"),
    "frontier": ("Frontier", "─"),
    "retrained": ("Retrained, not counted", "☆"),
}

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


@dataclass(frozen=True)
class Shape:
    """A marker by its names in plotly and matplotlib, and as a character."""

    plotly: str
    matplotlib: str
    glyph: str = ""


@dataclass(frozen=True)
class FamilyStyle:
    colour: str
    shape: Shape


# Marks that are hollow or thin, by role: shape (None: the family's), diameter in pixels.
_MARKS = {
    "published": (None, 9),
    "diverged": (Shape("x-thin", "x"), 8),
    "operating": (Shape("cross-thin", "+"), 7),
    "retrained": (Shape("star", "*"), 15),
}
_FAMILIES = {
    "dense": FamilyStyle("#CC79A7", Shape("square", "s", "■")),
    "soft": FamilyStyle("#D55E00", Shape("circle", "o", "●")),
    "token_choice": FamilyStyle("#2B87C8", Shape("triangle-up", "^", "▲")),
    "sinkhorn_token_choice": FamilyStyle("#7A78D8", Shape("triangle-down", "v", "▼")),
    "expert_choice": FamilyStyle("#009E73", Shape("diamond", "D", "◆")),
    "sinkhorn_expert_choice": FamilyStyle("#7A8F00", Shape("diamond-tall", "d", "♦")),
    "sparse_transport_expert_choice": FamilyStyle("#A0643C", Shape("pentagon", "p", "⬟")),
}
_SPARE_STYLES = (
    FamilyStyle("#9A7D0A", Shape("triangle-left", "<", "◀")),
    FamilyStyle("#A5619B", Shape("triangle-right", ">", "▶")),
    FamilyStyle("#7F7F7F", Shape("hexagon", "h", "⬢")),
)


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line, or marks that look alike. The tuples have an entry for each point."""

    role: str  # of ROLES; empty in a plot that has no roles
    family: str = ""
    label: str = ""  # in a legend, where each label is explained once
    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()
    colour: str = GREY
    dash: Literal["solid", "dash", "dot"] = "solid"
    shape: Shape | None = None  # None: a line
    hollow: bool = False
    opacity: float = 1
    sizes: tuple[float, ...] = ()  # diameters of marks in pixels at 96 per inch
    x_bars: tuple[tuple[float, float], ...] = ()  # lower and upper end
    y_bars: tuple[tuple[float, float], ...] = ()
    texts: tuple[tuple[str, ...], ...] = ()  # lines of text about each mark, the first one its name
    links: tuple[str | None, ...] = ()
    on_axis: bool = False  # marks without a quality, on the cost axis
    optional: bool = False  # hidden until a reader asks for it


@dataclass(frozen=True, kw_only=True)
class FigureData:
    """A plot. `series` go from the back to the front."""

    title: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    sizes: tuple[float, ...] = ()  # slots per token that explain the sizes of marks
    named: tuple[Point, ...] = ()  # points of the front, the knee first
    message: str = ""
    is_budget: bool = False  # linear axes that begin at 0, and a line that rises in steps


def frontier_data(
    name: str,
    cost_name: str,
    quality_name: str,
    entries: Sequence[tuple[Point, str]],
    operating_front: Sequence[Point] = (),
) -> FigureData:
    """The plot of quality against one cost. `entries`: all points with their status (`Frontier.statuses`).

    Points of papers are drawn where both metrics are theirs too. Trials that stopped, failed or run have no
    final quality and are not drawn.
    """
    papers = [(paper, "published") for paper in published(quality_name, cost_name)]
    drawn: dict[tuple[str, str], list[Point]] = {}
    for point, status in (*entries, *papers):
        if 0 < point.cost < math.inf:
            drawn.setdefault((status.split(",")[0], point.family), []).append(point)
    styles = family_styles(family for role, family in drawn if role in ROLES)
    counted = [point for point, status in entries if status.startswith(("frontier", "dominated"))]
    front = front_points(counted)
    series = [_line("operating_front", operating_front, dash="dot"), _line("frontier", front)]
    families = dict.fromkeys(point.family for point in counted)
    for family in families if len(families) > 1 else ():
        own = front_points([point for point in counted if point.family == family])
        look: dict[str, Any] = {"family": family, "colour": styles[family].colour}
        if family == "dense":
            series.append(_line("dense", own, dash="dash", **look))
        else:
            series.append(_line("family", own, dash="dot", optional=True, **look))
    series += [
        _marks(drawn[role, family], role, style, cost_name, quality_name)
        for role in ROLES
        for family, style in styles.items()
        if (role, family) in drawn
    ]
    knees = [point for point, status in entries if status == "frontier, knee"]
    return FigureData(
        title=name,
        x_title=axis_title(cost_name),
        y_title=axis_title(quality_name),
        series=tuple(one for one in series if one.x),
        sizes=key_sizes([*counted, *(point for point, status in entries if status == "retrained")]),
        named=(*knees, *(point for point in front if point not in knees)),
        message="" if front else NOTHING_YET,
    )


def budget_data(curve: NDArray[np.float64]) -> FigureData:
    """The plot of hypervolume against what was spent: (entries, 2) of `points.hypervolume_by_budget`."""
    scale, unit = (3600, "hours") if curve[-1, 0] >= 7200 else (1, "seconds")
    x, y = (0.0, *(curve[:, 0] / scale).tolist()), (0.0, *curve[:, 1].tolist())
    return FigureData(
        title="Hypervolume by budget",
        x_title=f"Device {unit} spent",
        y_title="Hypervolume",
        series=(Series(role="", x=x, y=y),),
        is_budget=True,
    )


def _line(role: str, points: Sequence[Point], **look: Any) -> Series:
    x, y = tuple(point.cost for point in points), tuple(point.quality for point in points)
    return Series(role=role, label=ROLES[role][0], x=x, y=y, **look)


def _marks(
    points: Sequence[Point], role: str, style: FamilyStyle, cost_name: str, quality_name: str
) -> Series:
    """The points of one family that have one role, with bars over quartiles of costs and over seeds."""
    shape, size = _MARKS.get(role, (None, 0))
    on_axis = role == "diverged"
    x_bars = tuple(quartiles(point, cost_name) for point in points)
    seeds = [point.qualities or (point.quality,) for point in points]
    y_bars = tuple((min(qualities), max(qualities)) for qualities in seeds)
    return Series(
        role=role,
        family=points[0].family,
        label=ROLES[role][0] if role in _MARKS else family_label(points[0].family),
        x=tuple(point.cost for point in points),
        y=tuple(0.0 if on_axis else point.quality for point in points),
        colour=style.colour,
        shape=shape or style.shape,
        hollow=role in _MARKS,
        opacity=0.4 if role == "dominated" else 1,
        sizes=tuple(size or marker_px(point.size) for point in points),
        x_bars=x_bars if any(low < high for low, high in x_bars) else (),
        y_bars=y_bars if not on_axis and any(low < high for low, high in y_bars) else (),
        texts=tuple(_texts(point, role, cost_name, quality_name) for point in points),
        links=tuple(web_link(point.run_url) for point in points),
        on_axis=on_axis,
    )


def _texts(point: Point, role: str, cost_name: str, quality_name: str) -> tuple[str, ...]:
    """What is shown of a point under the pointer, in at most 18 lines: more would not fit beside a plot."""
    lines = [
        point.arm,
        f"{family_label(point.family)}, {role}",
        f"{axis_title(cost_name)}: {cost_text(point, cost_name)}",
        f"{axis_title(quality_name)}: {point.quality_text}",
        *(f"{name}: {text}" for name, text in facts(point).items()),
    ]
    return tuple(lines[:18])


def published(quality_name: str, cost_name: str) -> tuple[Point, ...]:
    """The points that papers printed in both metrics; none where a metric is not among the papers'.

    ``published.csv`` has fractions and FLOPs, where the papers have percent and exaFLOPs. Soft MoE counts 3
    FLOPs of training for a multiply-add of the forward pass, V-MoE 6: each is given in both. V-MoE has
    core-days, two to a chip of TPUv3. JFT-300M and JFT-4B have different classes, so they are two metrics.
    `imagenet/acc1` is after fine-tuning.
    """
    table = files("orchestrator.frontier").joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(
        Point(
            arm=row["model"],
            family=row["family"],
            cost=float(row[cost_name]),
            quality=float(row[quality_name]),
            size=math.nan,
            run_id="",
            status="finished",
            details={"source": row["source"]},
        )
        for row in csv.DictReader(table.splitlines())
        if row.get(cost_name) and row.get(quality_name)
    )


def family_styles(families: Iterable[str]) -> dict[str, FamilyStyle]:
    """The style of each family present: the known ones as in the table, the others in alphabetical order."""
    present = {*families}
    styles = {family: style for family, style in _FAMILIES.items() if family in present}
    for index, family in enumerate(sorted(present - styles.keys())):
        styles[family] = _SPARE_STYLES[index % len(_SPARE_STYLES)]
    return styles


def family_label(family: str) -> str:
    return family.replace("_", " ").capitalize()


def marker_px(size: float) -> float:
    """Marker diameter in pixels at 96 per inch: area grows with the slots per token, within bounds."""
    return min(max(13 * math.sqrt(size), 7), 32) if size > 0 else 7


def key_sizes(points: Iterable[Point]) -> tuple[float, ...]:
    """At most four sizes, smallest first, that explain the markers drawn; empty if all are alike."""
    sizes = sorted({point.size for point in points if math.isfinite(point.size)})
    if len(sizes) > 4:
        sizes = [sizes[round(step * (len(sizes) - 1) / 3)] for step in range(4)]
    return tuple(sizes) if len(sizes) > 1 else ()


def axis_title(metric: str) -> str:
    """A metric's title with its unit or convention; a metric that is not listed keeps its name."""
    return _AXIS_TITLES.get(metric, metric)


def number(value: float) -> str:
    """Four significant digits, three and a power of ten where that is shorter, a dash where unknown."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}{TIMES}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def cost_text(point: Point, cost_name: str) -> str:
    """The cost, with its quartiles in brackets if it was measured."""
    low, high = quartiles(point, cost_name)
    return number(point.cost) + (f" ({number(low)} - {number(high)})" if low < high else "")


def facts(point: Point) -> dict[str, str]:
    """What else is known of a point: its measurements, settings and seeds."""
    shown = {name: detail(value) for name, value in {**point.details, **point.settings}.items()}
    if len(point.qualities) > 1:
        worst, best = min(point.qualities), max(point.qualities)
        shown["seeds"] = f"{len(point.qualities)}, from {worst:.4f} to {best:.4f}"
    return shown


def detail(value: str | float) -> str:
    return number(value) if isinstance(value, float) else str(value)


def web_link(url: str | None) -> str | None:
    """The address if it is http or https: a `javascript:` address would run in the reader's browser."""
    return url if url and urlsplit(url).scheme in {"http", "https"} else None
