"""Classify from a few images per class, on the frozen features of trained models.

  python jobs/fewshot.py soft
  python jobs/fewshot.py soft quickstart/trials/dense --data /data/flowers --data /data/pets --shots 1,5,10,25
  python jobs/fewshot.py sweep:quickstart models:/moe-frontier@pareto-knee --seeds 5

The train split of each data set gives the shots, its val split is tested. The same during training:
`--set train.fewshot={}` of train.py and pareto_sweep.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from math import log2
from typing import TYPE_CHECKING

from jobs.usage import MODELS, add_places, at_least_one, command, named, plain_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.evaluation.models import ModelRef
    from orchestrator.recipe import FewShotConfig
    from orchestrator.tracking.store import Tracking
    from orchestrator.training.fewshot import FewShotResult


def main() -> None:
    args = parser().parse_args()
    with command(f"few-shot classification by {named(args.model)}"):
        classify(args)


def parser() -> argparse.ArgumentParser:
    made = plain_parser(__doc__)
    made.add_argument("model", nargs="+", help=MODELS)
    made.add_argument(
        "--data",
        action="append",
        default=[],
        help="shards, as for training (repeatable); default: the shards that the model was trained on",
    )
    made.add_argument("--shots", default="1,5,10,25", help="images per class (%(default)s)")
    made.add_argument("--seeds", type=int, default=3, help="draws of the shots (%(default)s)")
    made.add_argument(
        "--batch-size", type=at_least_one, default=64, help="images per forward pass (%(default)s)"
    )
    add_places(made)
    return made


def classify(args: argparse.Namespace) -> None:
    """Classifies, records and prints, model by model."""
    from jobs.command import open_store
    from jobs.evaluation_flags import models_of
    from orchestrator.evaluation.evaluate import default_device
    from orchestrator.tracking.store import redact_uri
    from orchestrator.training.fewshot import FewShot, rare_classes, short_names

    shots, results, unknown = shots_of(args.shots), {}, []
    store = open_store(args)
    for model in models_of(args, store):
        config = config_of(args, model, shots)
        sets = short_names(config.paths)
        for name, path in sets.items():
            run = model.run_on(path, batch_size=args.batch_size)
            if not results and (few := rare_classes(run, max(shots))):
                print(f"{name}: {few}", flush=True)
        run = model.run_on(model.run.data.path, batch_size=args.batch_size)
        result = FewShot(run, config).measure(model.load(default_device()), default_device())
        if model.run_id is None:
            unknown.append(model.name)
        else:
            log(store, model.run_id, model.step, sets, result)
        results[model.name] = result
        print(f"{model.name}: {summary(result)}", flush=True)
    print_results(results, seeds=args.seeds)
    if unknown:
        print(f"not recorded, because MLflow does not know the runs that trained them: {', '.join(unknown)}")
    if len(unknown) < len(results):
        where = "fewshot/<data>/step-<step>/acc_<n>shot and draws.json in each model's run"
        print(f"MLflow   {redact_uri(store.uri)}: {where}")


def shots_of(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(shots) for shots in text.split(","))
    except ValueError:
        raise UsageError(f"--shots {text!r}: write numbers, e.g. 1,5,10,25") from None


def config_of(args: argparse.Namespace, model: ModelRef, shots: tuple[int, ...]) -> FewShotConfig:
    from jobs.evaluation_flags import images_path
    from orchestrator.recipe import FewShotConfig

    paths = tuple(images_path(args, model, data) for data in args.data) or (model.run.data.path,)
    try:
        return FewShotConfig(paths=paths, shots=shots, seeds=args.seeds)
    except ValueError as error:
        raise UsageError(str(error)) from None


def log(store: Tracking, run_id: str, step: int, sets: Mapping[str, str], result: FewShotResult) -> None:
    """Writes the result to the model's MLflow run. The time of day is its step, so that a later evaluation
    follows an earlier one.
    """
    from jobs.evaluation_flags import results_of

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


def summary(result: FewShotResult) -> str:
    return "  ".join(f"{shots}-shot {result.mean(shots):.4f}" for shots in result.strength)


def print_results(results: dict[str, FewShotResult], *, seeds: int) -> None:
    from rich.table import Table

    from jobs.show import print_table

    print(f"\naccuracy on frozen features, mean of {seeds} draws of the shots; L2 of the best mean rank")
    table = Table()
    for column in ("model", "data"):
        table.add_column(column, overflow="fold")
    first = next(iter(results.values()))
    for shots in first.strength:
        table.add_column(f"{shots}-shot", justify="right")
    for model, result in results.items():
        for name in result.names():
            table.add_row(model, name, *(f"{result.mean(shots, name):.4f}" for shots in result.strength))
        if len(result.names()) > 1:
            table.add_row(model, "mean", *(f"{result.mean(shots):.4f}" for shots in result.strength))
        powers = (f"2^{log2(strength):.0f}" for strength in result.strength.values())
        table.add_row(model, "L2", *powers, end_section=True)
    print_table(table)


if __name__ == "__main__":
    main()
