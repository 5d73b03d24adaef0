"""A frontier as one HTML file that needs nothing else: plot, and a table of every point.

The file asks the network for nothing, and its content security policy keeps it so.
"""

from html import escape

from orchestrator.frontier.figure import frontier_figure
from orchestrator.frontier.points import SPACE, Frontier, hypervolume, on_front
from orchestrator.frontier.style import SIZE_TITLE, key_sizes, marker_px, number
from orchestrator.frontier.table import points_table

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,  # plotly 7 offers by default to upload the chart to its makers
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}

_CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2430; --muted: #5b6675; --line: #d9dee5;
  --grid: #e9ecf0; --tint: #f1f6fb; --accent: #0b63a5; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e6e9ee; --muted: #9aa5b4;
  --line: #343b46; --grid: #262c35; --tint: #1b2530; --accent: #6cb6f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 28px 28px 48px;
  background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0 0 4px; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
p { margin: 0 0 8px; color: var(--muted); }
p b { color: var(--ink); font-weight: 600; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; margin: 0; font-size: 13px; }
.key span { display: inline-flex; gap: 6px; align-items: center; }
.key i { display: inline-block; border-radius: 50%; background: var(--muted); }
.wide { margin-top: 28px; overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { padding: 0; border-bottom: 2px solid var(--line); vertical-align: bottom; }
th button { width: 100%; padding: 7px 10px; font: inherit; font-weight: 600; text-align: inherit;
  white-space: normal; color: inherit; background: none; border: 0; cursor: pointer; }
th button:hover, a { color: var(--accent); }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
.number, th.number { text-align: right; }
.arm { font-weight: 600; }
.details { white-space: normal; min-width: 120px; color: var(--muted); font-size: 12.5px; }
.details span { white-space: nowrap; }
tr.frontier td { background: var(--tint); }
tr.frontier td:first-child { box-shadow: inset 3px 0 var(--accent); }
tr:not(.frontier) .arm { font-weight: 400; }
tr.frontier .status { color: var(--accent); font-weight: 600; }
code { display: inline-block; max-width: 12ch; overflow: hidden; text-overflow: ellipsis;
  vertical-align: bottom; font: 12.5px/1.6 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code.whole { max-width: none; }
.copy { margin-left: 6px; padding: 1px 7px; font: inherit; font-size: 12px; color: var(--muted);
  background: none; border: 1px solid var(--line); border-radius: 5px; cursor: pointer; }
.copy:hover { color: var(--accent); border-color: var(--accent); }
"""

_SCRIPT = """
const plot = document.getElementById("plot"), body = document.querySelector("tbody");

const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name).trim();
  const layout = { "font.color": colour("--ink"), "hoverlabel.bgcolor": colour("--paper"),
    "hoverlabel.bordercolor": colour("--muted"), "hoverlabel.font.color": colour("--ink"),
    "modebar.color": colour("--muted"), "modebar.activecolor": colour("--accent"),
    "modebar.bgcolor": "rgba(0,0,0,0)" };
  for (const axis of ["xaxis", "yaxis"])
    Object.assign(layout, { [axis + ".gridcolor"]: colour("--grid"), [axis + ".linecolor"]: colour("--line"),
      [axis + ".tickcolor"]: colour("--line") });
  plot.layout.annotations?.forEach((_, i) => layout[`annotations[${i}].arrowcolor`] = colour("--muted"));
  const lines = plot.data.flatMap((trace, i) => trace.meta === "front" ? [i] : []);
  Plotly.update(plot, { "line.color": colour("--muted") }, layout, lines);
}
paint();
dark.addEventListener("change", paint);

plot.on("plotly_click", event => {
  const link = event.points[0].customdata;
  if (link) window.open(link, "_blank", "noopener");
});

function key(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? parseFloat(cell.dataset.value) : cell.textContent.toLowerCase();
}
function compare(a, b) {
  if (Number.isNaN(a) || Number.isNaN(b)) return 0;
  return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
}
document.querySelectorAll("th").forEach((head, column) => head.firstChild.addEventListener("click", () => {
  const falling = head.ariaSort === "ascending";
  document.querySelectorAll("th").forEach(other => other.ariaSort = null);
  head.ariaSort = falling ? "descending" : "ascending";
  const rows = [...body.rows].map(row => [key(row, column), row]);
  rows.sort(([a], [b]) => Number.isNaN(a) - Number.isNaN(b) || (falling ? -1 : 1) * compare(a, b));
  body.append(...rows.map(([, row]) => row));
}));

body.addEventListener("click", async ({ target: button }) => {
  if (!button.matches(".copy")) return;
  const id = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(id.textContent);
    button.textContent = "copied";
  } catch {  // refused in a sandboxed frame: show the whole id, selected, for the reader to copy
    id.classList.add("whole");
    getSelection().selectAllChildren(id);
    button.textContent = "selected";
  }
  setTimeout(() => button.textContent = "copy", 1500);
});
"""


def frontier_page(frontier: Frontier) -> str:
    """The whole HTML document, readable in light and dark and in a sandboxed frame."""
    plot = frontier_figure(frontier).to_html(
        full_html=False,
        include_plotlyjs=True,
        div_id="plot",
        config=_CONFIG,
    )
    name = escape(frontier.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{name}</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{name}</h1>
<p>{_summary(frontier)}</p>
{plot}
{_size_key(frontier)}
{points_table(frontier)}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _summary(frontier: Frontier) -> str:
    counts = {"trials": len(frontier.points)}
    for status in ("finished", "failed", "diverged", "running"):
        counts[status] = sum(point.status == status for point in frontier.points)
    counts["on the frontier"] = sum(on_front(frontier))
    counts["confirm"] = len(frontier.rest)
    always = {"trials", "finished", "failed", "diverged", "on the frontier"}
    parts = [f"<b>{count}</b> {what}" for what, count in counts.items() if count or what in always]
    reference = ",&nbsp;".join(number(value) for value in frontier.reference)
    area = f"hypervolume <b>{hypervolume(frontier):.4f}</b> in ({SPACE}) to the reference ({reference})"
    return " &middot; ".join([*parts, area])


def _size_key(frontier: Frontier) -> str:
    sizes = key_sizes(frontier.points + frontier.rest)
    if not sizes:
        return ""
    dots = [
        f'<span><i style="width:{px:.1f}px;height:{px:.1f}px"></i>{number(size)}</span>'
        for size in sizes
        for px in [marker_px(size)]
    ]
    return f'<p class="key"><b>{SIZE_TITLE}</b>{"".join(dots)}</p>'
