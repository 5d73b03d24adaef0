"""Look into the routers of a trained model: what they follow, what they discard, how much they matter.

  python jobs/inspect_routing.py soft                               a run below the storage
  python jobs/inspect_routing.py models:/moe-frontier@pareto-knee --data /data/flowers-shards --split train
  python jobs/inspect_routing.py tc --capacities 0.05,0.1,0.3 --examples 12 --layers 5 --out /tmp/tc

Prints a row per MoE layer. Below --out lie routing.html, one page that needs nothing else, its pictures and
the tables behind them; all of it goes to the model's MLflow run too, below `routing`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from jobs.usage import at_least_one, command, evaluation_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from experiments.routing_analysis.report import Table
    from orchestrator.data.batch import Batch
    from orchestrator.evaluation.models import ModelRef
    from orchestrator.tracking.find import RunWriter

FOLDER = "routing"  # of the storage, and of the model's MLflow run
PAGE = "routing.html"
PROGRESS_S = 5.0


def main() -> None:
    args = parser().parse_args()
    with command(f"looking into the routers of {args.model}"):
        inspect(args)


def parser() -> argparse.ArgumentParser:
    parser = evaluation_parser(__doc__, several=False)
    parser.add_argument("--images", type=at_least_one, help="measure this many; default: all of the split")
    parser.add_argument("--examples", type=at_least_one, default=8, help="images to draw on (%(default)s)")
    parser.add_argument("--layers", help="MoE blocks to look at, e.g. 1,3; default: all")
    parser.add_argument(
        "--capacities",
        default="0.1,0.2,0.4,0.8",
        help="capacity factors whose discarded patches are drawn (%(default)s)",
    )
    parser.add_argument("--out", help="directory or URI; default: routing/MODEL below the storage")
    return parser


def inspect(args: argparse.Namespace) -> None:
    """Measures, draws, and reports below --out and in the model's MLflow run.

    Raises:
        UsageError: for flags that do not fit the model, and a --out that holds other files.
    """
    from jobs.command import check_out, open_store, root
    from jobs.evaluation_flags import images_path, models_of, results_of
    from orchestrator import storage
    from orchestrator.data.manifest import open_manifest

    store = open_store(args)
    (trained,) = models_of(args, store)
    path = images_path(args, trained)
    out = storage.join(root(args), FOLDER, trained.name.replace("/", "-"))
    if args.out:
        out = storage.absolute(args.out).rstrip("/")
        check_out(out, own=(PAGE,), apart=(path,))
    blocks = blocks_of(trained, args.layers)
    trained.check_classes(path)
    names = open_manifest(path).classes
    html, pictures, tables = analyse(args, trained, blocks, path, names)
    storage.make_folder(out)
    storage.write_bytes(storage.join(out, PAGE), html.encode())
    for name, content in pictures.items():
        storage.write_bytes(storage.join(out, name), content)
    for name, table in tables.items():
        storage.write_bytes(storage.join(out, f"{name}.json"), json.dumps(table).encode())
    print(f"{storage.join(out, PAGE)}: {len(pictures)} pictures, {len(tables)} tables beside it")
    if trained.run_id:
        run, (data,) = results_of(store, trained.run_id, path)
        folder = f"{FOLDER}/{data}/step-{trained.step}"
        log(run, folder, html, pictures, tables)
        print(f"MLflow run {trained.run_id}: artifacts below {folder}")
    else:
        print("MLflow has no run of this model: nothing is logged there")


def blocks_of(trained: ModelRef, asked: str | None) -> list[int]:
    """The MoE blocks of --layers. Raises UsageError for other blocks, and for a dense model."""
    blocks = trained.run.model.moe_blocks()
    if not blocks:
        raise UsageError(f"{trained.name} is a dense model: it has no routers to look into")
    chosen = numbers("--layers", asked) if asked else blocks
    if wrong := [f"{block:g}" for block in chosen if block not in blocks]:
        raise UsageError(
            f"--layers {asked}: {', '.join(wrong)} are not MoE blocks; those of {trained.name} are {blocks}"
        )
    return sorted({int(block) for block in chosen})


def numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError:
        raise UsageError(f"{flag} {text}: write numbers with commas between them") from None


def analyse(
    args: argparse.Namespace, trained: ModelRef, blocks: list[int], path: str, names: tuple[str, ...]
) -> tuple[str, dict[str, bytes], dict[str, Table]]:
    """The page, its pictures by file name, and the tables behind them by name. Prints a row per layer."""
    from experiments.routing_analysis import report
    from experiments.routing_analysis.collect import collect
    from experiments.routing_analysis.examples import capacity_settings, discards, examples
    from orchestrator.data.manifest import open_manifest
    from orchestrator.evaluation.evaluate import default_device, images_of

    model = trained.load(default_device())
    moe = trained.run.model.moe
    assert moe
    settings, refused = [], []
    if discards(moe.router):
        capacities = numbers("--capacities", args.capacities)
        if not all(0 < capacity < math.inf for capacity in capacities):
            raise UsageError(f"--capacities {args.capacities}: each must be above 0")
        settings, refused = capacity_settings(model.config, capacities)
    for reason in refused:
        print(f"not drawn: {reason}")

    rows = open_manifest(path).rows(args.split)
    total = min(args.images or rows, rows)
    batches = first_images(
        images_of(trained, path=path, split=args.split, batch_size=args.batch_size, device=default_device()),
        total,
    )
    first = next(batches)
    drawn = examples(model, first, count=args.examples, blocks=blocks, settings=settings)
    layers = collect(
        model, chain([first], batches), blocks=blocks, classes=len(names), progress=progress(total)
    )

    table = report.layer_table(layers)
    counts = layers[blocks[0]]
    accuracy = float(counts.correct / counts.images)
    print(f"{int(counts.images)} images, accuracy {accuracy:.4f} as trained")
    print("  ".join(table))
    for row in zip(*table.values(), strict=True):
        print("  ".join(f"{cell:>{len(name)}.4g}" for cell, name in zip(row, table, strict=True)))
    facts = (
        f"{moe.router.kind.replace('_', ' ').capitalize()} router, {moe.num_experts} experts, step"
        f" {trained.step}. {int(counts.images)} images of {path} ({args.split}); accuracy {accuracy:.4f}."
    )
    parts = list(report.sections(layers, drawn, model.config, names))
    pictures = {f"{name}.png": content for part in parts for name, content in part[2].items()}
    html = report.page(f"Routers of {trained.name}", facts, table, parts)
    return html, pictures, {"layers": table, "figures": report.figure_table(layers, drawn, names)}


def first_images(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The first `count` images; the rest of their last batch counts as padding."""
    for batch in batches:
        places = batch.valid.cumsum(0)
        yield batch._replace(valid=batch.valid * (places <= count))
        count -= int(batch.valid.sum())
        if count <= 0:
            return


def progress(total: int) -> Callable[[int], None]:
    """A function that prints how many images are done, every few seconds."""
    next_s = time.monotonic() + PROGRESS_S

    def report(images: int) -> None:
        nonlocal next_s
        if time.monotonic() > next_s:
            print(f"{images}/{total} images", flush=True)
            next_s = time.monotonic() + PROGRESS_S

    return report


def log(run: RunWriter, folder: str, html: str, pictures: dict[str, bytes], tables: dict[str, Table]) -> None:
    run.write_text(f"{folder}/{PAGE}", html)
    for name, table in tables.items():
        run.write_table(f"{folder}/{name}.json", table)
    with TemporaryDirectory() as scratch:
        for name, content in pictures.items():
            file = Path(scratch) / name
            file.write_bytes(content)
            run.write_file(file, folder=folder)


if __name__ == "__main__":
    main()
