"""Quality, cost and speed of models on a split, as trained or at another operating point."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

from moe.config import PositiveInt
from orchestrator.errors import UsageError
from orchestrator.evaluation.base import EvaluationConfig, EvaluationRequest, EvaluationResult, setting

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from orchestrator.checkpoint.models import ModelRef

POINT = (
    "operating point: routing.k=1, routing.capacity=0.3, routing.priority=none|max|sum, routing.experts=2"
    " (the best 2 of each group) or [0,5] (these), routing.images_per_group=1, routing.random_blocks=[1]"
)
CLASSES = (
    "find labels by names that data and model spell differently: a CSV with a row for each class, of its"
    " names in the data and in the model; `imagenet` comes with the project"
)


@dataclass(frozen=True, kw_only=True)
class ScoresConfig(EvaluationConfig):
    """quality, cost and speed, as trained or at another operating point: the default

    Figures are named eval/DATA/SPLIT/step-N/POINT/acc1 and so on; the table by class and the confusion matrix
    are beside them.
    """

    kind: Literal["scores"] = "scores"
    set: tuple[str, ...] = setting((), POINT, metavar="FIELD=VALUE", nargs="+")
    random_subsets: int = setting(
        0, "also evaluate this many random subsets of as many experts, as a baseline", metavar="N"
    )
    repeats: PositiveInt = setting(10, "timed forward passes of a full batch", metavar="N")
    classes: str | None = setting(None, CLASSES, metavar="FILE")
    per_class: bool = setting(False, "print the table by class")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.random_subsets == 1 or self.random_subsets < 0:
            raise ValueError(f"a deviation needs at least 2 random subsets, got {self.random_subsets}")

    def evaluate(self, on: EvaluationRequest) -> Iterator[EvaluationResult]:
        """Evaluates every model that can run at the point. A model that fails is named at the end."""
        from orchestrator.evaluation.points import parse_point

        point, reports, failures = parse_point(self.set), [], []
        if self.random_subsets and not isinstance(point.experts, int):
            raise UsageError("`random_subsets` draws as many experts as a NUMBER in routing.experts says")
        models = possible_at(point, on)
        for model in models:
            try:
                found = self.of_model(model, point, on)
            except UsageError as error:
                failures.append(f"{model.name}: {error}" if len(models) > 1 else str(error))
            else:
                reports.append(found.report)
                yield found
        if reports:
            show(reports, on, per_class=self.per_class)
        if failures:
            raise UsageError("; ".join(failures))

    def of_model(self, model: ModelRef, point: RoutingOverrides, on: EvaluationRequest) -> EvaluationResult:
        """Returns the quality, cost and speed of the model at the point."""
        from moe.cost import forward_gflops_2mac
        from orchestrator.data.manifest import open_manifest
        from orchestrator.evaluation.evaluate import EvalTask, figures
        from orchestrator.evaluation.points import point_key, point_name
        from orchestrator.frontier.points import as_shown

        path = on.path(model)
        outputs = labels_by_name(model, path, self.classes)
        names = model.classes if outputs else None
        classes = names or open_manifest(path).classes
        drawn = [replace(point, subset_seed=seed) for seed in range(self.random_subsets)]
        task = EvalTask(
            model=model,
            points=(point, *drawn),
            path=path,
            split=on.split,
            batch_size=on.batch_size,
            results="",
            sharding=on.sharding([model]),
            outputs=outputs,
        )
        found = task.on_model(figures, repeats=self.repeats)
        (scores, *random_scores), latency, answers = found.scores, found.latency, found.answers
        metrics = scores.metrics() | answers.metrics | found.further
        metrics |= {
            "forward_gflops_2mac": forward_gflops_2mac(model.run.model, point),
            "ms_per_image": latency.median,
        }
        quality = model.run.task.quality.removeprefix("val/")
        _, shown = as_shown(model.run.task.quality, metrics[quality])
        on.say(f"{model.name}: {shown:.4f} of {scores.images()} images")
        if drawn:
            accuracies = [each.metrics()[quality] for each in random_scores]
            mean, deviation = fmean(accuracies), stdev(accuracies)
            metrics |= {f"random_{quality}": mean, f"random_{quality}_std": deviation}
            if deviation:
                # Implicit Bias in Soft MoE, section 4.4.2.
                metrics["random_z"] = (metrics[quality] - mean) / deviation
            z = f", z = {metrics['random_z']:.1f}" if deviation else ""
            on.say(
                f"  {len(drawn)} random subsets of {point.experts} experts: mean {mean:.4f}, standard"
                f" deviation {deviation:.4f}{z}"
            )
        report = {
            "model": model.name,
            "location": model.location,
            "step": model.step,
            "run": model.directory,
            "point": point_name(point),
            "data": path,
            "split": on.split,
            "dtype": on.dtype,
            "images": scores.images(),
            "unread": scores.unread,
            "metrics": metrics,
            "latency": latency.summary(),
            "classes": scores.table(classes)
            | {n: each[: len(classes)] for n, each in answers.columns.items()},
            "calibration": answers.calibration,
            "notes": answers.notes,
        }
        confused = answers.confusion_CC is not None
        return EvaluationResult(
            model=model,
            paths=(path,),
            where=f"eval/{{0}}/{on.split}/step-{model.step}/{point_key(point)}",
            metrics=metrics,
            tables={"classes.json": report["classes"]},
            files={"confusion.csv": answers.confusion_csv(model.classes or classes).encode()}
            if confused
            else {},
            labels={"eval.latency": timing(report)},
            report=report,
        )


def possible_at(point: RoutingOverrides, on: EvaluationRequest) -> list[ModelRef]:
    """Returns the models that can run at the point, in such batches; names the others. Raises UsageError if
    no model can.
    """
    from orchestrator.evaluation.points import why_impossible

    models = without_refused(on.models, lambda model: why_impossible(model.run.model, point), on)
    models = [model.in_groups(point.images_per_group) for model in models]
    return without_refused(models, lambda model: why_not_in(model, on.batch_size), on)


def without_refused(
    models: Sequence[ModelRef], why_not: Callable[[ModelRef], str | None], on: EvaluationRequest
) -> list[ModelRef]:
    """Returns the models without those that have a reason why not, which it names. Raises UsageError if all
    have.
    """
    reasons = [why_not(model) for model in models]
    refused = [f"{model.name}: {why}" for model, why in zip(models, reasons, strict=True) if why]
    if len(refused) == len(models):
        raise UsageError("; ".join(refused))
    for reason in refused:
        on.say(f"left out {reason}")
    return [model for model, why in zip(models, reasons, strict=True) if not why]


def why_not_in(model: ModelRef, batch_size: int) -> str | None:
    """Returns the reason why a model cannot run in batches of this size; None if it can."""
    together = model.run.model.images_per_group
    if batch_size % together == 0:
        return None
    return (
        f"`batch_size` {batch_size}: it routes {together} images together, and needs a multiple of"
        f" {together}; routing.images_per_group=1 routes each by itself"
    )


def labels_by_name(model: ModelRef, path: str, classes: str | None) -> tuple[int, ...] | None:
    """Returns the output of the model for each label of the data by the names of a file. Without, labels are
    those outputs, and None. Raises UsageError if labels do not mean what the model learned.
    """
    from orchestrator.evaluation.spellings import outputs_of_labels

    if classes is not None:
        return outputs_of_labels(model, path, classes)
    model.check_classes(path)
    return None


def timing(report: dict[str, Any]) -> str:
    """Returns how the time of an image was measured."""
    timed = report["latency"]
    return f"batch {timed['batch']}, {timed['device']}, median of {timed['repeats']}"


def show(reports: list[dict[str, Any]], on: EvaluationRequest, *, per_class: bool) -> None:
    """Prints a table of all models, notes, and the tables by class."""
    from orchestrator.costs import FORWARD
    from orchestrator.units import number, unit_of

    forward = unit_of(FORWARD, [report["metrics"]["forward_gflops_2mac"] for report in reports])
    rows, costs = [], {"forward_gflops_2mac": forward.size, "ms_per_image": 1.0}
    every = dict.fromkeys(name for report in reports for name in report["metrics"])
    names = [n for n in every if n not in costs and not n.startswith("random_")]
    for report in reports:
        metrics = report["metrics"]
        unread = f" ({report['unread']} unread)" if report["unread"] else ""
        shown = (number(metrics[name] / size) for name, size in costs.items())
        cells = (*(metrics.get(name, "-") for name in names), *shown)
        rows.append((report["model"], f"{report['images']}{unread}", *cells))
    titles = [re.sub(r"(\d+)$", r"@\1", name) for name in names]
    first = reports[0]
    title = f"{first['point']} on {first['data']}, {first['split']}; ms: {timing(first)}"
    on.table(("model", "images", *titles, f"{forward.symbol}/image", "ms/image"), rows, title=title)
    for report in reports:
        for note in report["notes"]:
            on.say(f"{report['model']}: {note}")
    for report in reports if per_class else []:
        show_classes(report, on)


def show_classes(report: dict[str, Any], on: EvaluationRequest) -> None:
    """Prints the table by class of a report."""
    cells = zip(*report["classes"].values(), strict=True)
    rows = [["-" if cell is None else cell for cell in row] for row in cells]
    on.table(report["classes"], rows, title=f"{report['model']} by class")
