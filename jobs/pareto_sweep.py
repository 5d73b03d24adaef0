"""Train the arms of a sweep, find the Pareto frontier of quality against cost, and confirm its knee.

  python jobs/pareto_sweep.py
  python jobs/pareto_sweep.py --name longer --set train.steps=1000 --max-concurrent 1
  ray job submit --working-dir . -- python jobs/pareto_sweep.py

The same command again continues: finished trials stay, interrupted ones go on from their checkpoints.
"""

import argparse
import sys
from dataclasses import replace

from ray.exceptions import RayError
from ray.train import TrainingFailedError
from rich.console import Console
from rich.table import Table

from jobs.command import connect, run_config, run_parser, tracking
from jobs.usage import command
from orchestrator.config import UsageError
from orchestrator.frontier.points import Frontier, hypervolume, on_front
from orchestrator.sweeping.catalog import SWEEPS
from orchestrator.sweeping.confirm import KNEE_ALIAS, check_confirm, confirm, confirm_config, knees
from orchestrator.sweeping.report import publish
from orchestrator.sweeping.sweep import (
    Outcomes,
    Sweep,
    check_sweep,
    claim_sweep,
    keep_weights_only,
    reason_of,
    run_sweep,
)
from orchestrator.tracking import TrackedRun, Tracking, track
from orchestrator.training.worker import Result, run_directory


def main() -> None:
    args = parse()
    with command():
        sweep = sweep_from(args)
        connect(show_workers=False)
        check_sweep(sweep, verify=args.verify)
        if args.confirm:
            check_confirm(sweep)
        store = tracking(args)
        claim_sweep(sweep, args.mode)
        tags = {"role": "sweep", "objective.quality": sweep.quality, "objective.cost": sweep.cost}
        parent = track(store, run_directory(sweep.base), sweep.base.name, tags=tags)
        try:
            train_and_report(args, sweep, store, parent)
        except BaseException:
            parent.finish("FAILED")
            raise
        parent.finish("FINISHED")


def train_and_report(args: argparse.Namespace, sweep: Sweep, store: Tracking, parent: TrackedRun) -> None:
    folder = run_directory(sweep.base)

    def progress(arm: str, outcomes: Outcomes) -> None:
        print(f"[{len(outcomes):2}/{len(sweep.arms)}] {arm:18} {describe(sweep, outcomes[arm])}", flush=True)

    outcomes = run_sweep(sweep, store, parent, max_concurrent=args.max_concurrent, progress=progress)
    frontier = publish(store, sweep.base.name, folder)
    for i, point in enumerate(knees(frontier, args.confirm)):
        run = confirm_config(sweep, point.arm)
        print(f"confirming {point.arm}: {run.train.steps} steps on {run.scale.workers} workers", flush=True)
        try:
            result = confirm(sweep, point.arm, store, parent, alias=KNEE_ALIAS if i == 0 else None)
            print(f"        {point.arm:18} {describe(sweep, result)}", flush=True)
        except (UsageError, TrainingFailedError, RayError) as error:
            outcomes[f"confirm/{point.arm}"] = reason_of(error)
    if args.confirm:
        frontier = publish(store, sweep.base.name, folder)
    if freed := keep_weights_only(sweep, frontier):
        print(f"trials off the frontier keep their weights alone: {freed / 1e6:.1f} MB freed")
    failed = {arm: outcome for arm, outcome in outcomes.items() if isinstance(outcome, str)}
    print_frontier(frontier)
    print(f"\npage     {folder}/frontier.html\npicture  {folder}/frontier.png\nMLflow   {store.uri}")
    print("open     `make ui`, or the page in any browser")
    if failed:
        listed = "\n".join(f"  {arm}: {reason}" for arm, reason in failed.items())
        sys.exit(f"error: {len(failed)} of {len(outcomes)} runs failed:\n{listed}")


def parse() -> argparse.Namespace:
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument(
        "--sweep", default="quickstart", choices=sorted(SWEEPS), help="which arms (%(default)s)"
    )
    chosen, _ = which.parse_known_args()
    parser = run_parser(__doc__, name=chosen.sweep, base=SWEEPS[chosen.sweep]().base, parents=[which])
    parser.add_argument(
        "--max-concurrent", type=int, help="trials at once; default: as many as the cluster holds"
    )
    parser.add_argument(
        "--confirm", type=int, default=1, help="how many knees to train again on 2 workers (%(default)s)"
    )
    args = parser.parse_args()
    if args.confirm < 0 or (args.max_concurrent is not None and args.max_concurrent < 1):
        parser.error("--confirm must be at least 0 and --max-concurrent at least 1")
    return args


def sweep_from(args: argparse.Namespace) -> Sweep:
    sweep = SWEEPS[args.sweep]()
    return replace(sweep, base=run_config(args, sweep.base))


def describe(sweep: Sweep, outcome: Result | str) -> str:
    if isinstance(outcome, str):
        return f"failed: {outcome}"
    metrics = outcome.metrics
    if outcome.status == "diverged":
        return f"diverged: train/loss {metrics['train/loss']}"
    quality, cost = metrics[sweep.quality], metrics[sweep.cost]
    return f"{sweep.quality} {quality:.4f}  {sweep.cost} {cost:.3g}  {metrics['cost/device_s']:.1f} s"


def print_frontier(frontier: Frontier) -> None:
    table = Table(title=f"{frontier.name}: * on the frontier, hypervolume {hypervolume(frontier):.4f}")
    for column in (
        "",
        "arm",
        frontier.quality_name,
        frontier.cost_name,
        "slots/token",
        "status",
        "MLflow run",
    ):
        table.add_column(column, overflow="fold")
    rows = sorted(zip(frontier.points, on_front(frontier), strict=True), key=lambda row: row[0].cost)
    for p, front in rows:
        table.add_row(
            "*" if front else "",
            p.arm,
            f"{p.quality:.4f}",
            f"{p.cost:.3g}",
            f"{p.size:g}",
            p.status,
            p.run_id,
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
