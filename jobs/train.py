"""Train one model, on one process or many.

  python jobs/train.py --name soft --set model.moe.router.kind=soft --set train.steps=300
  python jobs/train.py --name soft-ep2 --workers 2 --ep 2 --set model.moe.router.kind=soft
  python jobs/train.py --data s3://bucket/shards --set model.image_size=224 ..

The same command again continues from the last checkpoint, or says that the run is complete. Exit code 1 if
the run failed or diverged: its loss was not finite any more.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from jobs.usage import command, run_parser

if TYPE_CHECKING:
    from orchestrator.config import RunConfig
    from orchestrator.tracking import Tracking
    from orchestrator.training.worker import Result


def main() -> None:
    args = run_parser(__doc__, name="train").parse_args()
    with command("train: fields" if "help" in args.set else f"training {args.name or 'train'}"):
        train(args)


def train(args: argparse.Namespace) -> None:
    from jobs.command import connect, print_fields, run_config, tracking
    from jobs.show import print_result, print_training
    from orchestrator.config import RunConfig
    from orchestrator.training.claim import claim
    from orchestrator.training.cluster import check_resources
    from orchestrator.training.fit import check_data, check_start, identity, is_inline
    from orchestrator.training.nodes import check_shared
    from orchestrator.training.worker import run_directory

    if "help" in args.set:
        return print_fields(RunConfig())
    run = run_config(args, RunConfig())
    check_data(run, verify=args.verify)
    check_start(run)
    print_training(run)
    if not is_inline(run):
        connect()
        check_shared(run.storage)
        check_resources(run)
        print(f"starting {run.scale.workers} workers, which load libraries first ..", flush=True)
    with tracking(args, run.name) as store:
        claim(run_directory(run), identity(run), args.mode)
        result = tracked_fit(run, store)
    print_result(run, result)
    if result.status == "diverged":
        loss = result.metrics["train/loss"]
        sys.exit(f"error: {run.name} diverged: train/loss is {loss} at step {result.step}")


def tracked_fit(run: RunConfig, store: Tracking) -> Result:
    """Trains `run`, with a line for every report, its metrics and its end in MLflow."""
    from jobs.progress import StepLines
    from orchestrator.data.manifest import open_manifest
    from orchestrator.sweeps.engine import reason_of
    from orchestrator.tracking import SystemMetrics, track_training
    from orchestrator.training.artifacts import finish, log_left_behind
    from orchestrator.training.fit import fit, is_inline
    from orchestrator.training.worker import run_directory

    directory = run_directory(run)
    data = (run.data.path, open_manifest(run.data.path).digest())
    tracked = track_training(store, run, directory, dataset=data, role="train")
    lines = StepLines(run)

    def report(step: int, metrics: dict[str, float]) -> None:
        lines.show(step, metrics)
        tracked.log(step, metrics)

    try:
        with SystemMetrics(tracked):
            result = fit(run, report, inline=is_inline(run))
    except BaseException as error:
        log_left_behind(directory, tracked)
        tracked.tag(error=reason_of(error))
        tracked.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        if isinstance(error, Exception):
            sys.exit(f"error: {run.name} failed: {reason_of(error)}")
        raise
    tracked.log(result.step, result.metrics)  # a crash may have come between the last report and here
    finish(directory, tracked, result)
    return result


if __name__ == "__main__":
    main()
