"""Models at a grid of settings of their routers, and a page of what they can do there.

Models are evaluated in parallel by Ray, in one pass over the images for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from moe.config import PositiveInt
from orchestrator.errors import UsageError
from orchestrator.evaluation.base import EvaluationConfig, EvaluationRequest, EvaluationResult, setting
from orchestrator.evaluation.kinds.scores import CLASSES, labels_by_name, why_not_in, without_refused

if TYPE_CHECKING:
    from orchestrator.evaluation.evaluate import EvalTask, Row
    from orchestrator.frontier.frontier import Frontier


@dataclass(frozen=True, kw_only=True)
class GridConfig(EvaluationConfig):
    """quality and cost at many operating points, on a page

      evaluate sweep:quickstart --grid
      evaluate vmoe soft --grid routing.capacity=0.3,0.5,1 routing.priority=none,max --out DIR

    Every setting is tried in parallel by Ray, in one pass over the images for each model: quality
    against forward GFLOPs and ms per image. Points of a sweep are drawn on its frontier page, with the
    hypervolume that they add, if they were measured on its own validation images. Settings that a router
    does not have are left out. Run the same command again to continue after an interruption.
    """

    kind: Literal["grid"] = "grid"
    grid: tuple[str, ...] = setting(
        (),
        "try the product of these values of fields of an operating point; none, after the models: the"
        " router's own grid",
        metavar="FIELD=VALUE,VALUE",
        nargs="*",
    )
    repeats: PositiveInt = setting(5, "timed forward passes of each point in each round", metavar="N")
    classes: str | None = setting(None, CLASSES, metavar="FILE")

    def folder(self) -> Sequence[str]:
        from orchestrator.sweeps.publish import FILES

        return (*FILES,)

    def evaluate(self, on: EvaluationRequest) -> Iterator[EvaluationResult]:
        """Measures, and draws what the models can do at every point."""
        from orchestrator.sweeps.operating import table_of
        from orchestrator.training.resources import check_shared

        tasks = self.tasks(on)
        sharding = on.sharding([task.model for task in tasks])
        tasks = [replace(task, sharding=sharding) for task in tasks]
        on.connect()
        check_shared(on.root)
        rows = measure_points(tasks, on, repeats=self.repeats)
        for task in tasks:
            model, split = task.model, "" if on.split == "val" else f"-{on.split}"
            found = [{"run": model.name, **row} for row in rows[model.location]]
            yield EvaluationResult(
                model=model,
                paths=(task.path,),
                where=f"operating_points/{{0}}{split}",
                tables={f"step-{model.step}.json": table_of(found)},
            )
        show_gains(draw_frontier(tasks, rows, on), on)

    def tasks(self, on: EvaluationRequest) -> list[EvalTask]:
        """Returns a task for each model. Raises UsageError if none can run at any of the points."""
        from orchestrator import storage
        from orchestrator.evaluation.evaluate import EvalTask
        from orchestrator.evaluation.points import default_grid, parse_grid, possible, why_impossible

        wanted, tasks = parse_grid(self.grid) if self.grid else None, []
        for model in without_refused(on.models, lambda model: why_not_in(model, on.batch_size), on):
            config, path = model.run.model, on.path(model)
            task = EvalTask(
                model=model,
                points=tuple(default_grid(config) if wanted is None else possible(config, wanted)),
                path=path,
                split=on.split,
                batch_size=on.batch_size,
                results=storage.join(on.root, "evaluation"),
                outputs=labels_by_name(model, path, self.classes),
            )
            tasks.append(task)
        if wanted and all(len(task.points) == 1 for task in tasks):
            why = [f"{model.name}: {why_impossible(model.run.model, wanted[0])}" for model in on.models]
            raise UsageError(
                f"`grid` {' '.join(self.grid)}: none of the models can run at these points: {'; '.join(why)}"
            )
        return tasks


def measure_points(tasks: Sequence[EvalTask], on: EvaluationRequest, *, repeats: int) -> dict[str, list[Row]]:
    """Returns for each model's location a row for each point, with its quality and its costs."""
    from orchestrator.evaluation.evaluate import ROUNDS, benchmark_all, evaluate_all
    from orchestrator.sweeps.operating import QUARTILES, TIME

    rows: dict[str, list[Row]] = {}
    began, count = time.monotonic(), sum(len(task.points) for task in tasks)
    on.say(f"{count} operating points of {len(tasks)} models")
    for task, found in evaluate_all(tasks):
        rows[task.model.location] = found
        quality = task.model.run.task.quality
        best = max(found, key=lambda row: row[quality])
        on.say(
            f"[{len(rows):2}/{len(tasks)}] {task.model.name:24} {len(found):3} points, as trained"
            f" {found[0][quality]:.4f}, best {best[quality]:.4f} ({best['point']}), weights"
            f" {found[0]['weights'][:12]} unchanged, {time.monotonic() - began:.0f} s"
        )
    turns = sum(1 if task.sharding else ROUNDS for task in tasks)
    for done, (task, timed) in enumerate(benchmark_all(tasks, repeats=repeats), start=1):
        location = task.model.location
        rows[location] = [row | time for row, time in zip(rows[location], timed, strict=True)]
        ms, (low, high) = [row[TIME] for row in timed], (timed[0][name] for name in QUARTILES)
        on.say(
            f"[{done:2}/{turns}] {task.model.name:24} round {timed[0]['rounds']}, as trained"
            f" {ms[0]:.4g} ({low:.4g} - {high:.4g}), all points {min(ms):.4g} .. {max(ms):.4g} ms per image"
        )
    return rows


def draw_frontier(tasks: Sequence[EvalTask], rows: dict[str, list[Row]], on: EvaluationRequest) -> Frontier:
    """Draws the points on the frontier of their sweep if they were measured on its validation images; else on
    a page of their own.
    """
    from orchestrator import storage
    from orchestrator.runs.sweep_directory import SweepDir
    from orchestrator.sweeps.operating import OPERATING, frontier_of_models, table_of, with_operating
    from orchestrator.sweeps.publish import PAGE, publish_and_send, write_files

    apart = on.out or storage.join(on.root, "operating-points")
    names = [name.removeprefix("sweep:") for name in on.references if name.startswith("sweep:")]
    sweep = names[0] if len(names) == len(on.references) == 1 else ""
    folder = storage.join(on.root, sweep) if sweep else apart
    if sweep and SweepDir(folder).record() is not None and on_images_of_training(tasks):
        found = [{"run": task.model.name, **row} for task in tasks for row in rows[task.model.location]]
        # Without the lock: a command that trains there reads the table when it draws the page at its end.
        on.keep(folder, {OPERATING: table_of(found)})
        frontier, missing = publish_and_send(folder, on.open_store)
        if missing is None:
            on.say(f"a command trains in {folder}: it draws these points at its end")
        elif missing:
            on.say(missing)
        if on.out:
            write_files(frontier, on.out)
    else:
        if sweep:
            on.say(
                f"The frontier of {sweep} stays as it is: its quality is that of its own validation images,"
                f" and these points were measured on others ({tasks[0].split} of {tasks[0].path})."
            )
        found = [{"run": task.model.location, **row} for task in tasks for row in rows[task.model.location]]
        frontier, folder = frontier_of_models([task.model for task in tasks], rows), apart
        frontier = with_operating(frontier, found)
        write_files(frontier, folder)
    on.say(f"page     {storage.join(folder, PAGE)}")
    return frontier


def on_images_of_training(tasks: Sequence[EvalTask]) -> bool:
    """Returns whether all models were evaluated on the validation images of their training."""
    from orchestrator.data.manifest import open_manifest
    from orchestrator.runs.run_directory import RunDir

    def on_its_own(task: EvalTask) -> bool:
        record = RunDir(task.model.directory or RunDir.of(task.model.run).path).record()
        return (
            record is not None and open_manifest(task.path).digest(record.data_digest) == record.data_digest
        )

    return all(task.split == "val" and on_its_own(task) for task in tasks)


def show_gains(frontier: Frontier, on: EvaluationRequest) -> None:
    """Prints the points that no other beats, with what they add to the frontier."""
    from orchestrator.frontier.figure import cost_text
    from orchestrator.frontier.frontier import gains, operating_front
    from orchestrator.units import unit_of

    found = gains(frontier)
    if not found:
        on.say("these models have no other operating points: dense models have no routers")
    for cost in dict.fromkeys(gain.cost_name for gain in found):
        at_cost = frontier.at_cost(cost)
        trained = {point.arm for point in at_cost.points}
        front = operating_front(at_cost)
        unit = unit_of(cost, [point.cost for point in front])
        rows = [
            ("" if p.arm in trained else "+", p.arm, cost_text(p, cost, unit.size), f"{p.quality:.4f}")
            for p in front
        ]
        columns = ("", "model: operating point", unit.title, frontier.quality_name)
        on.table(columns, rows, title="MoE models; + with other settings", left=4)
        for gain in found:
            if gain.cost_name == cost:
                on.say(f"gain in hypervolume by operating points, {gain.models}: {gain}")
    if found:
        on.say(frontier.note)
