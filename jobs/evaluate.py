"""Evaluate trained models on any shards, as they were trained or at another operating point.

  python jobs/evaluate.py quickstart/trials/w16-soft-seed0
  python jobs/evaluate.py models:/quickstart@pareto-knee --data /data/flowers-shards --per-class
  python jobs/evaluate.py sweep:quickstart --set routing.experts=2 --random-subsets 10
  python jobs/evaluate.py vmoe --set routing.k=1 routing.capacity=0.3 routing.priority=max

Weights stay as they are. Figures go to the run that trained the model, as eval/DATA/SPLIT/step-N/POINT/acc1
and so on, with the table by class as an artifact.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from jobs._cli import (
    Evaluation,
    check_file,
    command,
    models_of,
    named,
    print_table,
    print_unrecorded,
    results_of,
)
from jobs._flags import MODELS, POINT, flag, parse
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.tracking.store import Tracking


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    model: tuple[str, ...] = flag(help=MODELS, positional=True, nargs="+")
    set: tuple[str, ...] = flag((), f"operating point: {POINT}", metavar="FIELD=VALUE", nargs="+")
    random_subsets: int = flag(
        0,
        "also evaluate this many random subsets of as many experts, as a baseline",
    )
    repeats: int = flag(10, "timed forward passes of a full batch", least=1)
    per_class: bool = flag(False, "print the table by class")
    out: str | None = flag(None, "write all figures as JSON to this file or URI")
    on: Evaluation

    def __post_init__(self) -> None:
        if self.random_subsets == 1 or self.random_subsets < 0:
            raise UsageError(f"--random-subsets {self.random_subsets}: a deviation needs at least 2 subsets")


def main() -> None:
    flags = parse(EvaluateFlags, __doc__)
    with command(f"evaluating {named(flags.model)}", flags.on.places):
        evaluate(flags)


def evaluate(flags: EvaluateFlags) -> None:
    """Evaluates, records and prints every model that can run at the point."""
    from orchestrator import storage
    from orchestrator.evaluation.points import parse_point

    point, out = parse_point(flags.set), storage.absolute(flags.out) if flags.out else None
    if flags.random_subsets and not isinstance(point.experts, int):
        raise UsageError("--random-subsets draws as many experts as --set routing.experts=NUMBER says")
    if out:
        check_file("--out", out)
    store = flags.on.places.open_store()
    models = possible_at(point, models_of(flags.model, flags.on.places, store))
    reports = [evaluated(flags, model, point, store) for model in models]
    print_reports(reports, per_class=flags.per_class)
    if out:
        storage.write_bytes(out, json.dumps(reports, indent=1).encode())
        print(f"figures  {flags.out}")


def possible_at(point: RoutingOverrides, models: list[ModelRef]) -> list[ModelRef]:
    """The models that can run at the point; names the others. Raises UsageError if no model can."""
    from orchestrator.evaluation.points import why_impossible

    reasons = [why_impossible(model.run.model, point) for model in models]
    refused = [f"{model.name}: {why}" for model, why in zip(models, reasons, strict=True) if why]
    if len(refused) == len(models):
        raise UsageError("; ".join(refused))
    for reason in refused:
        print(f"left out {reason}", flush=True)
    return [model for model, why in zip(models, reasons, strict=True) if why is None]


def evaluated(
    flags: EvaluateFlags, model: ModelRef, point: RoutingOverrides, store: Tracking
) -> dict[str, Any]:
    """The quality, cost and speed of the model at the point, for JSON. Records them in the model's run, where
    the time of day is the step, so that a later evaluation follows an earlier one.
    """
    from moe.cost import forward_gflops_2mac
    from orchestrator.data.batch import normalize
    from orchestrator.data.manifest import open_manifest
    from orchestrator.evaluation.evaluate import default_device, evaluate_at, latencies
    from orchestrator.evaluation.points import point_key, point_name

    path, split = flags.on.path(model), flags.on.split
    model.check_classes(path)

    vit = model.load(default_device())
    drawn = [replace(point, subset_seed=seed) for seed in range(flags.random_subsets)]
    scores, *random_scores = evaluate_at(vit, flags.on.images(model, path), [point, *drawn], model.run.task)
    batch = next(flags.on.images(model, path))
    (latency,) = latencies(vit, normalize(batch["image"]), [point], repeats=flags.repeats)
    metrics = scores.metrics() | {
        "forward_gflops_2mac": forward_gflops_2mac(model.run.model, point),
        "ms_per_image": latency.median,
    }
    quality = model.run.task.quality.removeprefix("val/")
    print(f"{model.name}: {metrics[quality]:.4f} of {scores.images()} images", flush=True)
    if drawn:
        accuracies = [each.metrics()[quality] for each in random_scores]
        mean, deviation = fmean(accuracies), stdev(accuracies)
        metrics |= {f"random_{quality}": mean, f"random_{quality}_std": deviation}
        if deviation:
            # Implicit Bias in Soft MoE, section 4.4.2.
            metrics["random_z"] = (metrics[quality] - mean) / deviation
        z = f", z = {metrics['random_z']:.1f}" if deviation else ""
        print(
            f"  {len(drawn)} random subsets of {point.experts} experts: mean {mean:.4f}, standard deviation"
            f" {deviation:.4f}{z}",
            flush=True,
        )
    report = {
        "model": model.name,
        "location": model.location,
        "step": model.step,
        "run_id": model.run_id,
        "point": point_name(point),
        "data": path,
        "split": split,
        "images": scores.images(),
        "unread": scores.unread,
        "metrics": metrics,
        "latency": latency.summary(),
        "classes": scores.table(open_manifest(path).classes),
    }
    if model.run_id:
        run, (data,) = results_of(store, model.run_id, path)
        where = f"eval/{data}/{split}/step-{model.step}/{point_key(point)}"
        run.log({f"{where}/{name}": value for name, value in metrics.items()})
        run.write_table(f"{where}/classes.json", report["classes"])
        run.tag(**{"eval.latency": timing(report)})
    return report


def timing(report: dict[str, Any]) -> str:
    """How the time of an image was measured."""
    timed = report["latency"]
    return f"batch {timed['batch']}, {timed['device']}, median of {timed['repeats']}"


def print_reports(reports: list[dict[str, Any]], *, per_class: bool) -> None:
    rows, costs = [], ("forward_gflops_2mac", "ms_per_image")
    names = [n for n in reports[0]["metrics"] if n not in costs and not n.startswith("random_")]
    for report in reports:
        metrics = report["metrics"]
        unread = f" ({report['unread']} unread)" if report["unread"] else ""
        cells = (*(metrics[name] for name in names), *(f"{metrics[name]:.4g}" for name in costs))
        rows.append((report["model"], f"{report['images']}{unread}", *cells))
    titles = [re.sub(r"(\d+)$", r"@\1", name) for name in names]
    columns = ("model", "images", *titles, "GFLOP/image", "ms/image")
    first = reports[0]
    title = f"{first['point']} on {first['data']}, {first['split']}; ms: {timing(first)}"
    print_table(columns, rows, title=title)
    print_unrecorded([report["model"] for report in reports if not report["run_id"]])
    for report in reports if per_class else []:
        cells = zip(*report["classes"].values(), strict=True)
        rows = [["-" if cell is None else cell for cell in row] for row in cells]
        print_table(report["classes"], rows, title=f"{report['model']} by class")


if __name__ == "__main__":
    main()
