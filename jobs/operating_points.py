"""What trained models could be without training again: other k, capacity, priority, expert subsets.

  python jobs/operating_points.py sweep:quickstart
  python jobs/operating_points.py sweep:quickstart --grid routing.capacity=0.3,0.5,1 routing.priority=none,max
  python jobs/operating_points.py vmoe soft --data /data/flowers-shards --out /tmp/points

A grid of settings over every model, in parallel by Ray, in one pass over the images for each: quality against
forward GFLOPs and ms per image. Points of a sweep are drawn on its frontier page, with the hypervolume that
they add. Settings that a router does not have are left out. The same command again goes on where it ended.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from jobs.usage import POINT, at_least_one, command, evaluation_parser, named
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from orchestrator.evaluation.parallel import Question, Row
    from orchestrator.evaluation.trained import Trained
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.tracking import Tracking


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
    parser.add_argument("--out", help="directory or URI for page and pictures; of a sweep beside its own")
    args = parser.parse_args()
    with command(f"operating points of {named(args.model)}"):
        find_points(args)


def find_points(args: argparse.Namespace) -> None:
    """Measures, records and draws what the models can do at every point."""
    from jobs.command import check_out, connect, root, tracking
    from jobs.evaluation_flags import models_of
    from orchestrator import storage
    from orchestrator.evaluation.point import parse_grid
    from orchestrator.sweeps.report import FILES
    from orchestrator.training.resources import check_shared

    wanted = parse_grid(args.grid) if args.grid else None
    if args.out:
        check_out(storage.absolute(args.out), own=FILES)
    with tracking(args, "operating-points") as store:
        models = models_of(args, store)
        if wanted:
            check_possible(args, models, wanted)
        questions = [question_of(args, model, wanted) for model in models]
        connect()
        check_shared(root(args))
        rows = measured(args, questions)
        record(store, questions, rows)
        frontier = drawn(args, store, models, rows)
    show(frontier)


def check_possible(args: argparse.Namespace, models: list[Trained], wanted: list[RoutingOverrides]) -> None:
    """Raises UsageError, with the reasons, if none of the models can run at any point of the grid."""
    from orchestrator.evaluation.grid import why_impossible

    reasons: dict[str, str] = {}
    for model in models:
        for point in wanted:
            if (reason := why_impossible(model.run.model, point)) is None:
                return
            reasons.setdefault(reason, model.name)
    listed = "; ".join(f"{name}: {reason}" for reason, name in reasons.items())
    raise UsageError(f"--grid {' '.join(args.grid)}: none of the models can run at these points: {listed}")


def question_of(args: argparse.Namespace, model: Trained, wanted: list[RoutingOverrides] | None) -> Question:
    from jobs.command import root
    from jobs.evaluation_flags import images_path, tell_other_classes
    from orchestrator import storage
    from orchestrator.evaluation.grid import default_grid, possible
    from orchestrator.evaluation.parallel import Question

    config, path = model.run.model, images_path(args, model)
    tell_other_classes(model, path)
    return Question(
        model=model,
        points=tuple(default_grid(config) if wanted is None else possible(config, wanted)),
        path=path,
        split=args.split,
        batch_size=args.batch_size,
        answers=storage.join(root(args), "evaluation"),
    )


def measured(args: argparse.Namespace, questions: list[Question]) -> dict[str, list[Row]]:
    """Maps each model's location to a row for each point, with its quality and its costs."""
    from orchestrator.evaluation.parallel import ROUNDS, qualities, times
    from orchestrator.sweeps.operating import QUALITY, QUARTILES, TIME

    rows: dict[str, list[Row]] = {}
    began, count = time.monotonic(), sum(len(question.points) for question in questions)
    print(f"{count} operating points of {len(questions)} models", flush=True)
    for question, found in qualities(questions):
        rows[question.model.location] = found
        best = max(found, key=lambda row: row[QUALITY])
        print(
            f"[{len(rows):2}/{len(questions)}] {question.model.name:24} {len(found):3} points, as trained"
            f" {found[0][QUALITY]:.4f}, best {best[QUALITY]:.4f} ({best['point']}), weights"
            f" {found[0]['weights'][:12]} as before, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    turns = len(questions) * ROUNDS
    for done, (question, timed) in enumerate(times(questions, repeats=args.repeats), start=1):
        location = question.model.location
        rows[location] = [row | time for row, time in zip(rows[location], timed, strict=True)]
        ms, (low, high) = [row[TIME] for row in timed], (timed[0][name] for name in QUARTILES)
        print(
            f"[{done:2}/{turns}] {question.model.name:24} round {timed[0]['rounds']}, as trained {ms[0]:.4g}"
            f" ({low:.4g} - {high:.4g}), all points {min(ms):.4g} .. {max(ms):.4g} ms per image",
            flush=True,
        )
    return rows


def record(store: Tracking, questions: list[Question], rows: dict[str, list[Row]]) -> None:
    """Writes the table of each model to its run, which may hold several: one for each step and data set."""
    from jobs.evaluation_flags import results_of
    from orchestrator.sweeps.operating import table_of

    for model, path in ((question.model, question.path) for question in questions):
        if model.run_id:
            found = [{"run": model.run_id, **row} for row in rows[model.location]]
            run, (data,) = results_of(store, model.run_id, path)
            run.write_table(f"operating_points/{data}/step-{model.step}.json", table_of(found))


def drawn(
    args: argparse.Namespace, store: Tracking, models: list[Trained], rows: dict[str, list[Row]]
) -> Frontier:
    """Draws the sweep's frontier anew with these points; that of other models on a page of its own."""
    from jobs.command import root
    from orchestrator import storage
    from orchestrator.sweeps.operating import TABLE, TAG, table_of, with_operating
    from orchestrator.sweeps.report import publish, write_files
    from orchestrator.tracking import find_sweep, writer

    names = [name.removeprefix("sweep:") for name in args.model if name.startswith("sweep:")]
    if len(names) == len(args.model) == 1:
        found = [{"run": m.run_id, **row} for m in models for row in rows[m.location]]
        if args.data or args.split != "val":
            print("other images than those of the sweep's quality: its page shows what they say", flush=True)
        parent = writer(store, find_sweep(store, names[0]))
        parent.write_table(TABLE, table_of(found))
        parent.tag(**{TAG: str(len(found))})
        folder = storage.join(root(args), names[0])
        frontier = publish(store, names[0], folder)
    else:
        found = [{"run": m.location, **row} for m in models for row in rows[m.location]]
        folder = storage.absolute(args.out or storage.join(root(args), "operating-points"))
        frontier = with_operating(as_trained(models, rows), found)
        write_files(frontier, folder)
    if args.out:
        write_files(frontier, storage.absolute(args.out))
    print(f"page     {storage.join(folder, 'frontier.html')}")
    return frontier


def as_trained(models: list[Trained], rows: dict[str, list[Row]]) -> Frontier:
    """The frontier of the models themselves, each named by its place, for a run may have several."""
    from orchestrator.frontier.points import Point
    from orchestrator.sweeps.operating import COSTS, QUALITY
    from orchestrator.sweeps.report import Axes, make_frontier
    from orchestrator.sweeps.settings import settings

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
    return make_frontier(
        "Operating points", tuple(points), Axes(quality=QUALITY, cost=COSTS[0], chance=chance)
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
