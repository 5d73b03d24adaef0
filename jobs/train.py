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

from jobs.usage import command, run_parser
from orchestrator.errors import UsageError, reason_of


def main() -> None:
    args = run_parser(__doc__, name="train").parse_args()
    with command("train: fields" if "help" in args.set else f"training {args.name or 'train'}"):
        train(args)


def train(args: argparse.Namespace) -> None:
    from jobs.command import connect, open_store, print_fields, run_config, source_labels
    from jobs.progress import StepLines
    from jobs.show import print_result, print_training
    from orchestrator.config import RunConfig
    from orchestrator.sweeps import driver
    from orchestrator.training.fit import check_data, is_inline

    if "help" in args.set:
        return print_fields(RunConfig())
    run = run_config(args, RunConfig())
    check_data(run, verify=args.verify)
    print_training(run)
    if not is_inline(run):
        connect()
        print(f"starting {run.scale.workers} workers, which load libraries first ..", flush=True)
    store, lines = open_store(args), StepLines(run)
    try:
        result = driver.train(run, mode=args.mode, report=lines.show, store=store, labels=source_labels())
    except UsageError:
        raise
    except Exception as error:
        sys.exit(f"error: {run.name} failed: {reason_of(error)}")
    print_result(run, result)
    if result.status == "diverged":
        loss = result.metrics["train/loss"]
        sys.exit(f"error: {run.name} diverged: train/loss is {loss} at step {result.step}")


if __name__ == "__main__":
    main()
