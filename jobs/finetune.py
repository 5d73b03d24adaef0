"""Fine-tune a trained model on other data sets, each several times, beside a linear probe of it as it is.

  python jobs/finetune.py soft --data /data/flowers --image-size 16
  python jobs/finetune.py models:/moe-frontier@pareto-knee --data /data/flowers --data /data/pets --seeds 3 \\
      --set train.steps=1000 --set data.augment=inception --workers 2 --ep 2

The recipe is V-MoE's: SGD, a cosine with warm-up, a new head, dropout on the experts, capacity 1.5. The runs
train at the same time where the cluster holds them. Run the same command again to continue.
"""

from __future__ import annotations

import argparse
import re
import sys
from math import log2
from statistics import fmean
from typing import TYPE_CHECKING

from jobs.usage import MODEL, add_places, at_least_one, command, plain_parser, run_name

if TYPE_CHECKING:
    from orchestrator.evaluation.finetune import FineTuned, Probe
    from orchestrator.evaluation.models import ModelRef
    from orchestrator.sweeps.sweep import Sweep
    from orchestrator.tracking.find import RunWriter


def main() -> None:
    args = parser().parse_args()
    args.name = args.name or "finetune-" + re.sub(r"[^A-Za-z0-9_.]+", "-", args.model).strip("-")
    with command(f"fine-tuning {args.model}"):
        failed = finetune(args)
        if failed:
            listed = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
            sys.exit(f"error: {len(failed)} runs failed:\n{listed}")


def parser() -> argparse.ArgumentParser:
    made = plain_parser(__doc__)
    made.add_argument("model", help=MODEL)
    made.add_argument("--data", action="append", required=True, help="shards, as for training (repeatable)")
    made.add_argument("--image-size", type=int, help="pixels; default: the model's own")
    made.add_argument("--seeds", type=at_least_one, default=3, help="runs of each data set (%(default)s)")
    made.add_argument(
        "--name", type=run_name, help="name of the directory and the MLflow run; default: finetune-MODEL"
    )
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field, as `jobs/train.py --set help` lists them (repeatable); here train.steps=500,"
        " train.lr=0.003, train.clip_norm=10, data.batch_size=64, model.moe.expert_dropout=0.1,"
        " model.moe.router.capacity_factor=1.5",
    )
    made.add_argument("--workers", type=int, help="processes that train one model together (scale.workers)")
    made.add_argument("--ep", help="workers that share one set of experts, or auto (scale.ep)")
    made.add_argument(
        "--batch-size",
        type=at_least_one,
        default=64,
        help="images of a forward pass of the probe (%(default)s)",
    )
    add_places(made)
    made.add_argument(
        "--fresh",
        dest="mode",
        action="store_const",
        const="fresh",
        default="auto",
        help="move the earlier run aside and start over",
    )
    # `run_config` reads these flags of train.py, which this command decides itself.
    made.set_defaults(profile=None, seed=None, init_from=None)
    return made


def finetune(args: argparse.Namespace) -> dict[str, str]:
    """Trains the runs of the flags and records them; returns the runs that failed, with the reason."""
    from jobs.command import connect, open_store, source_labels
    from jobs.evaluation_flags import models_of
    from jobs.progress import SweepProgress
    from orchestrator.checkpoint.weights import start_report
    from orchestrator.evaluation.evaluate import default_device
    from orchestrator.evaluation.finetune import fine_tuned, probe
    from orchestrator.sweeps.driver import SweepOptions, trained_trials
    from orchestrator.tracking.find import RunWriter, newest_of
    from orchestrator.tracking.store import redact_uri
    from orchestrator.training.fit import check_data
    from orchestrator.training.run_directory import run_directory

    store = open_store(args)
    (model,) = models_of(args, store)
    sweep = sweep_of(args, model)
    for run in sweep.runs().values():
        check_data(run)
    start = start_report(sweep.base.model, model.location, without=sweep.base.train.init_without)
    print(start, flush=True)
    connect()
    folder, paths = run_directory(sweep.base), [str(arm["data.path"]) for arm in sweep.arms.values()]
    device = default_device()
    probed = probe(model.load(device), model, paths, batch_size=args.batch_size, device=device)
    for name, accuracy in probed.accuracy.items():
        print(f"probe of the frozen model  {name:18} {accuracy:.4f}", flush=True)
    labels = {**source_labels(), "finetuned.from": model.location}
    progress = SweepProgress(sweep)
    with (
        progress,
        trained_trials(
            sweep, SweepOptions(mode=args.mode, labels=labels), watch=progress, store=store
        ) as trials,
    ):
        outcomes, failed = trials.outcomes(), trials.failures()
    tuned, info = fine_tuned(sweep, outcomes), newest_of(store, folder)
    if tuned.accuracy and info is not None:
        parent = RunWriter(store, info.run_id)
        parent.write_text("start.txt", str(start))
        report(parent, sweep, model, tuned, probed)
        print(f"\nfiles    {folder}\nMLflow   {redact_uri(store.uri)}: {sweep.base.name}, finetune.json")
    return failed


def sweep_of(args: argparse.Namespace, model: ModelRef) -> Sweep:
    """The sweep of the flags, with an arm for each data set. Raises UsageError for impossible values."""
    from jobs.command import run_config
    from jobs.evaluation_flags import images_path
    from orchestrator.evaluation.finetune import finetune_run, finetune_sweep

    paths = [images_path(args, model, data) for data in args.data]
    flags = argparse.Namespace(**{**vars(args), "data": paths[0]})
    base = run_config(flags, finetune_run(model, image_size=args.image_size))
    return finetune_sweep(base, paths, seeds=args.seeds)


def report(parent: RunWriter, sweep: Sweep, model: ModelRef, tuned: FineTuned, probed: Probe) -> None:
    """Prints the accuracies by data set, and writes them to the sweep's MLflow run."""
    from rich.table import Table

    from jobs.show import print_table

    base, size, was = sweep.base, sweep.base.model.image_size, model.run.model.image_size
    print(
        f"\naccuracy after {base.train.steps} steps at {size} x {size}, mean +- 95 % interval over seeds;"
        f" probe: ridge (L2 2^{log2(probed.strength):.0f}) on the frozen features at {was} x {was}"
    )
    table = Table()
    table.add_column("data", overflow="fold")
    for column in ("seeds", "fine-tuned", "probe", "gain"):
        table.add_column(column, justify="right")
    metrics = {f"probe/{name}/acc1": accuracy for name, accuracy in probed.accuracy.items()}
    metrics["probe/acc1"] = fmean(probed.accuracy.values())
    rows = []
    for name, seeds in tuned.accuracy.items():
        found, frozen = tuned.of(name), probed.accuracy[name]
        table.add_row(name, str(len(seeds)), str(found), f"{frozen:.4f}", f"{found.mean - frozen:+.4f}")
        metrics |= {f"finetune/{name}/acc1": found.mean, f"finetune/{name}/acc1_ci95": found.half}
        rows += [(name, seed, accuracy, frozen) for seed, accuracy in seeds.items()]
    if overall := tuned.overall():
        metrics |= {"finetune/acc1": overall.mean, "finetune/acc1_ci95": overall.half}
        if len(tuned.accuracy) > 1:
            frozen = fmean(probed.accuracy[name] for name in tuned.accuracy)
            gain = f"{overall.mean - frozen:+.4f}"
            table.add_section()
            table.add_row("mean", "", str(overall), f"{frozen:.4f}", gain)
    print_table(table)
    parent.log(metrics)
    columns = ("data", "seed", "accuracy", "probe")
    parent.write_table("finetune.json", dict(zip(columns, zip(*rows, strict=True), strict=True)))


if __name__ == "__main__":
    main()
