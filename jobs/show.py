"""What the sweep commands print: progress, frontiers, plans."""

import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from statistics import median

from rich.console import Console
from rich.table import Table

from moe.vit import ViTConfig
from orchestrator.config import RunConfig
from orchestrator.data.images import BadImage, Picture
from orchestrator.data.manifest import open_manifest
from orchestrator.data.shards import DataSet
from orchestrator.frontier.claims import check_claim
from orchestrator.frontier.points import Frontier, hypervolume, on_front
from orchestrator.sweeps.agenda import Outcome
from orchestrator.sweeps.budget import Compared, Plan, Totals
from orchestrator.sweeps.progress import Snapshot
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.worker import Result, run_directory

MOST_EPOCHS = 300  # of the longest common ImageNet recipes; runs with more are pointed out
LOOKED_AT = 16  # images whose headers say how large the data's own are


def print_training(run: RunConfig) -> None:
    """Prints which model is trained on which data, and the accuracy that guessing would reach."""
    print(f"{run.name}: {describe_model(run.model)}, {describe_data(run)}", flush=True)


def print_sweep(sweep: Sweep) -> None:
    """Prints the arms of a sweep by family, and the data that all of them are trained on."""
    runs = sweep.runs()
    if not runs:
        arms = "arms drawn by a search"
    else:
        families = Counter(run.model.family() for run in runs.values())
        arms = ", ".join(f"{count} {name}" for name, count in families.items())
        arms = f"{len(runs)} trials ({arms})"
    print(f"{sweep.base.name}: {arms}, {describe_data(sweep.base)}", flush=True)


def describe_model(model: ViTConfig) -> str:
    size = f"width {model.width}, {model.depth} blocks, patches of {model.patch_size} px"
    if not model.moe:
        return f"dense ViT without experts ({size})"
    blocks = ", ".join(map(str, model.moe_blocks()))
    experts = f"{model.moe.num_experts} {model.family()} experts"
    return f"ViT with {experts} in blocks [{blocks}] ({size})"


def describe_data(run: RunConfig) -> str:
    manifest, size = open_manifest(run.data.path), run.model.image_size
    rows, seen = manifest.rows("train"), run.train.steps * run.data.batch_size
    own, epochs = own_size(run), f"{seen / rows:.3g}" if seen < 1000 * rows else f"{seen / rows:,.0f}"
    scaled = "" if own in (None, (size, size)) else f" (the data's own: {own[0]} x {own[1]} px)"
    floor = manifest.val_majority and manifest.val_majority / manifest.rows("val")
    floors = f"; always guessing the largest class: val/acc1 {floor:.4f}" if floor else ""
    repeats = f", more than {MOST_EPOCHS}: fewer train.steps may do" if seen > MOST_EPOCHS * rows else ""
    return (
        f"images of {size} x {size} px{scaled}, batch {run.data.batch_size}, {run.train.steps} steps ="
        f" {epochs} epochs of {rows:,} images{repeats}{floors}"
    )


def own_size(run: RunConfig) -> tuple[int, int] | None:
    """Median width and height in pixels of some validation images as stored; None if none is whole."""
    path, cache = run.data.path, int(run.data.cache_gb * 1e9)
    shard = DataSet(path=path, manifest=open_manifest(path), cache_bytes=cache).open("val", 0)
    pictures = []
    for row in range(0, len(shard.keys), -(-len(shard.keys) // LOOKED_AT)):
        with suppress(BadImage):
            pictures.append(Picture(shard.image(row)))
    if not pictures:
        return None
    return int(median(p.width for p in pictures)), int(median(p.height for p in pictures))


def print_result(run: RunConfig, result: Result) -> None:
    ended = "is complete: finished" if result.status == "finished" else result.status
    print(f"{run.name} {ended} after {result.step} steps, files in {run_directory(run)}")
    for name, value in sorted(result.metrics.items()):
        print(f"  {name:28} {value:.6g}")


def ended_line(sweep: Sweep, outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return f"failed: {outcome}"
    metrics = outcome.metrics
    if outcome.status == "diverged":
        return f"diverged: train/loss {metrics['train/loss']}"
    quality = f"{sweep.quality} {metrics[sweep.quality]:.4f}"
    if sweep.cost not in metrics:  # a trunk has no cost of its branches
        return f"{quality}  {metrics['cost/device_s']:.1f} s"
    if outcome.status == "paused":
        return f"paused at step {outcome.step}, {quality}"
    return f"{quality}  {sweep.cost} {metrics[sweep.cost]:.3g}  {metrics['cost/device_s']:.1f} s"


def status_line(now: Snapshot) -> str:
    rungs = "".join(f", {count} paused at step {step}" for step, count in now.paused.items())
    best = f", best trial {now.best:.4f}" if now.best is not None else ""
    left = f", about {duration(now.left_s)} left" if now.left_s else ""
    points = f"{now.front} point{'s' * (now.front != 1)}"
    return (
        f"{now.complete} of {now.trials} complete, {now.running} running{rungs}; frontier {points}{best},"
        f" hypervolume {now.hypervolume:.4f}; {duration(now.spent_s)} of devices spent{left}"
    )


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def print_frontier(frontier: Frontier) -> None:
    table = Table(title=f"{frontier.name}: * on the frontier, hypervolume {hypervolume(frontier):.4f}")
    names = (frontier.quality_name, frontier.cost_name, "slots/token", "status", "MLflow run")
    for column in ("", "arm", *names):
        table.add_column(column, overflow="fold")
    rows = sorted(zip(frontier.points, on_front(frontier), strict=True), key=lambda row: row[0].cost)
    for p, front in rows:
        cells = (f"{p.quality:.4f}", f"{p.cost:.3g}", f"{p.size:g}", p.status, p.run_id)
        table.add_row("*" if front else "", p.arm, *cells)
    print_table(table)
    for claim in frontier.claims:
        print(f"{claim}: {check_claim(claim, frontier.points)}")


def print_plan(plan: Plan, *, kind: str, how: str) -> None:
    table = Table(title=f"plan on {kind}; device time {how}")
    for column in ("trial", "family", "devices"):
        table.add_column(column, overflow="fold")
    numbers = (
        "parameters",
        "forward GFLOPs",
        "train FLOPs",
        "GiB/device",
        "device time",
        "usd",
        "GB on disk",
    )
    for column in numbers:
        table.add_column(column, justify="right")
    for e in plan.estimates:
        table.add_row(
            e.trial,
            e.family,
            str(e.workers),
            f"{e.params / 1e6:.3g}M",
            f"{e.forward_gflops_2mac:.3g}",
            f"{e.train_flops_6mac:.3g}",
            f"{e.memory_gib:.2f}",
            _time(e.device_s),
            _usd(e.usd),
            f"{e.checkpoint_bytes / 1e9:.3g}",
        )
    print_table(table)
    families = Table(title="by family")
    families.add_column("family")
    for column in ("trials", "train FLOPs", "device time", "usd", "GB on disk", "GB after the sweep"):
        families.add_column(column, justify="right")
    for name, total in {**plan.by_family(), "all": plan.total()}.items():
        families.add_row(name, *_totals(total))
    print_table(families)
    trials_of: dict[str, list[str]] = {}
    for trial, problems in plan.problems().items():
        for problem in problems:
            trials_of.setdefault(problem, []).append(trial)
    for problem, trials in trials_of.items():
        print(f"does not fit: {', '.join(trials)}: {problem}")


def print_compared(rows: Iterable[Compared]) -> None:
    table = Table(title="predicted against actual device seconds")
    for column in ("family", "trials", "predicted", "actual", "ratio"):
        table.add_column(column, justify="right" if column != "family" else "left")
    for row in rows:
        cells = (f"{row.predicted_s:.1f}", f"{row.actual_s:.1f}", f"{row.ratio():.2f}")
        table.add_row(row.family, str(row.trials), *cells)
    print_table(table)


def _totals(total: Totals) -> tuple[str, ...]:
    return (
        str(total.trials),
        f"{total.train_flops_6mac:.3g}",
        _time(total.device_s),
        _usd(total.usd),
        f"{total.checkpoint_bytes / 1e9:.3g}",
        f"{total.weights_bytes / 1e9:.3g}",
    )


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds)


def _usd(usd: float | None) -> str:
    return "unknown" if usd is None else f"{usd:.2f}" if usd >= 1 else f"{usd:.2g}"


def print_table(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 150).print(table)
