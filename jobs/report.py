"""Draw the frontier of a sweep again, from its directory or, where that is away, from MLflow alone; with the
directory, also send MLflow whatever it lacks.

python jobs/report.py --name quickstart
python jobs/report.py --name quickstart --out /tmp/report --tracking-uri http://host:5000
"""

from __future__ import annotations

import argparse

from jobs.usage import add_places, command, plain_parser, run_name


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--name", type=run_name, default="quickstart", help="name of the sweep (%(default)s)")
    parser.add_argument(
        "--out", help="directory or URI for frontier.html and pictures; default: the sweep's own"
    )
    add_places(parser)
    args = parser.parse_args()
    with command(f"drawing the frontier of {args.name}"):
        report(args)


def report(args: argparse.Namespace) -> None:
    """Writes page and pictures, prints the frontier, and brings MLflow up to date."""
    from jobs.command import check_out, open_store, root, tracking_uri
    from jobs.show import print_frontier
    from orchestrator import storage
    from orchestrator.frontier.points import is_complete
    from orchestrator.sweeps.build import mlflow_frontier, sweep_frontier
    from orchestrator.sweeps.publish import FILES, publish, write_files
    from orchestrator.tracking.store import open_reader, redact_uri
    from orchestrator.tracking.sync import Sync
    from orchestrator.training.run_directory import locked, read_sweep

    directory = storage.join(root(args), args.name)
    out = storage.absolute(args.out) if args.out else directory
    if args.out:
        check_out(out, own=FILES)
    if (record := read_sweep(directory)) is None:
        frontier = mlflow_frontier(open_reader(tracking_uri(args)), args.name)
        write_files(frontier, out)
    elif record.status == "running" or args.out:
        frontier, _, _ = sweep_frontier(directory)
        write_files(frontier, out)
    else:
        with locked(directory):
            frontier = publish(directory)
            store = open_store(args)
            Sync(store, directory).update()
        print(f"MLflow at {redact_uri(store.uri)} has all of {directory}")
    print_frontier(frontier)
    if left_out := sum(p.status == "finished" and not is_complete(p) for p in frontier.points):
        print(f"{left_out} finished arms are not judged: quality or cost unknown, or a cost not above 0")
    print(f"{out}/{{{','.join(FILES)}}}: {len(frontier.points)} points of {frontier.name}")


if __name__ == "__main__":
    main()
