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
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from jobs.usage import at_least_one, command, evaluation_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from moe.vit import ViT
    from orchestrator.data.batch import Batch
    from orchestrator.evaluation.microscope.examples import Examples
    from orchestrator.evaluation.microscope.survey import Survey
    from orchestrator.evaluation.microscope.tables import Table
    from orchestrator.evaluation.trained import Trained
    from orchestrator.tracking import TrackedRun

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
    from jobs.command import check_out, root, tracking
    from jobs.evaluation_flags import images_path, models_of, results_of, tell_other_classes
    from orchestrator import storage
    from orchestrator.evaluation.images import device

    with tracking(args, FOLDER) as store:
        (trained,) = models_of(args, store)
        path = images_path(args, trained)
        out = storage.join(root(args), FOLDER, trained.name.replace("/", "-"))
        if args.out:
            out = storage.absolute(args.out).rstrip("/")
            check_out(out, own=(PAGE,), apart=(path,))
        blocks = blocks_of(trained, args.layers)
        names = tell_other_classes(trained, path).names
        model = trained.load(device())
        found, drawn = look(args, trained, model, blocks=blocks, path=path, classes=len(names))
        print_layers(found)
        html, pictures, figures = drawings(args, trained, model, found, drawn, names, path)
        storage.make_folder(out)
        storage.write_bytes(storage.join(out, PAGE), html.encode())
        for name, content in pictures.items():
            storage.write_bytes(storage.join(out, name), content)
        for name, table in figures.items():
            storage.write_bytes(storage.join(out, f"{name}.json"), json.dumps(table).encode())
        print(f"{storage.join(out, PAGE)}: {len(pictures)} pictures, {len(figures)} tables beside it")
        if trained.run_id:
            run, (data,) = results_of(store, trained.run_id, path)
            folder = f"{FOLDER}/{data}/step-{trained.step}"
            log(run, folder, html, pictures, figures)
            print(f"MLflow run {trained.run_id}: artifacts below {folder}")
        else:
            print("MLflow knows no run of this model: nothing is logged there")


def blocks_of(trained: Trained, asked: str | None) -> list[int]:
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


def look(
    args: argparse.Namespace, trained: Trained, model: ViT, *, blocks: list[int], path: str, classes: int
) -> tuple[Survey, Examples]:
    """The measurements, and the images that are drawn on."""
    from orchestrator.data.manifest import open_manifest
    from orchestrator.evaluation.images import device, images_of
    from orchestrator.evaluation.microscope.discarded import drops, settings
    from orchestrator.evaluation.microscope.examples import examples
    from orchestrator.evaluation.microscope.survey import survey

    points: list[RoutingOverrides] = []
    refused: list[str] = []
    if drops(trained.run.model.moe and trained.run.model.moe.router):
        capacities = numbers("--capacities", args.capacities)
        if not all(0 < capacity < math.inf for capacity in capacities):
            raise UsageError(f"--capacities {args.capacities}: each must be above 0")
        points, refused = settings(model, capacities)
    for reason in refused:
        print(f"not drawn: {reason}")
    rows = open_manifest(path).rows(args.split)
    total = min(args.images or rows, rows)
    batches = first_images(
        images_of(trained, path=path, split=args.split, batch_size=args.batch_size, device=device()), total
    )
    first = next(batches)
    drawn = examples(model, first, count=args.examples, blocks=blocks, points=points)
    every = chain([first], batches)
    return survey(model, every, blocks=blocks, classes=classes, report=Progress(total)), drawn


def first_images(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The first `count` images; the rest of their last batch counts as padding."""
    for batch in batches:
        places = batch.valid.cumsum(0)
        yield batch._replace(valid=batch.valid * (places <= count))
        count -= int(batch.valid.sum())
        if count <= 0:
            return


class Progress:
    """Prints how many images are done, every few seconds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.next_s = time.monotonic() + PROGRESS_S

    def __call__(self, images: int) -> None:
        if time.monotonic() > self.next_s:
            print(f"{images}/{self.total} images", flush=True)
            self.next_s = time.monotonic() + PROGRESS_S


def print_layers(found: Survey) -> None:
    from orchestrator.evaluation.microscope.tables import layer_table
    from orchestrator.frontier.style import detail

    table = layer_table(found)
    print(f"{found.images} images, accuracy {found.acc:.4f} as trained")
    print("  ".join(table))
    for row in zip(*table.values(), strict=True):
        print("  ".join(f"{detail(cell):>{len(name)}}" for name, cell in zip(table, row, strict=True)))


def drawings(
    args: argparse.Namespace,
    trained: Trained,
    model: ViT,
    found: Survey,
    drawn: Examples,
    names: tuple[str, ...],
    path: str,
) -> tuple[str, dict[str, bytes], dict[str, Table]]:
    """The page, its pictures by file name, and the tables behind them by name."""
    from orchestrator.evaluation.microscope.page import page, png
    from orchestrator.evaluation.microscope.sections import sections
    from orchestrator.evaluation.microscope.tables import layer_table, tables

    parts, pictures = [], {}
    for section in sections(found, drawn, model.config, names):
        contents = {name: png(figure) for name, figure in section.pictures.items()}
        parts.append((section.title, section.text, contents))
        pictures |= {f"{name}.png": content for name, content in contents.items()}
    moe = trained.run.model.moe
    assert moe
    facts = (
        f"{moe.router.kind.replace('_', ' ').capitalize()} router, {moe.num_experts} experts, step"
        f" {trained.step}. {found.images} images of {path} ({args.split}); accuracy {found.acc:.4f}."
    )
    html = page(f"Routers of {trained.name}", facts, layer_table(found), parts)
    return html, pictures, tables(found, drawn, names)


def log(
    run: TrackedRun,
    folder: str,
    html: str,
    pictures: dict[str, bytes],
    figures: dict[str, Table],
) -> None:
    run.write_text(f"{folder}/{PAGE}", html)
    for name, table in figures.items():
        run.write_table(f"{folder}/{name}.json", table)
    with TemporaryDirectory() as scratch:
        for name, content in pictures.items():
            file = Path(scratch) / name
            file.write_bytes(content)
            run.write_file(file, folder=folder)


if __name__ == "__main__":
    main()
