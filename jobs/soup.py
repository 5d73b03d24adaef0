"""Average the weights of models that were trained alike (a uniform soup): one model at the cost of one.

python jobs/soup.py soft-seed0 soft-seed1 soft-seed2 --out soup.safetensors --evaluate
python jobs/soup.py runs/tuned/checkpoints/step-000008* --out soup.safetensors        steps of one run
python jobs/soup.py a.safetensors b.safetensors --out soup.safetensors --evaluate --data s3://bucket/shards

Every command accepts the file as a model: python jobs/evaluate.py soup.safetensors
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jobs._cli import Evaluation, check_file, command, models_of, named, print_table
from jobs._flags import MODELS, flag, parse
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef

log = logging.getLogger("orchestrator.soup")


@dataclass(frozen=True, kw_only=True)
class SoupFlags:
    model: tuple[str, ...] = flag(help=MODELS, positional=True, nargs="+")
    out: str = flag(help="local file, ending in .safetensors")
    fresh: bool = flag(False, "replace --out if it exists")
    evaluate: bool = flag(False, "also print how good each model and the soup are, on --data")
    on: Evaluation

    def __post_init__(self) -> None:
        if self.on.data and not self.evaluate:
            raise UsageError("--data does nothing without --evaluate")


def main() -> None:
    flags = parse(SoupFlags, __doc__)
    with command(f"averaging {named(flags.model)}", flags.on.places):
        make_soup(flags)


def make_soup(flags: SoupFlags) -> None:
    """Writes the soup; with --evaluate prints the figures of each model and of the soup."""
    from orchestrator import storage
    from orchestrator.checkpoint.models import read_model
    from orchestrator.evaluation.soup import check_alike, write_soup

    out = storage.absolute(flags.out)
    check_file("--out", out)
    models = models_of(flags.model, flags.on.places, flags.on.places.open_store())
    check_alike(models)
    if flags.evaluate:
        models[0].check_classes(flags.on.path(models[0]))
    rows = [row(flags.on, model) for model in models] if flags.evaluate else []
    write_soup(models, out, fresh=flags.fresh)
    if flags.evaluate:
        rows.append(row(flags.on, replace(read_model(out), name="soup")))
        columns = ("model", "step", "images", quality_of(models[0]), "loss")
        print_table(columns, rows, title=f"{flags.on.split} split")
    print(f"soup of {len(models)}  {out}  {(storage.size(out) or 0) / 1e6:.1f} MB")


def row(on: Evaluation, model: ModelRef) -> tuple[Any, ...]:
    """The model's row of the table. Raises UsageError if the images do not fit the model."""
    from orchestrator.evaluation.evaluate import default_device, evaluate_at

    images, quality = on.images(model, on.path(model)), quality_of(model)
    (scores,) = evaluate_at(model.load(default_device()), images, task=model.run.task)
    metrics = scores.metrics()
    log.info("%s: %s %.4f", model.location, quality, metrics[quality])
    return (
        model.name,
        model.step if model.step >= 0 else "",
        scores.images(),
        metrics[quality],
        metrics.get("loss", ""),
    )


def quality_of(model: ModelRef) -> str:
    return model.run.task.quality.removeprefix("val/")


if __name__ == "__main__":
    main()
