"""What the sweep commands print: progress, frontiers, plans."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from moe.vit import ViTConfig
from orchestrator.config import RunConfig
from orchestrator.data.images import BadImage, Picture
from orchestrator.data.manifest import open_manifest
from orchestrator.data.shards import DataSet
from orchestrator.frontier.claims import check_claim
from orchestrator.sweeps.estimate import Estimate
from orchestrator.sweeps.queue import Outcome
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.run_directory import Result, run_directory

if TYPE_CHECKING:
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.sweeps.run import Snapshot

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
    table = Table(title=f"{frontier.name}: * on the frontier, hypervolume {frontier.hypervolume:.4f}")
    names = (frontier.quality_name, frontier.cost_name, "slots/token", "status", "MLflow run")
    for column in ("", "arm", *names):
        table.add_column(column, overflow="fold")
    front = frontier.front
    for p in sorted(frontier.points, key=lambda point: point.cost):
        cells = (f"{p.quality:.4f}", f"{p.cost:.3g}", f"{p.size:g}", p.status, p.run_id)
        table.add_row("*" if p in front else "", p.arm, *cells)
    print_table(table)
    for claim in frontier.claims:
        print(f"{claim}: {check_claim(claim, frontier.points)}")


def print_plan(
    estimates: Mapping[str, Estimate], problems: Mapping[str, str], *, device: str, usd_per_hour: float
) -> None:
    """Prints what every trial needs, the sums by family, and the trials that do not fit."""
    table = Table(title=f"plan on {device}")
    families = Table(title="by family")
    for column in ("trial", "family", "devices"):
        table.add_column(column, overflow="fold")
    for column in ("family", "trials"):
        families.add_column(column)
    for column in ("parameters", "forward GFLOPs", "GiB/device"):
        table.add_column(column, justify="right")
    for column in ("train FLOPs", "device time", "usd", "GB on disk"):
        table.add_column(column, justify="right")
        families.add_column(column, justify="right")

    def totals(members: list[Estimate]) -> tuple[str, ...]:
        device_s, usd = (
            sum(e.device_s for e in members),
            sum(e.device_s for e in members) / 3600 * usd_per_hour,
        )
        flops, disk = sum(e.train_flops_6mac for e in members), sum(e.disk_bytes for e in members)
        return (
            f"{flops:.3g}",
            duration(device_s),
            f"{usd:.2f}" if usd >= 1 else f"{usd:.2g}",
            f"{disk / 1e9:.3g}",
        )

    groups: dict[str, list[Estimate]] = {}
    for name, e in estimates.items():
        numbers = (f"{e.params / 1e6:.3g}M", f"{e.forward_gflops_2mac:.3g}", f"{e.memory_gib:.2f}")
        table.add_row(name, e.family, str(e.workers), *numbers, *totals([e]))
        groups.setdefault(e.family, []).append(e)
    for family, members in {**groups, "all": list(estimates.values())}.items():
        families.add_row(family, str(len(members)), *totals(members))
    print_table(table)
    print_table(families)
    for problem in dict.fromkeys(problems.values()):
        trials = ", ".join(name for name, why in problems.items() if why == problem)
        print(f"does not fit: {trials}: {problem}")


def print_table(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 150).print(table)
