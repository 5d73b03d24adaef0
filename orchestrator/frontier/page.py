"""A frontier as one HTML file that needs nothing else: plots and a table under the same filters, and claims.

The points stand in it once, as JSON, which `plots.js` and `table.js` draw and `page.js` filters. The file
asks the network for nothing, and its content security policy keeps it so.
"""

import json
from html import escape
from importlib.resources import files

from plotly.offline import get_plotlyjs

from orchestrator.frontier.budget import hypervolume_by_budget
from orchestrator.frontier.claims import Verdict, check_claim
from orchestrator.frontier.facts import columns, families, point_facts
from orchestrator.frontier.figure import AXIS, Json, bare_layout, frontier_panel
from orchestrator.frontier.operating import gains
from orchestrator.frontier.points import SPACE, Frontier, hypervolume, on_front, panel
from orchestrator.frontier.style import SIZE_TITLE, UNKNOWN, axis_title, key_sizes, marker_px, number

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_SCRIPTS = ("plots.js", "table.js", "page.js")
_TIMES_RULE = (
    "<p>Bars and brackets of measured times are their quartiles. A gain in time counts only if some of it is"
    " left with every model as trained at its lower quartile and every other setting at its upper one.</p>"
)


def frontier_page(frontier: Frontier) -> str:
    """The whole HTML document, readable in light and dark and in a sandboxed frame.

    Raises: ValueError if one of the claims cannot be read.
    """
    panels = [frontier_panel(frontier), *(frontier_panel(panel(frontier, name)) for name in frontier.panels)]
    panels += _budget_panel(frontier)
    data = {
        "columns": columns(frontier),
        "families": families(frontier),
        "points": point_facts(frontier),
        "panels": panels,
    }
    name = escape(frontier.name)
    first, *others = (f'<div class="plot" id="plot{i}"></div>' for i in range(len(panels)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{name}</title>
<style>{_file("page.css")}</style>
</head>
<body>
<h1>{name}</h1>
<p>{_summary(frontier)}</p>
{f"<p>{escape(frontier.note)}</p>" if frontier.note else ""}
<form id="filters"></form>
<div class="plots">{first}
<p class="key" id="key">{_size_key(frontier)}</p>
{"".join(others)}</div>
{_operating(frontier)}
{_claims(frontier)}
<div class="wide"><table><thead></thead><tbody></tbody></table></div>
<script type="application/json" id="data">{_json(data)}</script>
<script>{get_plotlyjs()}</script>
{"".join(f"<script>{_file(script)}</script>" for script in _SCRIPTS)}
</body>
</html>
"""


def _file(name: str) -> str:
    return files("orchestrator.frontier").joinpath(name).read_text(encoding="utf-8")


def _json(data: Json) -> str:
    """JSON that no text of a user can end: `<` is written as an escape."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _budget_panel(frontier: Frontier) -> list[Json]:
    """None where the times are unknown."""
    curve = hypervolume_by_budget(frontier)
    if not len(curve):
        return []
    scale, unit = (3600, "hours") if curve[-1, 0] >= 7200 else (1, "seconds")
    trace = {
        "x": [0, *(curve[:, 0] / scale).tolist()],
        "y": [0, *curve[:, 1].tolist()],
        "mode": "lines",
        "line": {"shape": "hv", "width": 1.8},
        "meta": {"role": "front", "family": ""},
        "hovertemplate": f"%{{y:.4f}} after %{{x:.4g}} device {unit}<extra></extra>",
    }
    axes = {
        "xaxis": AXIS | {"title": {"text": f"Device {unit} spent", "standoff": 8}, "rangemode": "tozero"},
        "yaxis": AXIS | {"title": {"text": "Hypervolume", "standoff": 14}, "rangemode": "tozero"},
    }
    return [{"traces": [trace], "layout": bare_layout() | axes}]


def _summary(frontier: Frontier) -> str:
    counts = {"trials": len(frontier.points)}
    for status in ("finished", "stopped", "failed", "diverged", "running"):
        counts[status] = sum(point.status == status for point in frontier.points)
    counts["on the frontier"] = sum(on_front(frontier))
    counts["confirm"] = len(frontier.rest)
    always = {"trials", "finished", "failed", "diverged", "on the frontier"}
    parts = [f"<b>{count}</b> {what}" for what, count in counts.items() if count or what in always]
    reference = ",&nbsp;".join(number(value) for value in frontier.reference)
    area = f"hypervolume <b>{hypervolume(frontier):.4f}</b> in ({SPACE}) to the reference ({reference})"
    return " &middot; ".join([*parts, area])


def _operating(frontier: Frontier) -> str:
    models = len({point.run_id for point in frontier.operating})
    timed = any(point.spreads for point in frontier.operating)
    found = "".join(
        f"<li>over {axis_title(gain.cost_name)}, {gain.models}: <b>{gain}</b></li>"
        for gain in gains(frontier)
    )
    return (
        f"<h2>Operating points</h2><p><b>{len(frontier.operating)}</b> settings of {models} trained models:"
        f" other k, capacity, priority or expert subset, no training. Hypervolume without and with them:</p>"
        f'<ul class="claims">{found}</ul>{_TIMES_RULE if timed else ""}'
        if found
        else ""
    )


def _size_key(frontier: Frontier) -> str:
    sizes = key_sizes(frontier.points + frontier.rest)
    dots = [
        f'<span><i style="width:{px:.1f}px;height:{px:.1f}px"></i>{number(size)}</span>'
        for size in sizes
        for px in [marker_px(size)]
    ]
    return f"<b>{SIZE_TITLE}</b>{''.join(dots)}" if sizes else ""


def _claims(frontier: Frontier) -> str:
    items = [_claim(check_claim(claim, frontier.points)) for claim in frontier.claims]
    return f'<h2>Claims</h2><ul class="claims">{"".join(items)}</ul>' if items else ""


def _claim(verdict: Verdict) -> str:
    holds = bool(verdict.cells) and not verdict.failing
    mark, kind = ("✓", "holds") if holds else ("✗", "fails") if verdict.failing else (UNKNOWN, "open")
    failing = "".join(f"<li>{escape(cell)}</li>" for cell in verdict.failing)
    where = f"<details><summary>Where it fails</summary><ul>{failing}</ul></details>" if failing else ""
    text = f"{escape(' '.join(verdict.claim.split()))}: <b>{verdict}</b>"
    return f'<li class="{kind}"><span class="mark">{mark}</span><div>{text}{where}</div></li>'
