"""All of it as one HTML file that needs nothing else and asks the network for nothing."""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

from orchestrator.evaluation.microscope.drawing import DPI
from orchestrator.evaluation.microscope.tables import Table
from orchestrator.frontier.figure import detail

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2430; --muted: #5b6675; --line: #d9dee5; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e6e9ee; --muted: #9aa5b4; --line: #343b46; } }
body { margin: 0 auto; max-width: 1240px; padding: 28px 28px 48px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0 0 4px; font-size: 26px; overflow-wrap: anywhere; }
h2 { margin: 30px 0 4px; font-size: 18px; }
p { margin: 0 0 10px; color: var(--muted); max-width: 90ch; }
nav { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 10px 0; font-size: 13.5px; }
a { color: inherit; }
img { display: block; max-width: 100%; height: auto; margin: 0 0 14px; padding: 8px; box-sizing: border-box;
  background: #ffffff; border: 1px solid var(--line); border-radius: 8px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
"""


def page(title: str, facts: str, layers: Table, parts: Sequence[tuple[str, str, Mapping[str, bytes]]]) -> str:
    """`parts`: title, how to read it, and pictures as PNG by name; readable in light and dark."""
    links = "".join(f'<a href="#part{i}">{escape(name)}</a>' for i, (name, _, _) in enumerate(parts))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(facts)}</p>
<nav>{links}</nav>
<div class="wide">{_table(layers)}</div>
{"".join(_part(i, *part) for i, part in enumerate(parts))}
</body>
</html>
"""


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _part(index: int, title: str, text: str, pictures: Mapping[str, bytes]) -> str:
    images = "".join(
        f'<img alt="{escape(name)}" src="data:image/png;base64,{b64encode(content).decode()}">\n'
        for name, content in pictures.items()
    )
    return f'<h2 id="part{index}">{escape(title)}</h2>\n<p>{escape(text)}</p>\n{images}'


def _table(columns: Table) -> str:
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    rows = (
        "".join(f"<td>{escape(detail(cell))}</td>" for cell in row)
        for row in zip(*columns.values(), strict=True)
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
