"""Average the weights of models that were trained alike (a uniform soup): one model at the cost of one.

python jobs/soup.py soft-seed0 soft-seed1 soft-seed2 --out soup.safetensors --evaluate
python jobs/soup.py runs/tuned/checkpoints/step-000008* --out soup.safetensors        steps of one run
python jobs/soup.py a.safetensors b.safetensors --out soup.safetensors --evaluate --data s3://bucket/shards

The file is one that all commands take for a model: python jobs/evaluate.py soup.safetensors
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from jobs.usage import command, evaluation_parser, named

if TYPE_CHECKING:
    from orchestrator.evaluation.models import ModelRef

log = logging.getLogger("orchestrator.soup")


def main() -> None:
    parser = evaluation_parser(__doc__, several=True)
    parser.add_argument("--out", required=True, help="local file, ending in .safetensors")
    parser.add_argument("--force", action="store_true", help="replace --out if it is there")
    parser.add_argument(
        "--evaluate", action="store_true", help="also say how good each model and the soup are, on --data"
    )
    args = parser.parse_args()
    if args.data and not args.evaluate:
        parser.error("--data is for --evaluate")
    with command(f"averaging {named(args.model)}"):
        make_soup(args)


def make_soup(args: argparse.Namespace) -> None:
    """Writes the soup; with --evaluate prints the figures of each model and of the soup."""
    from rich.table import Table

    from jobs.command import check_file, open_store
    from jobs.evaluation_flags import images_path, models_of
    from jobs.show import print_table
    from orchestrator import storage
    from orchestrator.evaluation.models import read_model
    from orchestrator.evaluation.soup import check_alike, write_soup

    check_file("--out", storage.absolute(args.out))
    store = open_store(args)
    models, out = models_of(args, store), storage.absolute(args.out)
    check_alike(models)
    if args.evaluate:
        models[0].check_classes(images_path(args, models[0]))
    rows = [row(args, model) for model in models] if args.evaluate else []
    write_soup(models, out, force=args.force)
    if args.evaluate:
        table = Table("model", "step", "images", "acc1", "loss", title=f"{args.split} split")
        for cells in (*rows, row(args, replace(read_model(out), name="soup"))):
            table.add_row(*cells)
        print_table(table)
    print(f"soup of {len(models)}  {out}  {(storage.size(out) or 0) / 1e6:.1f} MB")


def row(args: argparse.Namespace, model: ModelRef) -> tuple[str, ...]:
    """The model's row of the table. Raises UsageError if the images do not fit the model."""
    from jobs.evaluation_flags import images_path
    from orchestrator.evaluation.evaluate import default_device, evaluate_at, images_of

    path, device = images_path(args, model), default_device()
    images = images_of(model, path=path, split=args.split, batch_size=args.batch_size, device=device)
    (found,) = evaluate_at(model.load(device), images)
    metrics = found.metrics()
    log.info("%s: acc1 %.4f", model.location, metrics["acc1"])
    step = str(model.step) if model.step >= 0 else ""
    return model.name, step, str(found.images()), f"{metrics['acc1']:.4f}", f"{metrics['loss']:.4f}"


if __name__ == "__main__":
    main()
