"""Draw the frontier of a sweep again from its directory, and update MLflow, or serve MLflow's pages.

python jobs/report.py --name quickstart
python jobs/report.py --name quickstart --out /tmp/report --tracking-uri http://host:5000
python jobs/report.py --name quickstart --out paper --format tex pdf csv   # a table and a figure for a paper
python jobs/report.py --name quickstart --out paper --format pdf --cost infer/ms --families dense,soft
python jobs/report.py --published softmoe-figure3    # as a paper printed it; --published help lists them all
python jobs/report.py --serve --port 5001    # all that is in the storage's mlflow.db, until Ctrl-C
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs._cli import UNSENT, Places, check_out, command, print_table
from jobs._flags import flag, parse, positive
from jobs.pareto_sweep import print_frontier
from orchestrator.errors import UsageError
from orchestrator.names import run_name

if TYPE_CHECKING:
    from orchestrator.frontier.frontier import Frontier

# Asks a server until it answers, for at most a minute, and says so.
READY = """
import sys, time, urllib.request
for _ in range(300):
    try:
        urllib.request.urlopen(sys.argv[1] + "/health", timeout=1).close()
    except OSError:
        time.sleep(0.2)
    else:
        print("ready; Ctrl-C ends it", flush=True)
        break
"""


FORMATS = ("csv", "tex", "pdf", "svg", "png")


def format_name(text: str) -> str:
    """Reads --format. Raises UsageError for a format that does not exist."""
    if text not in FORMATS:
        raise UsageError(f"unknown format {text!r}; known: {', '.join(FORMATS)}")
    return text


def names(text: str) -> tuple[str, ...]:
    """Reads names that commas part."""
    return tuple(filter(None, text.split(",")))


@dataclass(frozen=True, kw_only=True)
class PaperFlags:
    """what --format writes"""

    width: float | None = flag(None, "width of the figure in inches (default: 3.25, a column)", read=positive)
    font: float | None = flag(None, "size of the figure's text in points (default: 8)", read=positive)
    title: str | None = flag(None, "title above the figure (default: none)", metavar="TEXT")
    cost: str | None = flag(
        None, "the cost of figure and table, such as infer/ms (default: the sweep's)", metavar="METRIC"
    )
    families: tuple[str, ...] | None = flag(
        None, "only arms of these families: dense,soft", read=names, metavar="A,B"
    )
    no_baselines: bool = flag(False, "without the baselines")
    columns: tuple[str, ...] | None = flag(
        None,
        "further columns in tex: costs and statistics of routers, as cost/params,moe/dropped_frac",
        read=names,
        metavar="METRICS",
    )

    def given(self) -> dict[str, Any]:
        """Returns the options of `write_formats` that were given."""
        options = {name: value for name, value in vars(self).items() if value not in (None, False)}
        return {"baselines": False, **options} if options.pop("no_baselines", False) else options


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    name: str = flag("quickstart", "name of the sweep", read=run_name)
    published: str | None = flag(None, "draw a figure of a paper in place of a sweep; help: list them")
    out: str | None = flag(None, "directory or URI for page and pictures; default: the sweep's own")
    format: tuple[str, ...] = flag(
        (),
        f"write frontier.FORMAT to --out in place of the page: {', '.join(FORMATS)}; a table or the figure",
        nargs="+",
        read=format_name,
    )
    serve: bool = flag(False, "serve MLflow's pages of the storage on this machine, until Ctrl-C")
    port: int = flag(5000, "--serve: port of 127.0.0.1", least=1)
    paper: PaperFlags
    places: Places

    def __post_init__(self) -> None:
        if not self.format and (given := self.paper.given()):
            name = "no-baselines" if "baselines" in given else next(iter(given))
            raise UsageError(f"without --format, --{name} does nothing")
        if self.format and not self.out:
            raise UsageError("--format needs --out, the folder for its files")


def main() -> None:
    flags = parse(ReportFlags, __doc__)
    if flags.serve:
        return serve(flags)
    with command(f"drawing the frontier of {flags.published or flags.name}", plugins=flags.places.plugin):
        report_published(flags, flags.published) if flags.published else report(flags)


def report(flags: ReportFlags) -> None:
    """Writes page and pictures, prints the frontier, and brings MLflow up to date."""
    from orchestrator import storage
    from orchestrator.frontier.points import is_complete
    from orchestrator.output import redact_uri
    from orchestrator.runs.state import directory_state
    from orchestrator.sweeps.build import sweep_frontier
    from orchestrator.sweeps.publish import FILES, publish_and_send

    directory, missing = flags.places.below(flags.name), ""
    out = storage.absolute(flags.out) if flags.out else directory
    if flags.out:
        check_out(out, own=[*FILES, *(f"frontier.{each}" for each in FORMATS)])
        frontier, _, _ = sweep_frontier(directory, live=directory_state(directory) == "running")
    else:
        frontier, missing = publish_and_send(directory, flags.places.open_store)
        if missing is None:
            print(f"a command trains in {directory}: it keeps MLflow up to date")
        else:
            print(missing or f"MLflow at {redact_uri(flags.places.uri())} has all of {directory}")
    files, frontier = draw(flags, frontier, out) if flags.out or missing is None else (FILES, frontier)
    print_frontier(frontier)
    if left_out := sum(p.status == "finished" and not is_complete(p) for p in frontier.points):
        print(f"{left_out} finished arms are not judged: quality or cost unknown, or a cost not above 0")
    print_files(out, files, frontier)
    if missing:
        sys.exit(UNSENT)


def print_files(out: str, files: Sequence[str], frontier: Frontier) -> None:
    names = files[0] if len(files) == 1 else f"{{{','.join(files)}}}"
    print(f"{out}/{names}: {len(frontier.points)} points of {frontier.name}")


def draw(flags: ReportFlags, frontier: Frontier, out: str) -> tuple[Sequence[str], Frontier]:
    """Writes page and pictures, or the files of --format in their place; returns their names, and what they
    show.
    """
    from orchestrator.sweeps.publish import FILES, write_files, write_formats

    if flags.format:
        part = write_formats(frontier, out, flags.format, **flags.paper.given())
        return [f"frontier.{each}" for each in flags.format], part
    write_files(frontier, out)
    return FILES, frontier


def serve(flags: ReportFlags) -> None:
    """Prints the links to runs and models, becomes MLflow's server, and says when that answers."""
    root, address = flags.places.root(), f"http://127.0.0.1:{flags.port}"
    with command(f"opening the MLflow store of {root}"):
        from orchestrator.tracking.lost import set_right
        from orchestrator.tracking.store import database_uri, links, open_reader, open_tracking

        try:
            socket.create_server(("127.0.0.1", flags.port)).close()
        except (OSError, OverflowError):
            raise UsageError(
                f"port {flags.port} is in use or above 65535: choose another --port, as in make ui PORT=5001"
            ) from None
        uri = database_uri(f"{root}/mlflow.db")
        open_reader(uri)
        store = open_tracking(uri, artifacts=Path(root, "mlartifacts").as_uri())
        set_right(store)
        for name, link in links(store, address):
            print(f"{name:<8} {link}", flush=True)
    # A fork of a process with threads may only run what is plain: an interpreter of its own asks.
    subprocess.Popen([sys.executable, "-c", READY, address])
    # One process is enough for one person; MLflow's default is four, and eight for jobs of its LLM pages.
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    where = ["--host", "127.0.0.1", "--port", str(flags.port), "--workers", "1"]
    where += ["--uvicorn-opts", "--log-level warning"]  # a line per request would push the links away
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, *where])


def report_published(flags: ReportFlags, name: str) -> None:
    """Writes page and pictures of what a paper printed, below the storage unless --out says where."""
    from orchestrator import storage
    from orchestrator.frontier.published import DRAWABLE, published_frontier
    from orchestrator.sweeps.publish import FILES
    from orchestrator.units import axis_title

    if name == "help":
        rows = [(known, source, *map(axis_title, axes)) for known, (source, *axes) in DRAWABLE.items()]
        print_table(("--published", "points of", "quality", "cost"), rows, left=4)
        return
    frontier = published_frontier(name)
    out = storage.absolute(flags.out) if flags.out else flags.places.below("reports", name)
    if flags.out:
        check_out(out, own=[*FILES, *(f"frontier.{each}" for each in FORMATS)])
    files, frontier = draw(flags, frontier, out)
    print_frontier(frontier)
    print_files(out, files, frontier)


if __name__ == "__main__":
    main()
