"""Measures models at a grid of settings of their routers, and draws what they can do there.

Models are evaluated in parallel by Ray, in one pass over the images for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jobs._cli import Evaluation, check_out, connect, models_of, print_table
from jobs._record import Record
from jobs._sharded import Workers
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.evaluation.evaluate import EvalTask, Row
    from orchestrator.frontier.frontier import Frontier


def evaluate_grid(
    references: Sequence[str],
    grid: Sequence[str],
    on: Evaluation,
    by: Workers,
    classes: str | None,
    *,
    repeats: int,
    out: str | None,
) -> None:
    """Measures, records and draws what the models can do at every point of the grid; an empty grid stands for
    the default of each model's router.
    """
    from orchestrator import storage
    from orchestrator.sweeps.publish import FILES
    from orchestrator.training.resources import check_shared

    out = storage.absolute(out) if out else None
    if out:
        check_out(out, own=FILES)
    root, record = on.places.root(), Record(on.places)
    tasks = tasks_of(references, grid, on, classes)
    sharding = by.sharding([task.model for task in tasks], on)
    tasks = [replace(task, sharding=sharding) for task in tasks]
    connect()
    check_shared(root)
    rows = measure_points(tasks, repeats=repeats)
    record_points(record, tasks, rows)
    show(draw_frontier(references, tasks, rows, on, out, record))


def tasks_of(
    references: Sequence[str], grid: Sequence[str], on: Evaluation, classes: str | None
) -> list[EvalTask]:
    """A task for each model. Raises UsageError if no model can run at any of the wanted points."""
    from orchestrator.evaluation.evaluate import EvalTask
    from orchestrator.evaluation.points import default_grid, parse_grid, possible, why_impossible

    wanted, tasks = parse_grid(grid) if grid else None, []
    models = models_of(references, on.places)
    for model in without_refused(models, lambda model: why_not_in(model, on.batch_size)):
        config, path = model.run.model, on.path(model)
        outputs = labels_by_name(model, path, classes)
        task = EvalTask(
            model=model,
            points=tuple(default_grid(config) if wanted is None else possible(config, wanted)),
            path=path,
            split=on.split,
            batch_size=on.batch_size,
            results=on.places.below("evaluation"),
            outputs=outputs,
        )
        tasks.append(task)
    if wanted and all(len(task.points) == 1 for task in tasks):
        reasons = "; ".join(f"{model.name}: {why_impossible(model.run.model, wanted[0])}" for model in models)
        raise UsageError(f"--grid {' '.join(grid)}: none of the models can run at these points: {reasons}")
    return tasks


def without_refused(models: list[ModelRef], why_not: Callable[[ModelRef], str | None]) -> list[ModelRef]:
    """The models without those that have a reason why not, which it names. Raises UsageError if all have."""
    reasons = [why_not(model) for model in models]
    refused = [f"{model.name}: {why}" for model, why in zip(models, reasons, strict=True) if why]
    if len(refused) == len(models):
        raise UsageError("; ".join(refused))
    for reason in refused:
        print(f"left out {reason}", flush=True)
    return [model for model, why in zip(models, reasons, strict=True) if not why]


def why_not_in(model: ModelRef, batch_size: int) -> str | None:
    """The reason why a model cannot run in batches of this size; None if it can."""
    together = model.run.model.images_per_group
    if batch_size % together == 0:
        return None
    return (
        f"--batch-size {batch_size}: it routes {together} images together, and needs a multiple of"
        f" {together}; --set routing.images_per_group=1 routes each by itself"
    )


def labels_by_name(model: ModelRef, path: str, classes: str | None) -> tuple[int, ...] | None:
    """The output of the model for each label of the data by the names of --classes. Without, labels are those
    outputs, and None. Raises UsageError if labels do not mean what the model learned.
    """
    from orchestrator.evaluation.spellings import outputs_of_labels

    if classes is not None:
        return outputs_of_labels(model, path, classes)
    model.check_classes(path)
    return None


def measure_points(tasks: list[EvalTask], *, repeats: int) -> dict[str, list[Row]]:
    """Maps each model's location to a row for each point, with its quality and its costs."""
    from orchestrator.evaluation.evaluate import ROUNDS, benchmark_all, evaluate_all
    from orchestrator.sweeps.operating import QUARTILES, TIME

    rows: dict[str, list[Row]] = {}
    began, count = time.monotonic(), sum(len(task.points) for task in tasks)
    print(f"{count} operating points of {len(tasks)} models", flush=True)
    for task, found in evaluate_all(tasks):
        rows[task.model.location] = found
        quality = task.model.run.task.quality
        best = max(found, key=lambda row: row[quality])
        print(
            f"[{len(rows):2}/{len(tasks)}] {task.model.name:24} {len(found):3} points, as trained"
            f" {found[0][quality]:.4f}, best {best[quality]:.4f} ({best['point']}), weights"
            f" {found[0]['weights'][:12]} unchanged, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    turns = sum(1 if task.sharding else ROUNDS for task in tasks)
    for done, (task, timed) in enumerate(benchmark_all(tasks, repeats=repeats), start=1):
        location = task.model.location
        rows[location] = [row | time for row, time in zip(rows[location], timed, strict=True)]
        ms, (low, high) = [row[TIME] for row in timed], (timed[0][name] for name in QUARTILES)
        print(
            f"[{done:2}/{turns}] {task.model.name:24} round {timed[0]['rounds']}, as trained"
            f" {ms[0]:.4g} ({low:.4g} - {high:.4g}), all points {min(ms):.4g} .. {max(ms):.4g} ms per image",
            flush=True,
        )
    return rows


def record_points(record: Record, tasks: list[EvalTask], rows: dict[str, list[Row]]) -> None:
    """Writes the table of each model to its run."""
    from orchestrator.sweeps.operating import table_of

    for task in tasks:
        model = task.model
        if names := record.names(model, task.path):
            assert model.directory
            split = "" if task.split == "val" else f"-{task.split}"
            name = f"operating_points/{next(iter(names))}{split}/step-{model.step}.json"
            found = [{"run": model.name, **row} for row in rows[model.location]]
            record.write(model.directory, {}, tables={name: table_of(found)}, data=names)


def draw_frontier(
    references: Sequence[str],
    tasks: list[EvalTask],
    rows: dict[str, list[Row]],
    on: Evaluation,
    out: str | None,
    record: Record,
) -> Frontier:
    """Draws the points on the frontier of their sweep if they were measured on its validation images; else on
    a page of their own.
    """
    from orchestrator import storage
    from orchestrator.runs.sweep_directory import SweepDir
    from orchestrator.sweeps.operating import OPERATING, frontier_of_models, table_of, with_operating
    from orchestrator.sweeps.publish import PAGE, publish_and_send, write_files

    root = on.places.root()
    apart = out or storage.join(root, "operating-points")
    names = [name.removeprefix("sweep:") for name in references if name.startswith("sweep:")]
    sweep = names[0] if len(names) == len(references) == 1 else ""
    folder = storage.join(root, sweep) if sweep else apart
    if sweep and SweepDir(folder).record() is not None and on_images_of_training(tasks):
        found = [{"run": task.model.name, **row} for task in tasks for row in rows[task.model.location]]
        # Without the lock: a command that trains there reads the table when it draws the page at its end.
        record.write(folder, {}, tables={OPERATING: table_of(found)})
        frontier, missing = publish_and_send(folder, on.places.open_store)
        if missing is None:
            print(f"a command trains in {folder}: it draws these points at its end")
        elif missing:
            print(missing)
        if out:
            write_files(frontier, out)
    else:
        if sweep:
            print(
                f"The frontier of {sweep} stays as it is: its quality is that of its own validation images,"
                f" and these points were measured on others ({tasks[0].split} of {tasks[0].path}).",
                flush=True,
            )
        found = [{"run": task.model.location, **row} for task in tasks for row in rows[task.model.location]]
        frontier, folder = frontier_of_models([task.model for task in tasks], rows), apart
        frontier = with_operating(frontier, found)
        write_files(frontier, folder)
        record.send()
    print(f"page     {storage.join(folder, PAGE)}")
    return frontier


def on_images_of_training(tasks: list[EvalTask]) -> bool:
    """Whether all models were evaluated on the validation split of the data that they were trained with."""
    from orchestrator.data.manifest import open_manifest
    from orchestrator.runs.run_directory import RunDir

    def on_its_own(task: EvalTask) -> bool:
        record = RunDir(task.model.directory or RunDir.of(task.model.run).path).record()
        return (
            record is not None and open_manifest(task.path).digest(record.data_digest) == record.data_digest
        )

    return all(task.split == "val" and on_its_own(task) for task in tasks)


def show(frontier: Frontier) -> None:
    from orchestrator.frontier.figure import cost_text
    from orchestrator.frontier.frontier import gains, operating_front

    found = gains(frontier)
    if not found:
        print("these models have no other operating points: dense models have no routers")
    for cost in dict.fromkeys(gain.cost_name for gain in found):
        at_cost = frontier.at_cost(cost)
        trained = {point.arm for point in at_cost.points}
        rows = [
            ("" if point.arm in trained else "+", point.arm, cost_text(point, cost), f"{point.quality:.4f}")
            for point in operating_front(at_cost)
        ]
        columns = ("", "model: operating point", cost, frontier.quality_name)
        print_table(columns, rows, title="MoE models; + with other settings", left=4)
        for gain in found:
            if gain.cost_name == cost:
                print(f"gain in hypervolume by operating points, {gain.models}: {gain}")
    if found:
        print(frontier.note)
