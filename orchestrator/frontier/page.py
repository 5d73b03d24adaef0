"""A frontier as a single HTML file: plots, claims and a table of all points.

The template `page.html` escapes every text. `page.js` colours the plots, hides what a reader deselects and
sorts the table. The content security policy of the file forbids network access.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from orchestrator.costs import known_costs
from orchestrator.frontier import figure
from orchestrator.frontier.answer import errors_of, upper
from orchestrator.frontier.claims import check_claim
from orchestrator.frontier.frontier import Frontier, gains
from orchestrator.frontier.points import SPACE, Point, hypervolume_by_budget, is_complete
from orchestrator.units import Unit, amount, axis_title, number, unit_of

_FILTERS = (
    amount,
    axis_title,
    figure.facts,
    figure.family_label,
    figure.marker_px,
    number,
    figure.web_link,
)


def frontier_page(frontier: Frontier) -> str:
    """The HTML document, for light and dark themes and for a sandboxed frame.

    Raises: ValueError if a claim cannot be read.
    """
    panels = [frontier, *map(frontier.at_cost, frontier.panels)]
    plots = [panel.plot() for panel in panels]
    drawn = [trace["meta"] for plot in plots for trace in plot["data"]]
    families = [meta["family"] for meta in drawn if meta["family"]]
    if frontier.spending:
        curve = hypervolume_by_budget(frontier.points, frontier.bound, frontier.spending)
        plots.append(figure.budget_plot(curve))
    present = [meta["role"] for meta in drawn] + [status.split(",")[0] for status in frontier.statuses()]
    known = [role for role in figure.ROLES if role in present]
    units = [unit_of(panel.cost_name, [p.cost for p in panel.all_points]) for panel in panels]
    titles = [axis_title(frontier.quality_name), *(unit.title for unit in units)]
    bounds = _bounds(frontier)
    others = [name for name in bounds if name not in {panel.cost_name for panel in panels}]
    axes = [*enumerate(unit.title for unit in units)]
    axes += [*enumerate((bounds[name].title for name in others), len(plots))]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters.update({function.__name__: function for function in _FILTERS})
    return environment.from_string(_file("page.html")).render(
        frontier=frontier,
        states=_states(frontier),
        space=SPACE,
        styles=figure.family_styles([*families, *(point.family for point in frontier.all_points)]),
        roles={
            role: figure.ROLES.get(role, (role.capitalize(), "")) for role in dict.fromkeys(known + present)
        },
        plots=plots,
        further=[frontier.at_cost(name).plot() for name in others],
        axes=axes,
        sizes=plots[0]["layout"]["meta"]["sizes"],
        gains=gains(frontier),
        verdicts=[check_claim(claim, frontier.points) for claim in frontier.claims],
        costs={name: unit.title for name, unit in bounds.items()},
        choices=_choices(frontier, bounds),
        cost_title=units[0].title,
        columns=[
            ("Arm", "arm"),
            *((title, "number") for title in (*titles, frontier.size_title, *_together(frontier))),
            ("Family", "family"),
            ("Status", "status"),
            ("Details", "details"),
            ("MLflow run", "runs"),
        ],
        rows=_rows(panels, units),
        css=Markup(_file("page.css")),
        plotly=Markup(get_plotlyjs()),
        javascript=Markup(_file("page.js")),
    )


def _bounds(frontier: Frontier) -> dict[str, Unit]:
    """The costs that all finished points have, what a model takes to use first, and how they are shown."""
    points = [point for point in frontier.points if is_complete(point)]
    of_use = [name for name in known_costs() if name.startswith("infer/")]
    others = [name for name, cost in known_costs().items() if cost.drawn or name == frontier.cost_name]
    names = dict.fromkeys((*of_use, *others))
    shared = [name for name in names if points and all(upper(p, name) < math.inf for p in points)]
    return {name: unit_of(name, [upper(p, name) for p in points]) for name in shared}


def _choices(frontier: Frontier, bounds: Mapping[str, Unit]) -> dict[str, Any]:
    """What the page needs to name the best arm within a bound, as `answer.answer` does: of each finished arm
    its quality, error and the upper ends of its costs; and Student's t by the number of arms within.
    """
    points = [point for point in frontier.points if is_complete(point)]
    errors = [errors_of(points, number) for number in range(1, len(points) + 1)]
    return {
        "critical": [each.critical for each in errors],
        "arms": [
            {
                "arm": point.arm,
                "quality": point.quality,
                "text": point.quality_text,
                "error": errors[0].of(point),
                "upper": {name: upper(point, name) / unit.size for name, unit in bounds.items()},
            }
            for point in points
        ],
    }


def _file(name: str) -> str:
    return files("orchestrator.frontier").joinpath(name).read_text(encoding="utf-8")


def _states(frontier: Frontier) -> dict[str, int]:
    """State -> trials in it; not arms, which have a trial for each seed."""
    found = Counter(state for _, state in frontier.trials)
    states = ("finished", "failed", "diverged", "stopped", "interrupted", "running", "not started")
    return {state: found[state] for state in states if found[state] or state in states[:3]}


def _together(frontier: Frontier) -> tuple[str, ...]:
    """The title of the column of images that are routed together; none if all are routed one by one."""
    several = any(point.together > 1 for point in frontier.all_points)
    return ("Images routed together",) if several else ()


def _rows(
    panels: Sequence[Frontier], units: Sequence[Unit]
) -> Iterator[tuple[Point, str, str, Sequence[tuple[float | str, str]]]]:
    """Yields point, role, status, and the numbers: a key to sort by, empty if unknown, and a text."""
    columns = [
        [(p.cost, figure.cost_text(p, panel.cost_name, unit.size)) for p in panel.all_points]
        for panel, unit in zip(panels, units, strict=True)
    ]
    points = panels[0].all_points
    columns.insert(0, [(point.quality, point.quality_text) for point in points])
    columns.append([(point.size, number(point.size)) for point in points])
    columns += [[(point.together, str(point.together)) for point in points] for _ in _together(panels[0])]
    for point, status, *numbers in zip(points, panels[0].statuses(), *columns, strict=True):
        keyed = [(value if math.isfinite(value) else "", text) for value, text in numbers]
        yield point, status.split(",")[0], status, keyed
