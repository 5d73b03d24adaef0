"""Accuracy from few images of each class, on frozen features: `evaluate.py --shots`."""

from __future__ import annotations

from functools import partial
from math import log2
from typing import TYPE_CHECKING

from jobs._cli import Evaluation, models_of, print_table
from jobs._record import Record
from jobs._sharded import Workers
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.training.fewshot import FewShotResult


def evaluate_shots(
    names: tuple[str, ...], shots: tuple[int, ...], on: Evaluation, by: Workers, *, seeds: int
) -> None:
    """Classifies from few images, records and prints, model by model."""
    models, results, record = models_of(names, on.places), {}, Record(on.places)
    for model in models:
        results[model.name] = result = classify(model, shots, on, by, record, seeds=seeds, first=not results)
        shown = "  ".join(f"{each}-shot {result.mean(each):.4f}" for each in result.strength)
        print(f"{model.name}: {shown}", flush=True)
    print(f"\naccuracy on frozen features, mean of {seeds} draws of the shots; L2 of the best mean rank")
    print_shots(results)
    record.send()


def classify(
    model: ModelRef,
    shots: tuple[int, ...],
    on: Evaluation,
    by: Workers,
    record: Record,
    *,
    seeds: int,
    first: bool,
) -> FewShotResult:
    """Classifies by one model, and records the result. For the first model, also prints the classes that have
    too few images.

    Raises:
        UsageError: for shots or data that cannot be used.
    """
    from orchestrator.config import FewShotConfig
    from orchestrator.training.fewshot import few_shots, rare_classes, short_names

    paths, batch_size = on.paths(model), on.batch_size
    try:
        config = FewShotConfig(paths=paths, shots=shots, seeds=seeds)
    except ValueError as error:
        raise UsageError(str(error)) from None
    sets = short_names(paths)
    for name, path in sets.items() if first else ():
        if few := rare_classes(model.run_on(path, batch_size=batch_size), max(shots)):
            print(f"{name}: {few}", flush=True)
    run = model.run_on(model.run.data.path, batch_size=batch_size)
    result = by.measure(model, partial(few_shots, run=run, config=config), on)
    record_shots(record, model, sets, result)
    return result


def record_shots(record: Record, model: ModelRef, sets: dict[str, str], result: FewShotResult) -> None:
    """Writes the result to the model's run."""
    metrics, tables, names = dict[str, float](), {}, record.names(model, *sets.values())
    for data, name in zip(names, sets, strict=bool(names)):
        where = f"fewshot/{data}/step-{model.step}"
        metrics |= {f"{where}/acc_{shots}shot": result.mean(shots, name) for shots in result.strength}
        rows = [
            (shots, seed, accuracy, strength)
            for shots, strength in result.strength.items()
            for seed, accuracy in enumerate(result.accuracy[name, shots])
        ]
        columns = ("shots", "seed", "accuracy", "l2")
        tables[f"{where}/draws.json"] = dict(zip(columns, zip(*rows, strict=True), strict=True))
    if names:
        assert model.directory
        record.write(model.directory, metrics, tables=tables, data=names)


def print_shots(results: dict[str, FewShotResult]) -> None:
    rows, shots = [], list(next(iter(results.values())).strength)
    for model, result in results.items():
        rows += [(model, name, *(result.mean(s, name) for s in shots)) for name in result.names()]
        if len(result.names()) > 1:
            rows.append((model, "mean", *(result.mean(s) for s in shots)))
        rows += [(model, "L2", *(f"2^{log2(result.strength[s]):.0f}" for s in shots)), ()]
    print_table(("model", "data", *(f"{s}-shot" for s in shots)), rows, left=2)
