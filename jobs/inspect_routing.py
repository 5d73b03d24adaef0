"""Look into the routers of a trained model: what they follow, what they discard, what they are good for.

  python jobs/inspect_routing.py soft                               a run below the storage
  python jobs/inspect_routing.py models:/moe-frontier@pareto-knee --data /data/flowers-shards --split train
  python jobs/inspect_routing.py tc --capacities 0.05,0.1,0.3 --examples 12 --layers 5 --out /tmp/tc

Prints a row per MoE layer. Below --out lie routing.html, one page that needs nothing else, its pictures and
the tables behind them; all of it goes to the model's MLflow run too, below `routing`.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.command import tracking
from jobs.evaluation_flags import (
    evaluation_parser,
    images_path,
    models_of,
    results_of,
    tell_other_classes,
)
from jobs.usage import command
from moe.vit import ViT
from orchestrator import storage
from orchestrator.config import UsageError
from orchestrator.data.manifest import open_manifest
from orchestrator.data.stream import Batch
from orchestrator.evaluation.images import device, images_of
from orchestrator.evaluation.microscope.discarded import CAPACITIES, drops, settings
from orchestrator.evaluation.microscope.examples import Examples, examples
from orchestrator.evaluation.microscope.page import page, png
from orchestrator.evaluation.microscope.sections import sections
from orchestrator.evaluation.microscope.survey import Survey, survey
from orchestrator.evaluation.microscope.tables import Table, layer_table, tables
from orchestrator.evaluation.trained import Trained
from orchestrator.frontier.style import detail
from orchestrator.tracking import TrackedRun, Tracking

FOLDER = "routing"  # of the model's MLflow run
PAGE = "routing.html"
PROGRESS_S = 5.0


def parser() -> argparse.ArgumentParser:
    parser = evaluation_parser(__doc__, several=False)
    parser.add_argument("--images", type=int, help="measure this many; default: all of the split")
    parser.add_argument("--examples", type=int, default=8, help="images to draw on (%(default)s)")
    parser.add_argument("--layers", help="MoE blocks to look at, e.g. 1,3; default: all")
    parser.add_argument(
        "--capacities",
        default=",".join(f"{c:g}" for c in CAPACITIES),
        help="capacity factors whose discarded patches are drawn (%(default)s)",
    )
    parser.add_argument("--out", help="directory or URI; default: routing-MODEL here")
    return parser


def main() -> None:
    args = parser().parse_args()
    with command(), tracking(args, FOLDER) as store:
        (trained,) = models_of(args, store)
        blocks = blocks_of(trained, args.layers)
        model = trained.load(device())
        found, drawn, names = look(args, trained, model, blocks)
        print_layers(found)
        report(args, trained, model, found, drawn, names, store)


def blocks_of(trained: Trained, asked: str | None) -> list[int]:
    """Raises UsageError for a block that is no MoE block, and for a dense model."""
    blocks = trained.run.model.moe_blocks()
    if not blocks:
        raise UsageError(f"{trained.name} is a dense model: it has no routers to look into")
    chosen = numbers("--layers", asked) if asked else blocks
    if wrong := [f"{block:g}" for block in chosen if block not in blocks]:
        raise UsageError(
            f"--layers {asked}: {', '.join(wrong)}: no MoE blocks; those of {trained.name} are {blocks}"
        )
    return sorted({int(block) for block in chosen})


def numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError:
        raise UsageError(f"{flag} {text}: write numbers with commas between them") from None


def look(
    args: argparse.Namespace, trained: Trained, model: ViT, blocks: list[int]
) -> tuple[Survey, Examples, tuple[str, ...]]:
    """The measurements, the examples, the names of the classes."""
    for flag in ("images", "examples"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise UsageError(f"--{flag} {value}: must be at least 1")
    path = images_path(args, trained)
    names = tell_other_classes(trained, path).names
    rows, outputs = open_manifest(path).rows(args.split), trained.run.model.num_classes
    if len(names) > outputs:
        raise UsageError(f"{path} has {len(names)} classes, but the model has {outputs} outputs")
    points, refused = [], []
    if drops(trained.run.model.moe and trained.run.model.moe.router):
        capacities = numbers("--capacities", args.capacities)
        if not all(0 < capacity < math.inf for capacity in capacities):
            raise UsageError(f"--capacities {args.capacities}: each must be above 0")
        points, refused = settings(model, capacities)
    for reason in refused:
        print(f"not drawn: {reason}")
    total = min(args.images or rows, rows)
    batches = first_images(
        images_of(trained, path=path, split=args.split, batch_size=args.batch_size, device=device()),
        total,
    )
    first = next(batches)
    drawn = examples(model, first, count=args.examples, blocks=blocks, points=points)
    found = survey(
        model,
        chain([first], batches),
        blocks=blocks,
        classes=len(names),
        report=Progress(total),
    )
    return found, drawn, names


def first_images(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The first `count` images; what a batch has beyond them counts as padding."""
    for batch in batches:
        places = batch.valid.cumsum(0)
        yield batch._replace(valid=batch.valid * (places <= count))
        count -= int(batch.valid.sum())
        if count <= 0:
            return


class Progress:
    """A line every few seconds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.next_s = time.monotonic() + PROGRESS_S

    def __call__(self, images: int) -> None:
        if time.monotonic() > self.next_s:
            print(f"{images}/{self.total} images", flush=True)
            self.next_s = time.monotonic() + PROGRESS_S


def print_layers(found: Survey) -> None:
    table = layer_table(found)
    print(f"{found.images} images, accuracy {found.acc:.4f} as trained")
    print("  ".join(table))
    for row in zip(*table.values(), strict=True):
        print("  ".join(f"{detail(cell):>{len(name)}}" for name, cell in zip(table, row, strict=True)))


def report(
    args: argparse.Namespace,
    trained: Trained,
    model: ViT,
    found: Survey,
    drawn: Examples,
    names: tuple[str, ...],
    store: Tracking,
) -> None:
    """Page, pictures and tables, below --out and in the model's MLflow run."""
    out = storage.absolute(args.out or f"routing-{trained.name.replace('/', '-')}")
    parts, pictures = [], {}
    for section in sections(found, drawn, model.config, names):
        contents = {name: png(figure) for name, figure in section.pictures.items()}
        parts.append((section.title, section.text, contents))
        pictures |= {f"{name}.png": content for name, content in contents.items()}
    moe = trained.run.model.moe
    assert moe
    facts = (
        f"{moe.router.kind.replace('_', ' ').capitalize()} router, {moe.num_experts} experts, step"
        f" {trained.step}. {found.images} images of {images_path(args, trained)} ({args.split}); accuracy"
        f" {found.acc:.4f}."
    )
    html = page(f"Routers of {trained.name}", facts, layer_table(found), parts)
    figures = tables(found, drawn, names)
    storage.make_folder(out)
    storage.write_bytes(storage.join(out, PAGE), html.encode())
    for name, content in pictures.items():
        storage.write_bytes(storage.join(out, name), content)
    for name, table in figures.items():
        storage.write_bytes(storage.join(out, f"{name}.json"), json.dumps(table).encode())
    print(f"{storage.join(out, PAGE)}: {len(pictures)} pictures, {len(figures)} tables beside it")
    if trained.run_id:
        run, (data,) = results_of(store, trained.run_id, images_path(args, trained))
        folder = f"{FOLDER}/{data}/step-{trained.step}"
        log(run, folder, html, pictures, figures)
        print(f"MLflow run {trained.run_id}: artifacts below {folder}")
    else:
        print("MLflow knows no run of this model: nothing is logged there")


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
