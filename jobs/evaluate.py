"""Evaluate trained models on any shards, as they were trained or at another operating point.

  python jobs/evaluate.py quickstart/trials/soft1
  python jobs/evaluate.py models:/moe-frontier@pareto-knee --data /data/flowers-shards --per-class
  python jobs/evaluate.py sweep:quickstart --set routing.experts=2
  python jobs/evaluate.py vmoe --set routing.k=1 routing.capacity=0.3 routing.priority=max

Weights stay as they are. Figures go to the run that trained the model, as eval/DATA/SPLIT/step-N/POINT/acc1
and so on, with the table by class as an artifact.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jobs.usage import POINT, at_least_one, command, evaluation_parser, named
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from orchestrator.data.batch import Batch
    from orchestrator.evaluation.models import ModelRef
    from orchestrator.tracking.store import Tracking


def main() -> None:
    parser = evaluation_parser(__doc__, several=True)
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help=f"operating point: {POINT}",
    )
    parser.add_argument(
        "--repeats", type=at_least_one, default=10, help="timed forward passes of a full batch (%(default)s)"
    )
    parser.add_argument("--per-class", action="store_true", help="print the table by class")
    parser.add_argument("--out", help="write all figures as JSON to this file or URI")
    args = parser.parse_args()
    with command(f"evaluating {named(args.model)}"):
        evaluate(args)


def evaluate(args: argparse.Namespace) -> None:
    """Evaluates, records and prints every model that can run at the point."""
    from jobs.command import check_file, open_store
    from jobs.evaluation_flags import models_of
    from orchestrator import storage
    from orchestrator.evaluation.points import parse_point

    point = parse_point(args.set)
    if args.out:
        check_file("--out", storage.absolute(args.out))
    store = open_store(args)
    models = possible_at(point, models_of(args, store))
    reports = [evaluated(args, model, point, store) for model in models]
    print_reports(reports, per_class=args.per_class)
    if args.out:
        storage.write_bytes(storage.absolute(args.out), json.dumps(reports, indent=1).encode())
        print(f"figures  {args.out}")


def possible_at(point: RoutingOverrides, models: list[ModelRef]) -> list[ModelRef]:
    """The models that can run at the point; names the others. Raises UsageError if none can."""
    from orchestrator.evaluation.points import why_impossible

    reasons = [why_impossible(model.run.model, point) for model in models]
    refused = [f"{model.name}: {why}" for model, why in zip(models, reasons, strict=True) if why]
    if len(refused) == len(models):
        raise UsageError("; ".join(refused))
    for reason in refused:
        print(f"left out {reason}", flush=True)
    return [model for model, why in zip(models, reasons, strict=True) if why is None]


def evaluated(
    args: argparse.Namespace, model: ModelRef, point: RoutingOverrides, store: Tracking
) -> dict[str, Any]:
    """The quality, cost and speed of the model at the point, as JSON has them. Records them in its run."""
    from jobs.evaluation_flags import images_path
    from moe.cost import forward_gflops_2mac
    from orchestrator.data.images import normalize
    from orchestrator.data.manifest import open_manifest
    from orchestrator.evaluation.evaluate import default_device, evaluate_at, images_of, latencies
    from orchestrator.evaluation.points import point_key, point_name

    path, device = images_path(args, model), default_device()
    model.check_classes(path)

    def batches() -> Iterator[Batch]:
        return images_of(model, path=path, split=args.split, batch_size=args.batch_size, device=device)

    vit = model.load(device)
    (scores,) = evaluate_at(vit, batches(), [point])
    (latency,) = latencies(vit, normalize(next(batches()).image), [point], repeats=args.repeats)
    metrics = scores.metrics() | {
        "forward_gflops_2mac": forward_gflops_2mac(model.run.model, point),
        "ms_per_image": latency.median,
    }
    print(f"{model.name}: {metrics['acc1']:.4f} of {scores.images()} images", flush=True)
    report = {
        "model": model.name,
        "location": model.location,
        "step": model.step,
        "run_id": model.run_id,
        "point": point_name(point),
        "data": path,
        "split": args.split,
        "images": scores.images(),
        "unread": scores.unread,
        "metrics": metrics,
        "latency": latency.summary(),
        "classes": scores.by_class(open_manifest(path).classes),
    }
    if model.run_id:
        record(store, model.run_id, report, point_key(point))
    return report


def record(store: Tracking, run_id: str, report: Mapping[str, Any], point: str) -> None:
    """Writes a report to the model's MLflow run. The time of day is its step, so that a later evaluation
    follows an earlier one.
    """
    from jobs.evaluation_flags import results_of

    run, (data,) = results_of(store, run_id, report["data"])
    where = f"eval/{data}/{report['split']}/step-{report['step']}/{point}"
    finite = {name: value for name, value in report["metrics"].items() if math.isfinite(value)}
    run.log({f"{where}/{name}": value for name, value in finite.items()})
    run.write_table(f"{where}/classes.json", report["classes"])
    run.tag(**{"eval.latency": timing(report)})


def timing(report: Mapping[str, Any]) -> str:
    """How the time of an image was measured."""
    timed = report["latency"]
    return f"batch {timed['batch']}, {timed['device']}, median of {timed['repeats']}"


def print_reports(reports: list[dict[str, Any]], *, per_class: bool) -> None:
    from rich.table import Table

    from jobs.show import print_table

    first = reports[0]
    table = Table(title=f"{first['point']} on {first['data']}, {first['split']}; ms: {timing(first)}")
    for column in ("model", "images", "acc@1", "acc@5", "prec@1", "loss", "GFLOP/image", "ms/image"):
        table.add_column(column, justify="left" if column == "model" else "right", overflow="fold")
    for report in reports:
        metrics, images = report["metrics"], str(report["images"])
        unread = f" ({report['unread']} unread)" if report["unread"] else ""
        shares = (f"{metrics[name]:.4f}" for name in ("acc1", "acc5", "prec1", "loss"))
        costs = (f"{metrics[name]:.4g}" for name in ("forward_gflops_2mac", "ms_per_image"))
        table.add_row(report["model"], images + unread, *shares, *costs)
    print_table(table)
    unknown = [report["model"] for report in reports if not report["run_id"]]
    if unknown:
        print(f"not recorded, because MLflow does not know the runs that trained them: {', '.join(unknown)}")
    for report in reports if per_class else []:
        table = Table(title=f"{report['model']} by class")
        for column in report["classes"]:
            table.add_column(column, justify="left" if column == "class" else "right")
        for row in zip(*report["classes"].values(), strict=True):
            table.add_row(*(_cell(value) for value in row))
        print_table(table)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
