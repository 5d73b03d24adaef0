"""Classify from a few images per class, on the frozen features of trained models.

  python jobs/fewshot.py soft
  python jobs/fewshot.py soft quickstart/trials/w16-dense-seed0 --data /data/flowers --shots 1,5
  python jobs/fewshot.py sweep:quickstart models:/quickstart@pareto-knee --seeds 5

The train split of each data set gives the shots, and its val split is tested. To measure it during training,
use `--set train.fewshot={}` with train.py or pareto_sweep.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

from jobs._cli import Places, command, models_of, named, print_table, print_unrecorded, results_of
from jobs._flags import MODELS, flag, numbers, parse

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.tracking.store import Tracking
    from orchestrator.training.fewshot import FewShotResult


@dataclass(frozen=True, kw_only=True)
class FewShotFlags:
    model: tuple[str, ...] = flag(help=MODELS, positional=True, nargs="+")
    data: tuple[str, ...] = flag(
        (), "shards, as for training (repeatable); default: the shards that the model was trained on"
    )
    shots: tuple[int, ...] = flag("1,5,10,25", "images per class", read=numbers(int, "1,5,10,25"))
    seeds: int = flag(3, "draws of the shots", least=1)
    batch_size: int = flag(64, "images per forward pass", least=1)
    places: Places


def main() -> None:
    flags = parse(FewShotFlags, __doc__)
    with command(f"few-shot classification by {named(flags.model)}", flags.places):
        classify(flags)


def classify(flags: FewShotFlags) -> None:
    """Classifies, records and prints, model by model."""
    from orchestrator.tracking.store import redact_uri

    store = flags.places.open_store()
    models, results = models_of(flags.model, flags.places, store), {}
    for model in models:
        results[model.name] = result = measured(flags, model, store, first=not results)
        shown = "  ".join(f"{shots}-shot {result.mean(shots):.4f}" for shots in result.strength)
        print(f"{model.name}: {shown}", flush=True)
    print(
        f"\naccuracy on frozen features, mean of {flags.seeds} draws of the shots; L2 of the best mean rank"
    )
    print_results(results)
    unknown = [model.name for model in models if model.run_id is None]
    print_unrecorded(unknown)
    if len(unknown) < len(models):
        where = "fewshot/<data>/step-<step>/acc_<n>shot and draws.json in each model's run"
        print(f"MLflow   {redact_uri(store.uri)}: {where}")


def measured(flags: FewShotFlags, model: ModelRef, store: Tracking, *, first: bool) -> FewShotResult:
    """Classifies by one model, and writes the result to its MLflow run. For the first model, also prints the
    classes that have too few images.

    Raises:
        UsageError: for shots or data that cannot be used.
    """
    from orchestrator.config import FewShotConfig
    from orchestrator.errors import UsageError
    from orchestrator.evaluation.evaluate import default_device
    from orchestrator.training.fewshot import FewShot, rare_classes, short_names

    paths = tuple(flags.places.shards(data) for data in flags.data) or (model.run.data.path,)
    try:
        config = FewShotConfig(paths=paths, shots=flags.shots, seeds=flags.seeds)
    except ValueError as error:
        raise UsageError(str(error)) from None
    sets = short_names(paths)
    for name, path in sets.items() if first else ():
        if few := rare_classes(model.run_on(path, batch_size=flags.batch_size), max(flags.shots)):
            print(f"{name}: {few}", flush=True)
    run = model.run_on(model.run.data.path, batch_size=flags.batch_size)
    result = FewShot(run, config).measure(model.load(default_device()), default_device())
    if model.run_id:
        record(store, model.run_id, model.step, sets, result)
    return result


def record(store: Tracking, run_id: str, step: int, sets: dict[str, str], result: FewShotResult) -> None:
    """Writes the result to the model's MLflow run. The time of day is its step, so that a later evaluation
    follows an earlier one.
    """
    run, names = results_of(store, run_id, *sets.values())
    for data, name in zip(names, sets, strict=True):
        where = f"fewshot/{data}/step-{step}"
        run.log({f"{where}/acc_{shots}shot": result.mean(shots, name) for shots in result.strength})
        rows = [
            (shots, seed, accuracy, strength)
            for shots, strength in result.strength.items()
            for seed, accuracy in enumerate(result.accuracy[name, shots])
        ]
        columns = ("shots", "seed", "accuracy", "l2")
        run.write_table(f"{where}/draws.json", dict(zip(columns, zip(*rows, strict=True), strict=True)))


def print_results(results: dict[str, FewShotResult]) -> None:
    rows, shots = [], list(next(iter(results.values())).strength)
    for model, result in results.items():
        rows += [(model, name, *(result.mean(s, name) for s in shots)) for name in result.names()]
        if len(result.names()) > 1:
            rows.append((model, "mean", *(result.mean(s) for s in shots)))
        rows += [(model, "L2", *(f"2^{log2(result.strength[s]):.0f}" for s in shots)), ()]
    print_table(("model", "data", *(f"{s}-shot" for s in shots)), rows, left=2)


if __name__ == "__main__":
    main()
