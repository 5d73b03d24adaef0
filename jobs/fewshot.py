"""Classify from a few images per class, on the frozen features of trained models.

  python jobs/fewshot.py soft
  python jobs/fewshot.py soft quickstart/trials/dense --data /data/flowers --data /data/pets --shots 1,5,10,25
  python jobs/fewshot.py sweep:quickstart models:/moe-frontier@pareto-knee --seeds 5

The train split of each data set gives the shots, its val split is tested. The same during training:
`--set train.fewshot={}` of train.py and pareto_sweep.py.
"""

import argparse
import time
from argparse import Namespace
from collections.abc import Sequence
from math import log2

from rich.table import Table

from jobs.command import add_places, tracking
from jobs.evaluation_flags import images_path, models_of, results_of
from jobs.show import print_table
from jobs.usage import command
from orchestrator.config import UsageError
from orchestrator.evaluation.fewshot import few_shot, short_of_images
from orchestrator.evaluation.images import device
from orchestrator.evaluation.trained import NAMES, Trained
from orchestrator.recipe import FewShotConfig
from orchestrator.tracking import Tracking
from orchestrator.tracking.store import shown
from orchestrator.training.fewshot import FewShotResult, short_names


def main() -> None:
    args = parser().parse_args()
    with command(), tracking(args, "fewshot") as store:
        results, unknown = {}, []
        shots = shots_of(args.shots)
        for model in models_of(args, store):
            config = config_of(args, model, shots)
            for name, path in short_names(config.paths).items():
                if not results and (few := short_of_images(model.run, path, shots)):
                    print(f"{name}: {few}", flush=True)
            result = few_shot(model, config, batch_size=args.batch_size, device=device())
            log(store, model, config.paths, result)
            unknown += [model.name] if model.run_id is None else []
            results[model.name] = result
            print(f"{model.name}: {summary(result)}", flush=True)
        print_results(results, seeds=args.seeds)
        if unknown:
            print(f"not recorded, for MLflow here does not know what trained them: {', '.join(unknown)}")
        if len(unknown) < len(results):
            where = "fewshot/<data>/step-<step>/acc_<n>shot and draws.json in each model's run"
            print(f"MLflow   {shown(store.uri)}: {where}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="+", help=NAMES)
    made.add_argument(
        "--data",
        action="append",
        default=[],
        help="shards, as for training (repeatable); default: those that the model was trained on",
    )
    made.add_argument("--shots", default="1,5,10,25", help="images per class (%(default)s)")
    made.add_argument("--seeds", type=int, default=3, help="how often they are drawn (%(default)s)")
    made.add_argument("--batch-size", type=int, default=64, help="images of a forward pass (%(default)s)")
    add_places(made)
    return made


def shots_of(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(shots) for shots in text.split(","))
    except ValueError:
        raise UsageError(f"--shots {text!r}: write numbers, e.g. 1,5,10,25") from None


def config_of(args: Namespace, model: Trained, shots: tuple[int, ...]) -> FewShotConfig:
    paths = [images_path(Namespace(**{**vars(args), "data": data}), model) for data in args.data or [None]]
    try:
        return FewShotConfig(paths=tuple(paths), shots=shots, seeds=args.seeds)
    except ValueError as error:
        raise UsageError(str(error)) from None


def log(store: Tracking, model: Trained, paths: Sequence[str], result: FewShotResult) -> None:
    """In the model's run; one that MLflow does not know is only printed. The place on the axis is the time of
    day, so that a later evaluation follows an earlier one.
    """
    if model.run_id is None:
        return
    sets = short_names(paths)
    run, names = results_of(store, model.run_id, *sets.values())
    for data, name in zip(names, sets, strict=True):
        where = f"fewshot/{data}/step-{model.step}"
        run.log_at(
            int(time.time()),
            {f"{where}/acc_{shots}shot": result.mean(shots, name) for shots in result.strength},
        )
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
