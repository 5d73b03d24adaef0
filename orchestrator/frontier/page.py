"""A frontier as one HTML file that needs nothing else: plots, claims and a table of all points.

The template `page.html` escapes every text. `page.js` colours the plots, hides what a reader deselects and
sorts the table. The file asks the network for nothing, and its content security policy keeps it so.
"""

import math
from collections.abc import Iterator, Sequence
from importlib.resources import files

from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from orchestrator.frontier import figure
from orchestrator.frontier.claims import check_claim
from orchestrator.frontier.drawing import Json, plotly_data
from orchestrator.frontier.frontier import Frontier, gains
from orchestrator.frontier.points import SPACE, Point, hypervolume_by_budget

_FILTERS = (
    figure.axis_title,
    figure.facts,
    figure.family_label,
    figure.marker_px,
    figure.number,
    figure.web_link,
)


def frontier_page(frontier: Frontier) -> str:
    """The whole HTML document, readable in light and dark and in a sandboxed frame.

    Raises: ValueError if one of the claims cannot be read.
    """
    panels = [frontier, *map(frontier.at_cost, frontier.panels)]
    plots = [panel.figure_data() for panel in panels]
    drawn = [series for plot in plots for series in plot.series]
    families = [series.family for series in drawn if series.family]
    if frontier.spending:
        curve = hypervolume_by_budget(frontier.points, frontier.bound, frontier.spending)
        plots.append(figure.budget_data(curve))
    present = [series.role for series in drawn] + [status.split(",")[0] for status in frontier.statuses()]
    known = [role for role in figure.ROLES if role in present]
    titles = [figure.axis_title(name) for name in (*(p.cost_name for p in panels), frontier.quality_name)]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters.update({function.__name__: function for function in _FILTERS})
    return environment.from_string(_file("page.html")).render(
        frontier=frontier,
        counts=_counts(frontier),
        space=SPACE,
        styles=figure.family_styles([*families, *(point.family for point in frontier.all_points)]),
        roles={
            role: figure.ROLES.get(role, (role.capitalize(), "")) for role in dict.fromkeys(known + present)
        },
        plots=[plotly_data(plot) for plot in plots],
        sizes=plots[0].sizes,
        size_title=figure.SIZE_TITLE,
        gains=gains(frontier),
        verdicts=[check_claim(claim, frontier.points) for claim in frontier.claims],
        columns=[
            ("Arm", "arm"),
            ("Family", "family"),
            *((title, "number") for title in (*titles, figure.SIZE_TITLE)),
            ("Status", "status"),
            ("Details", "details"),
            ("MLflow run", "runs"),
        ],
        rows=_rows(panels),
        css=Markup(_file("page.css")),
        plotly=Markup(get_plotlyjs()),
        javascript=Markup(_file("page.js")),
    )


def _file(name: str) -> str:
    return files("orchestrator.frontier").joinpath(name).read_text(encoding="utf-8")


def _counts(frontier: Frontier) -> Json:
    counts = {"trials": len(frontier.points)}
    for status in ("finished", "stopped", "failed", "diverged", "running"):
        counts[status] = sum(point.status == status for point in frontier.points)
    counts |= {"on the frontier": len(frontier.front), "retrained": len(frontier.retrained)}
    always = {"trials", "finished", "failed", "diverged", "on the frontier"}
    return {what: count for what, count in counts.items() if count or what in always}


def _rows(panels: list[Frontier]) -> Iterator[tuple[Point, str, str, Sequence[tuple[float | str, str]]]]:
    """Point, role, status, and for each number what it is sorted by, empty if it is unknown, and its text."""
    columns = [
        [(point.cost, figure.cost_text(point, panel.cost_name)) for point in panel.all_points]
        for panel in panels
    ]
    points = panels[0].all_points
    columns.append([(point.quality, point.quality_text) for point in points])
    columns.append([(point.size, figure.number(point.size)) for point in points])
    for point, status, *numbers in zip(points, panels[0].statuses(), *columns, strict=True):
        keyed = [(value if math.isfinite(value) else "", text) for value, text in numbers]
        yield point, status.split(",")[0], status, keyed
