"""Rebuild the frontier page and pictures of a sweep from MLflow alone; of other tools' runs too.

python jobs/report.py --name quickstart --out /tmp/report
python jobs/report.py --experiment my-trainer --quality val_accuracy --cost gpu_hours --family optimizer
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jobs.usage import add_places, command, plain_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.tracking import Tracking


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--name", default="quickstart", help="of the sweep (%(default)s)")
    parser.add_argument(
        "--out",
        help="directory or URI for frontier.html and pictures; default: the sweep's own below the storage, or"
        " reports/EXPERIMENT there",
    )
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
    with command(f"drawing the frontier of {args.experiment or args.name}"):
        report(args)


def report(args: argparse.Namespace) -> None:
    """Reads the runs, writes page and pictures, prints the frontier."""
    from jobs.command import check_out, root, tracking_uri
    from jobs.show import print_frontier
    from orchestrator import storage
    from orchestrator.frontier.claims import parse_claim
    from orchestrator.frontier.points import is_complete
    from orchestrator.sweeps.report import FILES, write_files
    from orchestrator.tracking import open_reader

    for claim in args.claim:
        try:
            parse_claim(claim)
        except ValueError as error:
            raise UsageError(f"--claim {claim!r}: {error}") from None
    frontier = read(args, open_reader(tracking_uri(args)))
    folder = ("reports", args.experiment) if args.experiment else (args.name,)
    out = storage.absolute(args.out) if args.out else storage.join(root(args), *folder)
    if args.out:
        check_out(out, own=FILES)
    write_files(frontier, out)
    print_frontier(frontier)
    if left_out := sum(p.status == "finished" and not is_complete(p) for p in frontier.points):
        print(f"{left_out} finished runs are not judged: quality or cost unknown, or a cost not above 0")
    print(f"{out}/{{{','.join(FILES)}}}: {len(frontier.points)} points of {frontier.name}")


def read(args: argparse.Namespace, store: Tracking) -> Frontier:
    from orchestrator.sweeps.foreign import foreign_frontier
    from orchestrator.sweeps.report import Axes, read_frontier
    from orchestrator.tracking import find_runs

    if not args.experiment:
        return read_frontier(store, args.name)
    axes = Axes(quality=args.quality, cost=args.cost, chance=args.chance)
    runs = find_runs(store, args.experiment, args.filter)
    return foreign_frontier(args.experiment, runs, axes, family=args.family, claims=args.claim)


if __name__ == "__main__":
    main()
