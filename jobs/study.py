"""Claims of the papers about trained routers, each trained and measured here on digits in minutes.

python jobs/study.py capacity
python jobs/study.py specialisation --seeds 5 --stop-at 0.94 --out /tmp/specialisation
python jobs/study.py faster-inference

Prints the table; table and picture go to --out and to a run of MLflow. Seeds decide everything but times.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jobs.command import add_places, root, tracking
from jobs.usage import command
from orchestrator import storage
from orchestrator.config import UsageError
from orchestrator.evaluation.studies.catalog import STUDIES, Study, specialisation_at
from orchestrator.evaluation.studies.found import Found
from orchestrator.evaluation.studies.picture import draw
from orchestrator.tracking import Tracking, track


def main() -> None:
    args = parser().parse_args()
    with command():
        study = chosen(args)
        torch.set_num_threads(1)  # the models are small: more threads take longer
        name = f"{args.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = storage.join(root(args), "studies", name)
        with tracking(args, name) as store:
            found = study.run(args.seeds, lambda line: print(line, flush=True))
            print_found(found)
            out = storage.absolute(args.out) if args.out else folder
            publish(found, args.name, store, folder=folder, out=out, seeds=args.seeds)
            print(f"{out}/{args.name}.png and .json; MLflow run {name}")


def parser() -> argparse.ArgumentParser:
    studies = "\n".join(f"  {name:18} {study.about}" for name, study in STUDIES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"studies:\n{studies}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=STUDIES, metavar="NAME", help="one of those below")
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind (%(default)s)")
    parser.add_argument(
        "--stop-at",
        type=float,
        help="specialisation: the accuracy of all experts at which nets are compared (0.95)",
    )
    parser.add_argument(
        "--out", help="directory or URI for picture and table; default: a new one in studies/ below storage"
    )
    add_places(parser)
    return parser


def chosen(args: argparse.Namespace) -> Study:
    """Raises UsageError for flags that do not fit."""
    if args.seeds < 1:
        raise UsageError(f"--seeds {args.seeds} must be at least 1")
    if args.stop_at is None:
        return STUDIES[args.name]
    if args.name != "specialisation":
        raise UsageError(f"--stop-at is of the study specialisation, not of {args.name}")
    if not 0 < args.stop_at < 1:
        raise UsageError(f"--stop-at {args.stop_at} must lie between 0 and 1")
    return specialisation_at(args.stop_at)


def print_found(found: Found) -> None:
    table = Table(title=found.title)
    for heading in found.table:
        table.add_column(heading, justify="right")
    for row in zip(*found.table.values(), strict=True):
        table.add_row(*map(cell, row))
    Console(width=max(110, Console().width)).print(table)
    for note in found.notes:
        print(note)


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def publish(found: Found, study: str, store: Tracking, *, folder: str, out: str, seeds: int) -> None:
    """`folder`: where the run of MLflow is remembered."""
    run = track(store, folder, folder.rsplit("/", 1)[-1], tags={"role": "study", "study": study})
    run.tag(seeds=str(seeds), title=found.title)
    run.log_at(0, {f"study/{name}": value for name, value in found.figures.items()})
    tables = {"table": found.table, **found.details}
    for name, table in tables.items():
        run.write_table(f"{name}.json", table)
    with tempfile.TemporaryDirectory() as temporary:
        picture = Path(temporary) / f"{study}.png"
        draw(found, picture)
        run.write_file(picture)
        storage.write_bytes(storage.join(out, picture.name), picture.read_bytes())
    storage.write_bytes(storage.join(out, f"{study}.json"), json.dumps(tables, indent=1).encode())
    run.finish("FINISHED")


if __name__ == "__main__":
    main()
