"""Show how the routers of a trained model decide, what they discard, and how much they matter.

  python papers/jobs/inspect_routing.py soft                               a run below the storage
  python papers/jobs/inspect_routing.py models:/quickstart@pareto-knee --data /data/flowers --split train
  python papers/jobs/inspect_routing.py tc --capacities 0.05,0.1,0.3 --examples 12 --layers 5 --out /tmp/tc

Prints a row per MoE layer. Writes routing.html (one page that needs no network), its pictures and its tables
below --out, and records them in the model's run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from jobs._cli import Evaluation, check_out, command, model_of, print_table
from jobs._flags import MODEL, flag, numbers, parse
from jobs._record import Record
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.data.batch import Batch
    from papers.routing_analysis.report import Table

FOLDER = "routing"  # of the storage, and of the model's MLflow run
PAGE = "routing.html"
PROGRESS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class InspectFlags:
    model: str = flag(help=MODEL, positional=True)
    images: int | None = flag(None, "number of images to measure; default: all of the split", least=1)
    examples: int = flag(8, "images to draw on", least=1)
    layers: tuple[int, ...] | None = flag(
        None, "MoE blocks to look at, e.g. 1,3; default: all", read=numbers(int, "1,3")
    )
    capacities: tuple[float, ...] = flag(
        "0.1,0.2,0.4,0.8",
        "capacity factors whose discarded patches are drawn",
        read=numbers(float, "0.1,0.4"),
    )
    out: str | None = flag(None, "directory or URI; default: routing/MODEL below the storage")
    on: Evaluation

    def __post_init__(self) -> None:
        if not all(0 < capacity < math.inf for capacity in self.capacities):
            raise UsageError(f"--capacities {self.capacities}: each must be above 0")


def main() -> None:
    flags = parse(InspectFlags, __doc__)
    with command(f"looking into the routers of {flags.model}", flags.on.places):
        inspect(flags)


def inspect(flags: InspectFlags) -> None:
    """Measures, draws, and reports below --out and in the model's run.

    Raises:
        UsageError: for flags that do not fit the model, and an --out that holds other files.
    """
    from orchestrator import storage

    places = flags.on.places
    trained = model_of(flags.model, places)
    path = flags.on.path(trained)
    out = places.below(FOLDER, trained.name.replace("/", "-"))
    if flags.out:
        out = storage.absolute(flags.out).rstrip("/")
        check_out(out, own=(PAGE,), apart=(path,))
    blocks = blocks_of(trained, flags.layers)
    trained.check_classes(path)
    html, pictures, tables = analyse(flags, trained, blocks, path)
    contents = {PAGE: html.encode(), **pictures}
    storage.make_folder(out)
    for name, content in contents.items():
        storage.write_bytes(storage.join(out, name), content)
    for name, table in tables.items():
        storage.write_bytes(storage.join(out, f"{name}.json"), json.dumps(table).encode())
    print(f"{storage.join(out, PAGE)}: {len(pictures)} pictures, {len(tables)} tables beside it")
    record = Record(places)
    if names := record.names(trained, path):
        assert trained.directory
        folder = f"{FOLDER}/{next(iter(names))}/step-{trained.step}"
        record.write(
            trained.directory,
            {},
            tables={f"{folder}/{name}.json": table for name, table in tables.items()},
            files={f"{folder}/{name}": content for name, content in contents.items()},
            data=names,
        )
    record.send()


def blocks_of(trained: ModelRef, asked: tuple[int, ...] | None) -> list[int]:
    """The MoE blocks of --layers. Raises UsageError for other blocks, and for a dense model."""
    blocks = trained.run.model.moe_blocks()
    if not blocks:
        raise UsageError(f"{trained.name} is a dense model: it has no routers to look into")
    if wrong := [str(block) for block in asked or () if block not in blocks]:
        raise UsageError(
            f"--layers: {', '.join(wrong)} are not MoE blocks; the MoE blocks of {trained.name} are {blocks}"
        )
    return sorted(set(asked or blocks))


def analyse(
    flags: InspectFlags, trained: ModelRef, blocks: list[int], path: str
) -> tuple[str, dict[str, bytes], dict[str, Table]]:
    """The page, its pictures by file name, and the tables behind them by name. Prints a row per layer."""
    from moe.models import ViT
    from orchestrator.data.manifest import open_manifest
    from orchestrator.evaluation.evaluate import default_device
    from papers.routing_analysis import report
    from papers.routing_analysis.collect import capacity_settings, collect, discards, examples

    model = trained.load(default_device())
    if not isinstance(model, ViT):
        raise UsageError(f"{trained.name} is of kind {model.config.kind!r}; routing is drawn for a vit only")
    moe = trained.run.model.moe
    assert moe
    settings, refused = [], []
    if discards(moe.router):
        settings, refused = capacity_settings(model.config, flags.capacities)
    for reason in refused:
        print(f"not drawn: {reason}")

    manifest, on = open_manifest(path), flags.on
    names, count = manifest.classes, manifest.rows(on.split)
    total = min(flags.images or count, count)
    batches = first_images(on.images(trained, path), total)
    first = next(batches)
    drawn = examples(model, first, count=flags.examples, blocks=blocks, settings=settings)
    layers = collect(
        model, chain([first], batches), blocks=blocks, classes=len(names), progress=progress(total)
    )

    table = report.layer_table(layers)
    counts = layers[blocks[0]]
    accuracy = float(counts.correct / counts.images)
    print(f"{int(counts.images)} images, accuracy {accuracy:.4f} as trained")
    rows = [[f"{cell:.4g}" for cell in row] for row in zip(*table.values(), strict=True)]
    print_table(table, rows, left=0)
    facts = (
        f"{moe.router.kind.replace('_', ' ').capitalize()} router, {moe.num_experts} experts, step"
        f" {trained.step}. {int(counts.images)} images of {path} ({on.split}); accuracy {accuracy:.4f}."
    )
    parts = list(report.sections(layers, drawn, model.config, names))
    pictures = {f"{name}.png": content for part in parts for name, content in part[2].items()}
    html = report.page(f"Routers of {trained.name}", facts, table, parts)
    return html, pictures, {"layers": table, "figures": report.figure_table(layers, drawn, names)}


def first_images(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The first `count` images; the rest of their last batch counts as padding."""
    for batch in batches:
        places = batch.valid.cumsum(0)
        yield replace(batch, valid=batch.valid * (places <= count))
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


if __name__ == "__main__":
    main()
