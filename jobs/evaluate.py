"""Evaluate trained models on any shards, as trained, at other operating points, or from few images per class.

  python jobs/evaluate.py quickstart/trials/w16-soft-seed0
  python jobs/evaluate.py models:/quickstart@pareto-knee --data /data/flowers-shards --per-class
  python jobs/evaluate.py sweep:quickstart --set routing.experts=2 --random-subsets 10
  python jobs/evaluate.py vmoe --set routing.k=1 routing.capacity=0.3 routing.priority=max
  python jobs/evaluate.py sweep:quickstart --grid
  python jobs/evaluate.py vmoe soft --grid routing.capacity=0.3,0.5,1 routing.priority=none,max --out DIR
  python jobs/evaluate.py soft --shots 1,5 --data /data/flowers --data /data/pets --seeds 5
  python jobs/evaluate.py large --workers 8 --ep 8 --dtype bfloat16
  python jobs/evaluate.py timm-folder --data /data/imagenet-shards --classes imagenet
  python jobs/evaluate.py lit --zero-shot flowers.toml --data /data/flowers
  python jobs/evaluate.py lit --retrieval --data /data/captioned --page found.html

Weights stay as they are. Figures go to the run that trained the model, as eval/DATA/SPLIT/step-N/POINT/acc1
and so on, with the table by class and the confusion matrix as artifacts.

--grid tries every setting in parallel by Ray, in one pass over the images for each model: quality against
forward GFLOPs and ms per image. Points of a sweep are drawn on its frontier page, with the hypervolume that
they add, if they were measured on its own validation images. Settings that a router does not have are left
out. Run the same command again to continue after an interruption.

--shots fits a linear classifier to the frozen features: the train split of each data set gives the shots, and
its val split is tested. To measure it during training, use `--set train.fewshot={}` there.

--workers N lets N workers hold one model together, as in training; every mode can do that.

--zero-shot and --retrieval are for models of images and texts: see docs/image_text.md.
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
)
from jobs._flags import MODELS, POINT, flag, numbers, parse
from jobs._grid import evaluate_grid, labels_by_name, why_not_in, without_refused
from jobs._image_text import evaluate_retrieval, evaluate_zero_shot
from jobs._record import Record
from jobs._sharded import Workers
from jobs._shots import evaluate_shots
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from orchestrator.checkpoint.models import ModelRef


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    model: tuple[str, ...] = flag(help=MODELS, positional=True, nargs="+")
    set: tuple[str, ...] = flag((), f"operating point: {POINT}", metavar="FIELD=VALUE", nargs="+")
    random_subsets: int = flag(
        0,
        "also evaluate this many random subsets of as many experts, as a baseline",
    )
    grid: tuple[str, ...] | None = flag(
        None,
        "try the product of these values of fields of --set; none, after the models: the router's own grid",
        metavar="FIELD=VALUE,VALUE",
        nargs="*",
    )
    shots: tuple[int, ...] | None = flag(
        None,
        "classify from so many images per class on frozen features, e.g. 1,5,10,25; --data is repeatable",
        read=numbers(int, "1,5,10,25"),
        metavar="N,N",
    )
    zero_shot: str | None = flag(
        None, "classify by names: a TOML file with classes, by label, and templates", metavar="FILE"
    )
    retrieval: bool = flag(False, "find captions by images, and images by captions")
    page: str | None = flag(None, "file or URI for a page of what --retrieval finds", metavar="FILE")
    seeds: int | None = flag(None, "draws of the shots; default: 3", least=1)
    repeats: int | None = flag(
        None,
        "timed forward passes of a full batch; default: 10, with --grid 5 of each point in each round",
        least=1,
    )
    classes: str | None = flag(
        None,
        "find labels by names that data and model spell differently: a CSV with a row for each class, of its"
        " names in the data and in the model; `imagenet` comes with the project",
        metavar="FILE",
    )
    per_class: bool = flag(False, "print the table by class")
    out: str | None = flag(
        None,
        "file or URI for all figures as JSON, with confusion matrices beside it; with --grid a directory or"
        " URI for page and pictures",
    )
    on: Evaluation
    by: Workers = Workers()

    def __post_init__(self) -> None:
        if self.random_subsets == 1 or self.random_subsets < 0:
            raise UsageError(f"--random-subsets {self.random_subsets}: a deviation needs at least 2 subsets")
        modes = {
            "--grid": self.grid is not None,
            "--shots": bool(self.shots),
            "--zero-shot": self.zero_shot is not None,
            "--retrieval": self.retrieval,
        }
        chosen = [mode for mode, wanted in modes.items() if wanted]
        if len(chosen) > 1:
            raise UsageError(f"{' and '.join(chosen)} exclude each other")
        (mode,) = chosen or ("",)
        idle = {
            "": ("seeds", "page"),
            "--grid": ("set", "random_subsets", "per_class", "seeds", "page"),
            "--shots": ("set", "random_subsets", "per_class", "repeats", "out", "page", "classes"),
            "--zero-shot": ("random_subsets", "repeats", "seeds", "page", "classes"),
            "--retrieval": ("set", "random_subsets", "per_class", "repeats", "seeds", "classes"),
        }
        for name in idle[mode]:
            if getattr(self, name):
                needed = "--retrieval" if name == "page" else "--shots"
                where = f"with {mode}" if mode else f"without {needed}"
                raise UsageError(f"--{name.replace('_', '-')} does nothing {where}")
        if self.shots and self.on.split != "val":
            raise UsageError("--split does nothing with --shots: train gives the shots, val is tested")


def main() -> None:
    flags = parse(EvaluateFlags, __doc__)
    with command(f"evaluating {named(flags.model)}", flags.on.places):
        if flags.grid is not None:
            repeats = flags.repeats or 5
            evaluate_grid(
                flags.model, flags.grid, flags.on, flags.by, flags.classes, repeats=repeats, out=flags.out
            )
        elif flags.shots:
            evaluate_shots(flags.model, flags.shots, flags.on, flags.by, seeds=flags.seeds or 3)
        elif flags.zero_shot is not None or flags.retrieval:
            evaluate_texts(flags)
        else:
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
    models = possible_at(point, models_of(flags.model, flags.on.places), flags.on.batch_size)
    reports, failures, record = [], [], Record(flags.on.places)
    for model in models:
        try:
            reports.append(evaluate_model(flags, model, point, record))
        except UsageError as error:
            failures.append(f"{model.name}: {error}" if len(models) > 1 else str(error))
    if reports:
        print_reports(reports, per_class=flags.per_class)
        record.send()
    if reports and out:
        storage.write_bytes(out, json.dumps(reports, indent=1).encode())
        print(f"figures  {flags.out}")
    if failures:
        raise UsageError("; ".join(failures))


def evaluate_texts(flags: EvaluateFlags) -> None:
    """Evaluates models of images and texts."""
    from orchestrator import storage
    from orchestrator.evaluation.points import parse_point

    out = storage.absolute(flags.out) if flags.out else None
    if out:
        check_file("--out", out)
    if flags.zero_shot is not None:
        point = parse_point(flags.set)
        reports = evaluate_zero_shot(
            flags.model, flags.zero_shot, flags.on, flags.by, point, per_class=flags.per_class
        )
    else:
        reports = evaluate_retrieval(flags.model, flags.on, flags.by, flags.page)
    if out:
        storage.write_bytes(out, json.dumps(reports, indent=1).encode())
        print(f"figures  {flags.out}")


def possible_at(point: RoutingOverrides, models: list[ModelRef], batch_size: int) -> list[ModelRef]:
    """The models that can run at the point, in such batches; names the others. Raises UsageError if no model
    can.
    """
    from orchestrator.evaluation.points import why_impossible

    models = without_refused(models, lambda model: why_impossible(model.run.model, point))
    models = [model.in_groups(point.images_per_group) for model in models]
    return without_refused(models, lambda model: why_not_in(model, batch_size))


def evaluate_model(
    flags: EvaluateFlags, model: ModelRef, point: RoutingOverrides, record: Record
) -> dict[str, Any]:
    """The quality, cost and speed of the model at the point, for JSON. Records them in the model's run."""
    from moe.cost import forward_gflops_2mac
    from orchestrator import storage
    from orchestrator.data.manifest import open_manifest
    from orchestrator.evaluation.evaluate import EvalTask, figures
    from orchestrator.evaluation.points import point_key, point_name
    from orchestrator.frontier.points import as_shown
    from orchestrator.runs.measurements import metric_name

    path, split = flags.on.path(model), flags.on.split
    outputs = labels_by_name(model, path, flags.classes)
    names = model.classes if outputs else None
    classes = names or open_manifest(path).classes
    drawn = [replace(point, subset_seed=seed) for seed in range(flags.random_subsets)]
    task = EvalTask(
        model=model,
        points=(point, *drawn),
        path=path,
        split=split,
        batch_size=flags.on.batch_size,
        results="",
        sharding=flags.by.sharding([model], flags.on),
        outputs=outputs,
    )
    found = task.on_model(figures, repeats=flags.repeats or 10)
    (scores, *random_scores), latency, answers = found.scores, found.latency, found.answers
    metrics = scores.metrics() | answers.metrics | found.further
    metrics |= {
        "forward_gflops_2mac": forward_gflops_2mac(model.run.model, point),
        "ms_per_image": latency.median,
    }
    quality = model.run.task.quality.removeprefix("val/")
    _, shown = as_shown(model.run.task.quality, metrics[quality])
    print(f"{model.name}: {shown:.4f} of {scores.images()} images", flush=True)
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
        "run": model.directory,
        "point": point_name(point),
        "data": path,
        "split": split,
        "dtype": flags.by.dtype,
        "images": scores.images(),
        "unread": scores.unread,
        "metrics": metrics,
        "latency": latency.summary(),
        "classes": scores.table(classes) | {n: each[: len(classes)] for n, each in answers.columns.items()},
        "calibration": answers.calibration,
        "notes": answers.notes,
    }
    confusion = None if answers.confusion_CC is None else answers.confusion_csv(model.classes or classes)
    if confusion and flags.out:
        report["confusion"] = (
            f"{storage.absolute(flags.out).removesuffix('.json')}.confusion-{metric_name(model.name)}.csv"
        )
        storage.write_bytes(report["confusion"], confusion.encode())
    if names := record.names(model, path):
        where = f"eval/{next(iter(names))}/{split}/step-{model.step}/{point_key(point)}"
        assert model.directory
        record.write(
            model.directory,
            {f"{where}/{name}": value for name, value in metrics.items()},
            tables={f"{where}/classes.json": report["classes"]},
            files={f"{where}/confusion.csv": confusion.encode()} if confusion else {},
            data=names,
            labels={"eval.latency": timing(report)},
        )
    return report


def timing(report: dict[str, Any]) -> str:
    """How the time of an image was measured."""
    timed = report["latency"]
    return f"batch {timed['batch']}, {timed['device']}, median of {timed['repeats']}"


def print_reports(reports: list[dict[str, Any]], *, per_class: bool) -> None:
    rows, costs = [], ("forward_gflops_2mac", "ms_per_image")
    every = dict.fromkeys(name for report in reports for name in report["metrics"])
    names = [n for n in every if n not in costs and not n.startswith("random_")]
    for report in reports:
        metrics = report["metrics"]
        unread = f" ({report['unread']} unread)" if report["unread"] else ""
        cells = (*(metrics.get(name, "-") for name in names), *(f"{metrics[name]:.4g}" for name in costs))
        rows.append((report["model"], f"{report['images']}{unread}", *cells))
    titles = [re.sub(r"(\d+)$", r"@\1", name) for name in names]
    columns = ("model", "images", *titles, "GFLOP/image", "ms/image")
    first = reports[0]
    title = f"{first['point']} on {first['data']}, {first['split']}; ms: {timing(first)}"
    print_table(columns, rows, title=title)
    for report in reports:
        for note in report["notes"]:
            print(f"{report['model']}: {note}")
    for report in reports if per_class else []:
        cells = zip(*report["classes"].values(), strict=True)
        rows = [["-" if cell is None else cell for cell in row] for row in cells]
        print_table(report["classes"], rows, title=f"{report['model']} by class")


if __name__ == "__main__":
    main()
