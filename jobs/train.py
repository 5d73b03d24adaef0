"""Train one model, on one process or many.

  python jobs/train.py --name soft --set model.moe.router.kind=soft --set train.steps=300
  python jobs/train.py --name soft-ep2 --workers 2 --ep 2 --set model.moe.router.kind=soft
  python jobs/train.py --data s3://bucket/shards --set model.image_size=224 ..

The same command again continues from the last checkpoint, or says that the run is complete.
"""

import sys

from jobs.command import connect, run_config, run_parser, tracking
from jobs.usage import command
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.sweeping.trial import reason_of
from orchestrator.tracking import SystemMetrics, TrackedRun, Tracking, track_training
from orchestrator.training.artifacts import log_left_behind
from orchestrator.training.claim import claim
from orchestrator.training.cluster import check_resources
from orchestrator.training.fit import check_data, fit, identity
from orchestrator.training.loop import Metrics
from orchestrator.training.nodes import check_shared
from orchestrator.training.worker import Result, run_directory


def main() -> None:
    args = run_parser(__doc__, name="train", base=RunConfig()).parse_args()
    with command():
        run = run_config(args, RunConfig())
        check_data(run, verify=args.verify)
        inline = run.scale.workers == 1 and not run.scale.use_gpu
        if not inline:
            connect(show_workers=True)
            check_shared(run.storage)
            check_resources(run)
        with tracking(args, run.name) as store:
            claim(run_directory(run), identity(run), args.mode)
            result = train(run, store, inline=inline)
        print_result(run, result)


def train(run: RunConfig, store: Tracking, *, inline: bool) -> Result:
    directory = run_directory(run)
    data = (run.data.path, open_manifest(run.data.path).digest())
    tracked = track_training(store, run, directory, dataset=data, role="train")
    try:
        with SystemMetrics(tracked):
            result = fit(run, Progress(tracked, run), inline=inline)
    except BaseException as error:
        log_left_behind(directory, tracked)
        tracked.tag(error=reason_of(error))
        tracked.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        if isinstance(error, Exception):
            sys.exit(f"error: {run.name} failed: {reason_of(error)}")
        raise
    tracked.log(result.step, result.metrics)  # a crash may have come between the last report and here
    log_left_behind(directory, tracked)
    tracked.finish("FINISHED")
    return result


class Progress:
    """Every report: a line here, its metrics in MLflow."""

    def __init__(self, tracked: TrackedRun, run: RunConfig) -> None:
        self.tracked = tracked
        self.steps = run.train.steps

    def __call__(self, step: int, metrics: Metrics) -> None:
        shown = ("train/loss", "val/acc1", "perf/images_per_s", "data/wait_frac")
        values = "  ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics)
        print(f"step {step}/{self.steps}  {values}", flush=True)
        self.tracked.log(step, metrics)


def print_result(run: RunConfig, result: Result) -> None:
    print(f"{run.name} is complete: {result.status} after {result.step} steps, files in {run_directory(run)}")
    for name, value in sorted(result.metrics.items()):
        print(f"  {name:28} {value:.6g}")


if __name__ == "__main__":
    main()
