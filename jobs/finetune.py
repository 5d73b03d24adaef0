"""Fine-tune a trained model on other data sets, several times each, beside a linear probe of the model.

  python jobs/finetune.py soft --data /data/flowers --image-size 16
  python jobs/finetune.py models:/quickstart@pareto-knee --data /data/flowers --data /data/pets --seeds 3 \\
      --set train.steps=1000 --set data.augment=inception --workers 2 --ep 2

The recipe is V-MoE's: SGD, a cosine with warm-up, a new head, dropout on the experts, capacity 1.5 if tokens
choose; 500 steps of 64 images, or with --published the papers' 10,000 of 1024 at 384 pixels. The runs
train at the same time where the cluster holds them. Run the same command again to continue.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from math import log2
from statistics import fmean
from typing import TYPE_CHECKING, Any

from jobs._cli import Places, command, connect, failed, model_of, print_table, source_labels
from jobs._flags import MODEL, assignment, flag, parse
from jobs.train import RunFlags
from orchestrator.names import run_name

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.sweeps.finetune import FineTuned, Probe
    from orchestrator.sweeps.sweep import Sweep
    from orchestrator.tracking.find import RunWriter


@dataclass(frozen=True, kw_only=True)
class FineTuneFlags:
    model: str = flag(help=MODEL, positional=True)
    data: tuple[str, ...] = flag(help="shards, as for training (repeatable)")
    published: bool = flag(False, "the papers' size: 10,000 steps of 1024 images at 384 pixels, random crops")
    image_size: int | None = flag(None, "pixels; default: the model's own, or 384 with --published")
    seeds: int = flag(3, "runs of each data set", least=1)
    name: str | None = flag(
        None, "name of the directory and of the MLflow run; default: finetune-MODEL", read=run_name
    )
    set: tuple[tuple[str, Any], ...] = flag(
        (),
        "any field, as `jobs/train.py --set help` lists them (repeatable); here train.steps=500,"
        " train.lr=0.003, train.clip_norm=10, data.batch_size=64, model.moe.expert_dropout=0.1,"
        " model.moe.router.capacity_factor=1.5",
        metavar="FIELD=VALUE",
        read=assignment,
        nargs="+",
    )
    workers: int | None = flag(None, "processes that train one model together (scale.workers)")
    ep: str | None = flag(None, "number of workers that share one set of experts, or auto (scale.ep)")
    batch_size: int = flag(64, "images per forward pass of the probe", least=1)
    fresh: bool = flag(False, "move an earlier run aside and start over")
    places: Places


def main() -> None:
    flags = parse(FineTuneFlags, __doc__)
    with command(f"fine-tuning {flags.model}", flags.places):
        if reasons := finetune(flags):
            sys.exit(failed(reasons))


def finetune(flags: FineTuneFlags) -> dict[str, str]:
    """Trains and records the runs of the flags; returns why runs failed, by their names."""
    from orchestrator.checkpoint.start import start_report
    from orchestrator.evaluation.evaluate import default_device
    from orchestrator.sweeps.driver import SweepOptions, trained_trials
    from orchestrator.sweeps.finetune import fine_tuned, probe
    from orchestrator.tracking.find import RunWriter, newest_of
    from orchestrator.tracking.store import redact_uri
    from orchestrator.training.fit import check_data
    from orchestrator.training.run_directory import RunDir

    store = flags.places.open_store()
    model = model_of(flags.model, flags.places, store)
    sweep = sweep_of(flags, model)
    for run in sweep.runs().values():
        check_data(run)
    start = start_report(sweep.base.model, model.location, without=sweep.base.train.init_without)
    print(start, flush=True)
    connect()
    folder, paths = RunDir.of(sweep.base).path, [str(arm["data.path"]) for arm in sweep.changes.values()]
    device = default_device()
    probed = probe(model.load(device), model, paths, batch_size=flags.batch_size, device=device)
    for name, accuracy in probed.accuracy.items():
        print(f"probe of the frozen model  {name:18} {accuracy:.4f}", flush=True)
    labels = {**source_labels(), "finetuned.from": model.location}
    options = SweepOptions(mode="fresh" if flags.fresh else "auto", labels=labels)
    with trained_trials(sweep, options, store=store) as trials:
        outcomes, failures = trials.outcomes(), trials.failures()
    tuned, info = fine_tuned(sweep, outcomes), newest_of(store, folder)
    if tuned.accuracy and info is not None:
        parent = RunWriter(store, info.run_id)
        parent.write_text("start.txt", str(start))
        report(parent, sweep, model, tuned, probed)
        print(f"\nfiles    {folder}\nMLflow   {redact_uri(store.uri)}: {sweep.base.name}, finetune.json")
    return failures


def sweep_of(flags: FineTuneFlags, model: ModelRef) -> Sweep:
    """The sweep of the flags, with an arm for each data set. Raises UsageError for impossible values."""
    from orchestrator.sweeps.finetune import SIZES, finetune_run, finetune_sweep

    paths = [flags.places.shards(data) for data in flags.data]
    run = RunFlags(
        name=flags.name or "finetune-" + re.sub(r"[^A-Za-z0-9_.]+", "-", flags.model).strip("-"),
        data=paths[0],
        workers=flags.workers,
        ep=flags.ep,
        set=flags.set,
        places=flags.places,
    )
    size = SIZES["published" if flags.published else "short"]
    base = run.config(finetune_run(model, size=size, image_size=flags.image_size))
    return finetune_sweep(base, paths, seeds=flags.seeds)


def report(parent: RunWriter, sweep: Sweep, model: ModelRef, tuned: FineTuned, probed: Probe) -> None:
    """Prints the accuracies by data set, and writes them to the sweep's MLflow run."""
    base, size, was = sweep.base, sweep.base.model.image_size, model.run.model.image_size
    print(
        f"\naccuracy after {base.train.steps} steps at {size} x {size}, mean +- 95 % interval over seeds;"
        f" probe: ridge (L2 2^{log2(probed.strength):.0f}) on the frozen features at {was} x {was}"
    )
    metrics = {f"probe/{name}/acc1": accuracy for name, accuracy in probed.accuracy.items()}
    metrics["probe/acc1"] = fmean(probed.accuracy.values())
    rows, draws = [], []
    for name, seeds in tuned.accuracy.items():
        found, frozen = tuned.of(name), probed.accuracy[name]
        rows.append((name, len(seeds), found, frozen, f"{found.mean - frozen:+.4f}"))
        metrics |= {f"finetune/{name}/acc1": found.mean, f"finetune/{name}/acc1_ci95": found.half}
        draws += [(name, seed, accuracy, frozen) for seed, accuracy in seeds.items()]
    if overall := tuned.overall():
        metrics |= {"finetune/acc1": overall.mean, "finetune/acc1_ci95": overall.half}
        if len(tuned.accuracy) > 1:
            frozen = fmean(probed.accuracy[name] for name in tuned.accuracy)
            rows += [(), ("mean", "", overall, frozen, f"{overall.mean - frozen:+.4f}")]
    print_table(("data", "seeds", "fine-tuned", "probe", "gain"), rows)
    parent.log(metrics)
    columns = ("data", "seed", "accuracy", "probe")
    parent.write_table("finetune.json", dict(zip(columns, zip(*draws, strict=True), strict=True)))


if __name__ == "__main__":
    main()
