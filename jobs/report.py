"""Rebuild the frontier page and pictures of a sweep from MLflow alone; of other tools' runs too.

python jobs/report.py --name quickstart --out /tmp/report
python jobs/report.py --experiment my-trainer --quality val_accuracy --cost gpu_hours --family optimizer
"""

import argparse

from jobs.command import add_places, tracking_uri
from jobs.show import print_frontier
from jobs.usage import command
from orchestrator import storage
from orchestrator.frontier.claims import parse_claim
from orchestrator.frontier.points import Frontier, is_complete
from orchestrator.sweeping.foreign import foreign_frontier
from orchestrator.sweeping.report import FILES, Axes, read_frontier, write_files
from orchestrator.tracking import Tracking, find_runs, open_reader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="quickstart", help="of the sweep (%(default)s)")
    parser.add_argument("--out", default=".", help="directory for frontier.html and pictures (%(default)s)")
    add_places(parser)
    other = parser.add_argument_group("runs of another tool")
    other.add_argument("--experiment", help="MLflow experiment that they lie in")
    other.add_argument("--filter", default="", help="which of them, as MLflow searches: params.size = 'B'")
    other.add_argument("--quality", help="metric to maximise")
    other.add_argument("--cost", help="metric to minimise, above 0")
    other.add_argument(
        "--family", default="family", help="param or tag that tells curves apart (%(default)s)"
    )
    other.add_argument("--chance", type=float, default=0.0, help="quality that counts as none (%(default)s)")
    other.add_argument("--claim", action="append", default=[], help="statement to check (repeatable)")
    args = parser.parse_args()
    if args.experiment and not (args.quality and args.cost):
        parser.error("--experiment needs --quality and --cost: the metrics to judge by")
    for claim in args.claim:
        try:
            parse_claim(claim)
        except ValueError as error:
            parser.error(f"--claim {claim!r}: {error}")
    with command():
        frontier = found(args, open_reader(tracking_uri(args)))
        write_files(frontier, storage.absolute(args.out))
        print_frontier(frontier)
        if left_out := sum(p.status == "finished" and not is_complete(p) for p in frontier.points):
            print(f"{left_out} finished runs are not judged: quality or cost unknown, or a cost not above 0")
        print(f"{args.out}/{{{','.join(FILES)}}}: {len(frontier.points)} points of {frontier.name}")


def found(args: argparse.Namespace, store: Tracking) -> Frontier:
    if not args.experiment:
        return read_frontier(store, args.name)
    axes = Axes(quality=args.quality, cost=args.cost, chance=args.chance)
    runs = find_runs(store, args.experiment, args.filter)
    return foreign_frontier(args.experiment, runs, axes, family=args.family, claims=args.claim)


if __name__ == "__main__":
    main()
