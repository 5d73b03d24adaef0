"""Claims of the papers about trained routers, each trained and measured here on digits in minutes.

python jobs/study.py capacity
python jobs/study.py specialisation --seeds 5 --stop-at 0.94 --out /tmp/specialisation
python jobs/study.py faster-inference

Prints the table; table and picture go to --out and to a run of MLflow. Seeds decide everything but times.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.usage import add_places, at_least_one, command, plain_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from experiments.studies._result import StudyResult
    from orchestrator.tracking.store import Tracking

STUDIES = {  # name -> what it shows; `experiments.studies` has their code
    "capacity": "batch prioritized routing against vanilla where room is short (V-MoE, figures 5-6)",
    "k": "another number of experts per token than in training (V-MoE, appendix E.4)",
    "random-router": "what a random router in one layer costs (V-MoE, appendix E.1)",
    "specialisation": "subsets of 2 to 16 experts: best, algorithm 1, random (Implicit Bias, figures 1-3, 5)",
    "l2norm": "one expert cannot learn the length of a vector, five can (Implicit Bias, figure 4)",
    "faster-inference": "time against the experts that run, batch 1 and 100 (Implicit Bias, table 3)",
}


def main() -> None:
    args = parser().parse_args()
    with command(f"study {args.name}"):
        run_study(args)


def parser() -> argparse.ArgumentParser:
    studies = "\n".join(f"  {name:18} {about}" for name, about in STUDIES.items())
    parser = plain_parser(__doc__, epilog=f"studies:\n{studies}")
    parser.add_argument("name", choices=STUDIES, metavar="NAME", help="one of the studies below")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="models of each kind (%(default)s)")
    parser.add_argument(
        "--stop-at",
        type=float,
        help="specialisation: accuracy of all experts at which nets are compared (0.95)",
    )
    parser.add_argument(
        "--out", help="directory or URI for picture and table; default: a new one in studies/ below storage"
    )
    add_places(parser)
    return parser


def run_study(args: argparse.Namespace) -> None:
    """Trains and measures what the study compares; prints and publishes the result.

    Raises:
        UsageError: for a --stop-at that does not fit.
    """
    import torch

    from experiments import studies
    from jobs.command import check_writable, open_store, root
    from orchestrator import storage

    options = {}
    if args.stop_at is not None:
        if args.name != "specialisation":
            raise UsageError(f"--stop-at is a flag of the study specialisation, not of {args.name}")
        if not 0 < args.stop_at < 1:
            raise UsageError(f"--stop-at {args.stop_at} must lie between 0 and 1")
        options["stop_at"] = args.stop_at
    torch.set_num_threads(1)  # the models are small: more threads take longer
    name = f"{args.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = storage.join(root(args), "studies", name)
    out = storage.absolute(args.out) if args.out else folder
    check_writable("--out" if args.out else "--storage", out)
    store = open_store(args)
    study = studies.STUDIES[args.name]
    result = study(args.seeds, lambda line: print(line, flush=True), **options)
    print_result(result)
    publish(result, args.name, store, folder=folder, out=out, seeds=args.seeds)
    print(f"{out}/{args.name}.png and .json; MLflow run {name}")


def print_result(result: StudyResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=result.title)
    for heading in result.table:
        table.add_column(heading, justify="right")
    for row in zip(*result.table.values(), strict=True):
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=max(110, Console().width)).print(table)
    for note in result.notes:
        print(note)


def publish(result: StudyResult, study: str, store: Tracking, *, folder: str, out: str, seeds: int) -> None:
    """Writes table and picture to `out` and to a run of MLflow, tagged with `folder`."""
    from orchestrator import storage
    from orchestrator.frontier.drawing import png
    from orchestrator.tracking.find import create_run

    tags = {"role": "study", "study": study, "directory": folder}
    run = create_run(store, folder.rsplit("/", 1)[-1], tags)
    run.tag(seeds=str(seeds), title=result.title)
    run.log({f"study/{name}": value for name, value in result.metrics.items()}, step=0)
    tables = {"table": result.table, **result.details}
    for name, table in tables.items():
        run.write_table(f"{name}.json", table)
    picture = png(result.figure)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / f"{study}.png"
        file.write_bytes(picture)
        run.write_file(file)
    storage.write_bytes(storage.join(out, f"{study}.png"), picture)
    storage.write_bytes(storage.join(out, f"{study}.json"), json.dumps(tables, indent=1).encode())
    run.finish("FINISHED")


if __name__ == "__main__":
    main()
