"""Fine-tune a trained model on other data sets, several times each, beside a linear probe of the model.

  python wings/jobs/finetune.py soft --data /data/flowers --image-size 16
  python wings/jobs/finetune.py models:/quickstart@pareto-knee --data /data/flowers --data /data/pets \\
      --set train.steps=1000 --set data.augment=inception --workers 2 --ep 2
  python wings/jobs/finetune.py soft --suite papers/vmoe/vtab1k.toml --root /data/vtab \\
      --set data.batch_size=512 train.clip_norm=1

A suite is a TOML file of [[rows]] with name, path and, where wanted, group, classes, steps, warmup, size,
crop, flip, rates and held_out. Of several rates each data set gets the best on a held-out piece of its
training images; then the runs of all seeds train on all of them.

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

from jobs._cli import (
    Places,
    command,
    connect,
    exit_if_unsent,
    failed,
    model_of,
    print_table,
    source_labels,
)
from jobs._flags import GRACE, MODEL, assignment, flag, parse
from jobs._record import Record
from jobs.train import RunFlags
from orchestrator.errors import UsageError
from orchestrator.names import run_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.config import RunConfig
    from orchestrator.sweeps.queue import Outcome
    from orchestrator.sweeps.sweep import Sweep
    from wings.transfer.finetune import FineTuned, Probe
    from wings.transfer.suite import SuiteRow


@dataclass(frozen=True, kw_only=True)
class FineTuneFlags:
    model: str = flag(help=MODEL, positional=True)
    data: tuple[str, ...] = flag((), "shards, as for training (repeatable)")
    suite: str | None = flag(None, "TOML file of data sets, with their settings and rates to choose from")
    root: str | None = flag(None, "folder of the paths in --suite; default: that of the file")
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
    grace: float | None = GRACE
    places: Places

    def __post_init__(self) -> None:
        if bool(self.data) == bool(self.suite):
            raise UsageError("name the images by --data, or by --suite, and not by both")
        if self.root and not self.suite:
            raise UsageError(f"--root {self.root} is for the paths in a --suite")


def main() -> None:
    flags = parse(FineTuneFlags, __doc__)
    with command(f"fine-tuning {flags.model}", flags.places, grace=flags.grace):
        if reasons := finetune(flags):
            sys.exit(failed(reasons))


def finetune(flags: FineTuneFlags) -> dict[str, str]:
    """Trains and records the runs of the flags; returns why runs failed, by their names."""
    from orchestrator.checkpoint.start import start_report
    from orchestrator.evaluation.evaluate import default_device
    from orchestrator.runs.run_directory import RunDir
    from orchestrator.sweeps.driver import SweepOptions, trained_trials
    from orchestrator.training.fit import check_data
    from wings.transfer.finetune import failures, fine_tuned, finetune_sweep, probe
    from wings.transfer.suite import rates_sweep, with_best_rates

    store = flags.places.open_store()
    model = model_of(flags.model, flags.places)
    rows = rows_of(flags)
    base = base_of(flags, model, rows)
    rates = rates_sweep(base, rows)
    for sweep in (rates, finetune_sweep(base, rows, seeds=flags.seeds)):
        for run in sweep.runs().values():
            check_data(run)
    start = start_report(base.model, model.location, without=base.train.init_without)
    print(start, flush=True)
    connect()
    labels = {**source_labels(), "finetuned.from": model.location}
    options = SweepOptions(mode="fresh" if flags.fresh else "auto", labels=labels)
    tried: Mapping[str, Outcome] = {}
    if rates.arms:
        with trained_trials(rates, options, store=store) as trials:
            tried = trials.outcomes()
        print_rates(rates, tried)
    ready, reasons = with_best_rates(rows, tried, rates.quality)
    if not ready:
        return reasons
    sweep, device = finetune_sweep(base, ready, seeds=flags.seeds), default_device()
    probed = probe(model.load(device), model, ready, batch_size=flags.batch_size, device=device)
    for name, accuracy in probed.accuracy.items():
        print(f"probe of the frozen model  {name:18} {accuracy:.4f}", flush=True)
    with trained_trials(sweep, options, store=store) as trials:
        outcomes = trials.outcomes()
    folder, tuned = RunDir.of(base).path, fine_tuned(sweep, outcomes)
    if tuned.accuracy:
        record = Record(flags.places)
        metrics, table = report(base, rows, model, tuned, probed)
        record.write(
            folder, metrics, tables={"finetune.json": table}, files={"start.txt": str(start).encode()}
        )
        print(f"\nfiles    {folder}")
        record.send()
    if not (found := reasons | failures(outcomes)):
        exit_if_unsent(folder)
    return found


def rows_of(flags: FineTuneFlags) -> list[SuiteRow]:
    """The data sets of the flags. Raises UsageError for one that is missing, or a bad suite."""
    from orchestrator import storage
    from orchestrator.training.fewshot import short_names
    from wings.transfer.suite import SuiteRow, read_suite

    if flags.suite:
        root = flags.root and storage.absolute(flags.root)
        return read_suite(flags.suite, root, flags.places.shards)
    paths = [flags.places.shards(data) for data in flags.data]
    return [SuiteRow(name=name, path=path) for name, path in short_names(paths).items()]


def base_of(flags: FineTuneFlags, model: ModelRef, rows: Sequence[SuiteRow]) -> RunConfig:
    """The run that each data set changes. Raises UsageError for impossible values."""
    from wings.transfer.finetune import SIZES, finetune_run

    run = RunFlags(
        name=flags.name or "finetune-" + re.sub(r"[^A-Za-z0-9_.]+", "-", flags.model).strip("-"),
        data=rows[0].path,
        workers=flags.workers,
        ep=flags.ep,
        set=flags.set,
        places=flags.places,
    )
    size = SIZES["published" if flags.published else "short"]
    return run.applied(finetune_run(model, size=size, image_size=flags.image_size))


def print_rates(rates: Sweep, outcomes: Mapping[str, Outcome]) -> None:
    """Prints how good each rate was."""

    def found(arm: str) -> float | str:
        outcome = outcomes.get(arm, "not trained")
        if isinstance(outcome, str):
            return outcome
        return outcome.metrics[rates.quality] if outcome.status == "finished" else "diverged"

    rows = [(arm, f"{changes['train.lr']:g}", found(arm)) for arm, changes in rates.changes.items()]
    print("\naccuracy on held-out pieces of the training images, by learning rate")
    print_table(("run", "rate", "held out"), rows)


def report(
    base: RunConfig, rows: Sequence[SuiteRow], model: ModelRef, tuned: FineTuned, probed: Probe
) -> tuple[dict[str, float], dict[str, Sequence[Any]]]:
    """Prints the accuracies by data set, of groups and of all, and returns them with a table of all runs. A
    mean is of data sets that all have a seed that finished.
    """
    size, was = base.model.image_side(), model.run.model.image_side()
    sizes = ", ".join(f"{n} x {n}" for n in sorted({row.size or size for row in rows}))
    print(
        f"\naccuracy after fine-tuning at {sizes}, mean +- 95 % interval over seeds; probe: ridge"
        f" (L2 2^{log2(probed.strength):.0f}) on the frozen features at {was} x {was}"
    )
    metrics = {f"probe/{name}/acc1": accuracy for name, accuracy in probed.accuracy.items()}
    metrics["probe/acc1"] = fmean(probed.accuracy.values())
    table, draws = [], []
    for name, seeds in tuned.accuracy.items():
        found, frozen = tuned.of(name), probed.accuracy[name]
        table.append((name, len(seeds), found, frozen, f"{found.mean - frozen:+.4f}"))
        metrics |= {f"finetune/{name}/acc1": found.mean, f"finetune/{name}/acc1_ci95": found.half}
        draws += [(name, seed, accuracy, frozen) for seed, accuracy in seeds.items()]
    groups = dict.fromkeys(f"mean of {row.group}" for row in rows if row.group)
    for title in (*groups, "mean"):
        names = [row.name for row in rows if title in ("mean", f"mean of {row.group}")]
        if overall := tuned.overall(names):
            metric = "finetune" if title == "mean" else f"finetune/{title.replace(' ', '-')}"
            metrics |= {f"{metric}/acc1": overall.mean, f"{metric}/acc1_ci95": overall.half}
            frozen = fmean(probed.accuracy[name] for name in names)
            if len(rows) > 1:
                table += [(), (title, "", overall, frozen, f"{overall.mean - frozen:+.4f}")]
    print_table(("data", "seeds", "fine-tuned", "probe", "gain"), table)
    columns = ("data", "seed", "accuracy", "probe")
    return metrics, dict(zip(columns, zip(*draws, strict=True), strict=True))


if __name__ == "__main__":
    main()
