"""Accuracy from few images of each class, on frozen features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import TYPE_CHECKING, Literal

from moe.config import PositiveInt
from orchestrator.errors import UsageError
from orchestrator.evaluation.base import EvaluationConfig, EvaluationRequest, EvaluationResult, setting

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.training.fewshot import FewShotResult


@dataclass(frozen=True, kw_only=True)
class ShotsConfig(EvaluationConfig):
    """accuracy from few images of each class, on frozen features

      evaluate soft --shots 1,5 --data /data/flowers --data /data/pets --seeds 5

    A linear classifier is fitted: the train split of each data set gives the shots, and its val split is
    tested. To measure it during training, use `--set train.fewshot={}` there.
    """

    kind: Literal["shots"] = "shots"
    shots: tuple[int, ...] = setting(
        (1, 5, 10, 25),
        "classify from so many images per class, of one or several data sets",
        metavar="N,N",
    )
    seeds: PositiveInt = setting(3, "draws of the shots")

    def evaluate(self, on: EvaluationRequest) -> Iterator[EvaluationResult]:
        """Classifies from few images, model by model; names classes that have too few."""
        from orchestrator.config import FewShotConfig
        from orchestrator.training.fewshot import few_shots, rare_classes, short_names

        if on.split != "val":
            raise UsageError("`split` does nothing with `shots`: train gives the shots, val is tested")
        results: dict[str, FewShotResult] = {}
        for model in on.models:
            paths, batch_size = on.paths(model), on.batch_size
            try:
                config = FewShotConfig(paths=paths, shots=self.shots, seeds=self.seeds)
            except ValueError as error:
                raise UsageError(str(error)) from None
            sets = short_names(paths)
            for name, path in () if results else sets.items():
                if few := rare_classes(model.run_on(path, batch_size=batch_size), max(self.shots)):
                    on.say(f"{name}: {few}")
            run = model.run_on(model.run.data.path, batch_size=batch_size)
            result = on.measure(model, partial(few_shots, run=run, config=config))
            results[model.name] = result
            shown = "  ".join(f"{each}-shot {result.mean(each):.4f}" for each in result.strength)
            on.say(f"{model.name}: {shown}")
            yield recorded(model, sets, result)
        on.say(
            f"\naccuracy on frozen features, mean of {self.seeds} draws of the shots; L2 of the best mean"
            " rank"
        )
        rows, shots = [], list(next(iter(results.values())).strength)
        for model, result in results.items():
            rows += [(model, name, *(result.mean(s, name) for s in shots)) for name in result.names()]
            if len(result.names()) > 1:
                rows.append((model, "mean", *(result.mean(s) for s in shots)))
            rows += [(model, "L2", *(f"2^{log2(result.strength[s]):.0f}" for s in shots)), ()]
        on.table(("model", "data", *(f"{s}-shot" for s in shots)), rows, left=2)


def recorded(model: ModelRef, sets: dict[str, str], result: FewShotResult) -> EvaluationResult:
    """Returns the accuracies on each data set, and a table of all draws."""
    metrics, tables = dict[str, float](), {}
    for place, name in enumerate(sets):
        where = f"{{{place}}}/step-{model.step}"
        metrics |= {f"{where}/acc_{shots}shot": result.mean(shots, name) for shots in result.strength}
        rows = [
            (shots, seed, accuracy, strength)
            for shots, strength in result.strength.items()
            for seed, accuracy in enumerate(result.accuracy[name, shots])
        ]
        columns = ("shots", "seed", "accuracy", "l2")
        tables[f"{where}/draws.json"] = dict(zip(columns, zip(*rows, strict=True), strict=True))
    means = {f"{name}/{s}": result.mean(s, name) for name in sets for s in result.strength}
    report = {"model": model.name, "run": model.directory, "data": sets, "metrics": means}
    return EvaluationResult(
        model=model, paths=(*sets.values(),), where="fewshot", metrics=metrics, tables=tables, report=report
    )
