"""Rebuild the frontier page and picture of a finished sweep from MLflow alone.

python jobs/report.py --name quickstart --out /tmp/report
"""

import argparse

from jobs.command import tracking
from jobs.usage import command
from orchestrator import storage
from orchestrator.sweeping.report import publish


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="quickstart", help="of the sweep (%(default)s)")
    parser.add_argument(
        "--out", default=".", help="directory for frontier.html and frontier.png (%(default)s)"
    )
    parser.add_argument(
        "--storage", help="root of all files; default: $MOE_FRONTIER_HOME, else ~/moe-frontier"
    )
    parser.add_argument(
        "--tracking-uri", help="default: $MLFLOW_TRACKING_URI, else mlflow.db below the storage"
    )
    args = parser.parse_args()
    with command():
        frontier = publish(tracking(args), args.name, storage.absolute(args.out))
        print(f"{args.out}/frontier.html and frontier.png: {len(frontier.points)} trials of {frontier.name}")


if __name__ == "__main__":
    main()
