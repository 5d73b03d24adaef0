"""What trained models could be without training again: other k, capacity, priority, expert subsets.

  python jobs/operating_points.py sweep:quickstart
  python jobs/operating_points.py sweep:quickstart --grid routing.capacity=0.3,0.5,1 routing.priority=none,max
  python jobs/operating_points.py vmoe soft --data /data/flowers-shards --out /tmp/points

A grid of settings over every model, in parallel by Ray, in one pass over the images for each: quality against
forward GFLOPs and ms per image. Points of a sweep are drawn on its frontier page, with the hypervolume that
they add. Settings that a router does not have are left out. The same command again goes on where it ended.
"""

import argparse
import time
from typing import Any

from rich.table import Table

from jobs.command import connect, root, tracking
from jobs.evaluation_flags import (
    evaluation_parser,
    images_path,
    models_of,
    results_of,
    tell_other_classes,
)
from jobs.show import print_table
from jobs.usage import at_least_one, command
from orchestrator import storage
from orchestrator.config import UsageError
from orchestrator.evaluation.grid import default_grid, possible
from orchestrator.evaluation.parallel import Question, Row, qualities, times
from orchestrator.evaluation.point import HELP, parse_grid
from orchestrator.evaluation.trained import Trained
from orchestrator.frontier.operating import gains, operating_front
from orchestrator.frontier.points import Frontier, Point, panel
from orchestrator.sweeping.budget import family
from orchestrator.sweeping.operating import COSTS, QUALITY, TABLE, TAG, table_of, with_operating
from orchestrator.sweeping.report import Axes, framed, publish, write_files
from orchestrator.sweeping.settings import settings
from orchestrator.tracking import Tracking, find_sweep, writer
from orchestrator.training.nodes import check_shared


def main() -> None:
    parser = evaluation_parser(__doc__, several=True)
    parser.add_argument(
        "--grid",
        action="extend",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE,VALUE",
        help=f"values whose product is tried; default: a grid by the router's kind. {HELP}",
    )
    parser.add_argument(
        "--repeats", type=at_least_one, default=10, help="timed forward passes of each point (%(default)s)"
    )
    parser.add_argument("--out", help="directory or URI for page and pictures; of a sweep beside its own")
    args = parser.parse_args()
    with command():
        wanted = parse_grid(args.grid) if args.grid else None
        with tracking(args, "operating-points") as store:
            models = models_of(args, store)
            questions = [question_of(args, model, wanted) for model in models]
            if wanted and all(len(question.points) == 1 for question in questions):
                raise UsageError(f"--grid {' '.join(args.grid)}: none of these models has such settings")
            connect(show_workers=False)
            check_shared(root(args))
            rows = measured(args, questions)
            record(store, questions, rows)
            frontier = drawn(args, store, models, rows)
        show(frontier)


def question_of(args: argparse.Namespace, model: Trained, wanted: Any) -> Question:
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
    """By the model's location: a row for each point, with its quality and its costs."""
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
    for done, (question, timed) in enumerate(times(questions, repeats=args.repeats), start=1):
        location = question.model.location
        rows[location] = [row | time for row, time in zip(rows[location], timed, strict=True)]
        ms = [row["perf/ms_per_image"] for row in timed]
        model = f"[{done:2}/{len(questions)}] {question.model.name:24}"
        print(f"{model} {min(ms):.4g} .. {max(ms):.4g} ms per image", flush=True)
    return rows


def record(store: Tracking, questions: list[Question], rows: dict[str, list[Row]]) -> None:
    """The table of each model in its own run, which may have several: one for each step and data set."""
    for model, path in ((question.model, question.path) for question in questions):
        if model.run_id:
            found = [{"run": model.run_id, **row} for row in rows[model.location]]
            run, (data,) = results_of(store, model.run_id, path)
            run.write_table(f"operating_points/{data}/step-{model.step}.json", table_of(found))


def drawn(
    args: argparse.Namespace, store: Tracking, models: list[Trained], rows: dict[str, list[Row]]
) -> Frontier:
    """The frontier of the sweep, published anew with these points; of other models one of their own."""
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
    """The models themselves, each by its place, for one run may have several."""
    points = tuple(_point(model, rows[model.location][0]) for model in models)
    chance = 1 / min(model.run.model.num_classes for model in models)
    return framed("Operating points", points, Axes(quality=QUALITY, cost=COSTS[0], chance=chance))


def _point(model: Trained, row: Row) -> Point:
    found = settings(model.run)
    return Point(
        arm=model.name,
        family=family(model.run.model),
        cost=row[COSTS[0]],
        quality=row[QUALITY],
        size=float(found["capacity"]),
        run_id=model.location,
        status="finished",
        costs={name: row[name] for name in COSTS},
        settings=found,
    )


def show(frontier: Frontier) -> None:
    found = gains(frontier)
    if not found:
        print("these models have no other operating points: dense ones have no routers")
    for cost in dict.fromkeys(gain.cost_name for gain in found):
        one = panel(frontier, cost)
        table = Table(title="MoE models; + with other settings")
        for column in ("", "model: operating point", cost, frontier.quality_name):
            table.add_column(column, overflow="fold")
        trained = {point.arm for point in one.points}
        for point in operating_front(one):
            mark = "" if point.arm in trained else "+"
            table.add_row(mark, point.arm, f"{point.cost:.4g}", f"{point.quality:.4f}")
        print_table(table)
        for gain in found:
            if gain.cost_name == cost:
                print(f"hypervolume of {gain.models}, without and with operating points: {gain}")


if __name__ == "__main__":
    main()
