"""Evaluate trained models at other settings of their routers: k, capacity, priority, expert subsets.

  python jobs/operating_points.py sweep:quickstart
  python jobs/operating_points.py sweep:quickstart --grid routing.capacity=0.3,0.5,1 routing.priority=none,max
  python jobs/operating_points.py vmoe soft --data /data/flowers-shards --out /tmp/points

A grid of settings over every model, in parallel by Ray, in one pass over the images for each: quality against
forward GFLOPs and ms per image. Points of a sweep are drawn on its frontier page, with the hypervolume that
they add, if they were measured on its own validation images. Settings that a router does not have are left
out. Run the same command again to continue after an interruption.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from jobs.usage import POINT, at_least_one, command, evaluation_parser, named
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from orchestrator.evaluation.evaluate import EvalTask, Row
    from orchestrator.evaluation.models import ModelRef
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.tracking.store import Tracking


def main() -> None:
    parser = evaluation_parser(__doc__, several=True)
    parser.add_argument(
        "--grid",
        action="extend",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE,VALUE",
        help=f"values whose product is tried; default: a grid by the router's kind. {POINT}",
    )
    parser.add_argument(
        "--repeats",
        type=at_least_one,
        default=5,
        help="timed forward passes of each point in each round (%(default)s)",
    )
    parser.add_argument("--out", help="directory or URI for page and pictures, for a sweep beside its own")
    args = parser.parse_args()
    with command(f"operating points of {named(args.model)}"):
        find_points(args)


def find_points(args: argparse.Namespace) -> None:
    """Measures, records and draws what the models can do at every point."""
    from jobs.command import check_out, connect, open_store, root
    from jobs.evaluation_flags import models_of
    from orchestrator import storage
    from orchestrator.evaluation.points import parse_grid
    from orchestrator.sweeps.publish import FILES
    from orchestrator.training.resources import check_shared

    wanted = parse_grid(args.grid) if args.grid else None
    if args.out:
        check_out(storage.absolute(args.out), own=FILES)
    store = open_store(args)
    tasks = tasks_of(args, models_of(args, store), wanted)
    connect()
    check_shared(root(args))
    rows = measured(args, tasks)
    record(store, tasks, rows)
    frontier = drawn(args, store, tasks, rows)
    show(frontier)


def tasks_of(
    args: argparse.Namespace, models: list[ModelRef], wanted: list[RoutingOverrides] | None
) -> list[EvalTask]:
    """A task for each model. Raises UsageError if none of them can run at any of the wanted points."""
    from jobs.command import root
    from jobs.evaluation_flags import images_path
    from orchestrator import storage
    from orchestrator.evaluation.evaluate import EvalTask
    from orchestrator.evaluation.points import default_grid, possible, why_impossible

    tasks = []
    for model in models:
        config, path = model.run.model, images_path(args, model)
        model.check_classes(path)
        task = EvalTask(
            model=model,
            points=tuple(default_grid(config) if wanted is None else possible(config, wanted)),
            path=path,
            split=args.split,
            batch_size=args.batch_size,
            results=storage.join(root(args), "evaluation"),
        )
        tasks.append(task)
    if wanted and all(len(task.points) == 1 for task in tasks):
        reasons = "; ".join(f"{model.name}: {why_impossible(model.run.model, wanted[0])}" for model in models)
        raise UsageError(
            f"--grid {' '.join(args.grid)}: none of the models can run at these points: {reasons}"
        )
    return tasks


def measured(args: argparse.Namespace, tasks: list[EvalTask]) -> dict[str, list[Row]]:
    """Maps each model's location to a row for each point, with its quality and its costs."""
    from orchestrator.evaluation.evaluate import ROUNDS, benchmark_all, evaluate_all
    from orchestrator.sweeps.operating import QUALITY, QUARTILES, TIME

    rows: dict[str, list[Row]] = {}
    began, count = time.monotonic(), sum(len(task.points) for task in tasks)
    print(f"{count} operating points of {len(tasks)} models", flush=True)
    for task, found in evaluate_all(tasks):
        rows[task.model.location] = found
        best = max(found, key=lambda row: row[QUALITY])
        print(
            f"[{len(rows):2}/{len(tasks)}] {task.model.name:24} {len(found):3} points, as trained"
            f" {found[0][QUALITY]:.4f}, best {best[QUALITY]:.4f} ({best['point']}), weights"
            f" {found[0]['weights'][:12]} unchanged, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    for done, (task, timed) in enumerate(benchmark_all(tasks, repeats=args.repeats), start=1):
        location = task.model.location
        rows[location] = [row | time for row, time in zip(rows[location], timed, strict=True)]
        ms, (low, high) = [row[TIME] for row in timed], (timed[0][name] for name in QUARTILES)
        print(
            f"[{done:2}/{len(tasks) * ROUNDS}] {task.model.name:24} round {timed[0]['rounds']}, as trained"
            f" {ms[0]:.4g} ({low:.4g} - {high:.4g}), all points {min(ms):.4g} .. {max(ms):.4g} ms per image",
            flush=True,
        )
    return rows


def record(store: Tracking, tasks: list[EvalTask], rows: dict[str, list[Row]]) -> None:
    """Writes the table of each model to its run, which may hold several: one for each step and data set."""
    from jobs.evaluation_flags import results_of
    from orchestrator.sweeps.operating import table_of

    for task in tasks:
        model = task.model
        if model.run_id:
            found = [{"run": model.run_id, **row} for row in rows[model.location]]
            run, (data,) = results_of(store, model.run_id, task.path)
            split = "" if task.split == "val" else f"-{task.split}"
            run.write_table(f"operating_points/{data}{split}/step-{model.step}.json", table_of(found))


def drawn(
    args: argparse.Namespace, store: Tracking, tasks: list[EvalTask], rows: dict[str, list[Row]]
) -> Frontier:
    """Draws the points on the frontier of their sweep if they were measured on the images that it is judged
    by; else on a page of their own.
    """
    from jobs.command import root
    from orchestrator import storage
    from orchestrator.sweeps.operating import TABLE, with_operating
    from orchestrator.sweeps.publish import publish, write_files
    from orchestrator.tracking.sync import Sync
    from orchestrator.training.run_directory import locked, read_sweep, write_json

    out = storage.absolute(args.out) if args.out else storage.join(root(args), "operating-points")
    names = [name.removeprefix("sweep:") for name in args.model if name.startswith("sweep:")]
    sweep = names[0] if len(names) == len(args.model) == 1 else ""
    folder = storage.join(root(args), sweep) if sweep else out
    if sweep and read_sweep(folder) is not None and on_images_of_training(tasks):
        found = [{"run": task.model.name, **row} for task in tasks for row in rows[task.model.location]]
        with locked(folder):
            write_json(storage.join(folder, TABLE), found)
            frontier = publish(folder)
            Sync(store, folder).update()
        if args.out:
            write_files(frontier, out)
    else:
        if sweep:
            print(
                f"The frontier of {sweep} stays as it is: its quality is that of its own validation images,"
                f" and these points were measured on others ({tasks[0].split} of {tasks[0].path}).",
                flush=True,
            )
        found = [{"run": task.model.location, **row} for task in tasks for row in rows[task.model.location]]
        folder, frontier = out, with_operating(as_trained([task.model for task in tasks], rows), found)
        write_files(frontier, folder)
    print(f"page     {storage.join(folder, 'frontier.html')}")
    return frontier


def on_images_of_training(tasks: list[EvalTask]) -> bool:
    """Whether all models were evaluated on the validation split of the data that they were trained with."""
    from orchestrator.data.manifest import open_manifest
    from orchestrator.training.run_directory import read_run, run_directory

    def digest(task: EvalTask) -> str:
        record = read_run(run_directory(task.model.run))
        return record.data_digest if record else ""

    return all(task.split == "val" and open_manifest(task.path).digest() == digest(task) for task in tasks)


def as_trained(models: list[ModelRef], rows: dict[str, list[Row]]) -> Frontier:
    """The frontier of the models themselves, each named by its place, for a run may have several."""
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.frontier.points import Point
    from orchestrator.sweeps.operating import COSTS, QUALITY
    from orchestrator.sweeps.sweep import settings

    points = []
    for model in models:
        row, found = rows[model.location][0], settings(model.run)
        points.append(
            Point(
                arm=model.name,
                family=model.run.model.family(),
                cost=row[COSTS[0]],
                quality=row[QUALITY],
                size=float(found["capacity"]),
                run_id=model.location,
                status="finished",
                costs={name: row[name] for name in COSTS},
                settings=found,
            )
        )
    chance = 1 / min(model.run.model.num_classes for model in models)
    highest = max(point.cost for point in points)
    return Frontier(
        name="Operating points",
        quality_name=QUALITY,
        cost_name=COSTS[0],
        points=tuple(points),
        reference={QUALITY: chance, COSTS[0]: 1.1 * highest},
    )


def show(frontier: Frontier) -> None:
    from rich.table import Table

    from jobs.show import print_table
    from orchestrator.frontier.figure import cost_text
    from orchestrator.frontier.frontier import gains, operating_front

    found = gains(frontier)
    if not found:
        print("these models have no other operating points: dense ones have no routers")
    for cost in dict.fromkeys(gain.cost_name for gain in found):
        one = frontier.at_cost(cost)
        table = Table(title="MoE models; + with other settings")
        for column in ("", "model: operating point", cost, frontier.quality_name):
            table.add_column(column, overflow="fold")
        trained = {point.arm for point in one.points}
        for point in operating_front(one):
            mark = "" if point.arm in trained else "+"
            table.add_row(mark, point.arm, cost_text(point, cost), f"{point.quality:.4f}")
        print_table(table)
        for gain in found:
            if gain.cost_name == cost:
                print(f"gain in hypervolume by operating points, {gain.models}: {gain}")
    if found:
        print(frontier.note)


if __name__ == "__main__":
    main()
