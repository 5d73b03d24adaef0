"""Files that a sweep writes beside its runs: page, pictures, and a summary for trackers."""

import logging
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.frontier.drawing import save_column
from orchestrator.frontier.figure import cost_text
from orchestrator.frontier.frontier import UNDECIDED, Frontier, gains, operating_costs
from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.points import Point, as_shown, is_complete
from orchestrator.frontier.tables import latex
from orchestrator.output import IN_BITS
from orchestrator.runs.lock import REPORT, InUse, locked, wait_for_report
from orchestrator.runs.measurements import table
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord
from orchestrator.sweeps.build import TrialRecord, say_raised, sweep_frontier
from orchestrator.sweeps.operating import picture
from orchestrator.tracking.base import update_now
from orchestrator.tracking.registry import BEST, CONFIRMED, FAST, KNEE
from orchestrator.tracking.store import Tracking
from orchestrator.tracking.sync import Sync
from orchestrator.units import amount, unit_of

log = logging.getLogger(__name__)

PAGE, PNG, SVG = "frontier.html", "frontier.png", "frontier.svg"
FILES = (PAGE, PNG, SVG)
NARROWEST = 1.5  # inches of a figure
_PLACES = {
    FAST: "the cheapest of the frontier",
    KNEE: "the knee of the frontier",
    BEST: "the best of the frontier",
    CONFIRMED: "retrained for longer than the sweep's trials",
}


def write_files(frontier: Frontier, folder: str) -> list[str]:
    """Writes page and pictures below a local folder or a URI; returns their names."""
    with tempfile.TemporaryDirectory() as temporary:
        page, *pictures = (Path(temporary, name) for name in FILES)
        page.write_text(frontier_page(frontier), encoding="utf-8")
        frontier.save_picture(*pictures)
        for cost in operating_costs(frontier):
            pictures.append(Path(temporary, picture(cost)))
            frontier.at_cost(cost).save_picture(pictures[-1])
        for file in (page, *pictures):
            storage.write_bytes(storage.join(folder, file.name), file.read_bytes())
    return [file.name for file in (page, *pictures)]


def write_formats(
    frontier: Frontier,
    folder: str,
    formats: Collection[str],
    *,
    width: float = 3.25,
    font: float = 8.0,
    title: str = "",
    cost: str | None = None,
    families: Collection[str] = (),
    baselines: bool = True,
    columns: Sequence[str] = (),
) -> Frontier:
    """Writes ``frontier.FORMAT`` for each below a local folder or a URI: a table for a paper as csv or tex, a
    figure as pdf, svg or png. Returns what they show.

    Args:
        width: of the figure, in inches, at least 1.5; 3.25 is a column of most conferences.
        font: size of the figure's text, in points.
        title: above the figure; a paper has a caption in its place.
        cost: metric of the cost that is drawn, and by which the table goes; default: that of the sweep.
        families: only arms of these.
        baselines: whether the lines of baselines are drawn and listed.
        columns: metrics of further costs and statistics of routers in tex; csv has all.

    Raises:
        UsageError: for a cost, a family or a column that there is not, of which it names those known, and for
            a figure that is too narrow.
    """
    if width < NARROWEST:
        raise UsageError(f"`width` {width:g} has no room for a figure: give at least {NARROWEST:g} inches")
    part = frontier.part(cost=cost, families=families, baselines=baselines)
    with tempfile.TemporaryDirectory() as temporary:
        for each in formats:
            file = Path(temporary, f"frontier.{each}")
            if each == "csv":
                part.to_dataframe().to_csv(file, index=False)
            elif each == "tex":
                file.write_text(latex(part, columns), encoding="utf-8")
            else:
                save_column(part.plot(), file, width=width, font=font, title=title)
            storage.write_bytes(storage.join(folder, file.name), file.read_bytes())
    return part


def publish(directory: str) -> Frontier:
    """Writes page, pictures, table and summary of a sweep to its directory, from where MLflow gets them."""
    own, (frontier, sweep, trials) = SweepDir(directory), sweep_frontier(directory)
    files = write_files(frontier, directory)
    if frontier.reference != sweep.reference:
        say_raised(sweep.reference, frontier.reference, frontier.cost_name)
        own.write(replace(sweep, reference=dict(frontier.reference)))
    members = [run for point in frontier.front for run in point.run_ids]
    metrics = {"hypervolume": frontier.hypervolume, "frontier/points": float(len(frontier.front))}
    if best := frontier.front:
        metrics[f"frontier/best/{frontier.quality_name}"] = best[-1].quality
    for gain in gains(frontier):
        name = f"hypervolume/{gain.cost_name}/{gain.models.replace(' ', '_')}"
        metrics |= {f"{name}/as_trained": gain.without, f"{name}/operating": gain.with_points}
    tables = {"frontier.json": table(frontier.to_dataframe().to_dict("list"))}
    tags = {
        "hypervolume.reference": f"{frontier.cost_name}={frontier.bound[0]:g}, "
        f"{frontier.quality_name}={frontier.bound[1]:g}"
    }
    summary = {
        "time_s": time.time(),
        "note": _note(frontier, sweep),
        "metrics": metrics,
        "tags": tags,
        "pareto": members,
        "aliases": _aliases(frontier, {trial.run_id: trial for trial in trials}),
        "files": files,
        "tables": tables,
    }
    own.write_summary(summary)
    return frontier


def publish_and_send(directory: str, open_store: Callable[[], Tracking]) -> tuple[Frontier, str | None]:
    """Publishes a sweep and sends MLflow what it lacks; returns the frontier and what MLflow did not take,
    empty if it has all. While a command trains there, which does both at its end, returns the frontier so far
    and None.
    """
    wait_for_report(directory)
    try:
        with locked(storage.join(directory, REPORT)), locked(directory):
            frontier = publish(directory)
            try:
                return frontier, update_now(Sync(open_store(), directory))
            except UsageError as error:  # no server answers
                return frontier, str(error)
    except InUse:
        return sweep_frontier(directory, live=True)[0], None


def _aliases(frontier: Frontier, trials: Mapping[str, TrialRecord]) -> dict[str, dict[str, str]]:
    """alias -> the trial that it names: on the frontier the cheapest point, the knee and the best; and the
    arm that `knee_points` retrains, if it was retrained.
    """
    front = frontier.front
    if not front:
        return {}
    named = {FAST: front[0], KNEE: frontier.knee, BEST: front[-1]}
    for point in frontier.retrained:
        if is_complete(point) and point.arm == frontier.knee.arm:
            named[CONFIRMED] = point
    found = {}
    for alias, point in named.items():
        run = point.typical_run
        if trials[run].checkpoint:
            found[alias] = {
                "run": run,
                "checkpoint": trials[run].checkpoint,
                "weights": trials[run].weights,
                "description": _description(frontier, alias, point, trials[run]),
            }
    return found


def _description(frontier: Frontier, alias: str, point: Point, trial: TrialRecord) -> str:
    name, shown = as_shown(frontier.quality_name, point.quality)
    quality = f"{name} {shown:.4f}"
    if point.qualities:
        each = ", ".join(f"{as_shown(frontier.quality_name, q)[1]:.4f}" for q in point.qualities)
        quality += (
            f" (mean of {len(point.qualities)} seeds: {each}; this is {trial.run_id}, nearest to the mean)"
        )
    else:
        quality += f" ({'one seed' if alias == CONFIRMED else UNDECIDED})"
    return (
        f"Sweep {frontier.name}, arm {point.arm}, {_PLACES[alias]}: {quality};"
        f" {frontier.cost_name} {amount(frontier.cost_name, point.cost)}."
        + (f" Its run has a better checkpoint: {trial.better}." if trial.better else "")
    )


def _note(frontier: Frontier, sweep: SweepRecord) -> str:
    """The description of the sweep's MLflow run, in markdown."""
    data = sweep.base.get("data", {}).get("path", "")
    unit = unit_of(frontier.cost_name, [point.cost for point in frontier.front])
    lines = [
        f"# Sweep {sweep.name}",
        "",
        f"{frontier.subtitle} {sweep.quality} against {sweep.cost}. Data: `{data}`"
        f" (digest `{sweep.data_digest[:12]}`). Hypervolume {frontier.hypervolume:.4f}, in decades of cost"
        f" times fractions of quality, from {frontier.quality_name}={frontier.bound[1]:g} at"
        f" {frontier.cost_name}={amount(frontier.cost_name, frontier.bound[0])}.",
        "",
        *(line for note in frontier.notes for line in (note, "")),
        f"| frontier | {IN_BITS.get(sweep.quality, sweep.quality)} | {unit.title} |",
        "|---|---|---|",
    ]
    for point in frontier.front:
        cost = cost_text(point, frontier.cost_name, unit.size)
        knee = f" ({', '.join(filter(None, ['knee', frontier.doubt]))})" if point is frontier.knee else ""
        lines.append(f"| {point.arm}{knee} | {point.quality_text} | {cost} |")
    return "\n".join([*lines, "", f"Artifacts: `{PAGE}` (interactive), `{PNG}`, `frontier.json` (all arms)."])
