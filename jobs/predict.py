"""Predict many images with a trained model: the five best classes of each, as parquet files.

python jobs/predict.py soft --images /data/photos --out /data/photos-soft
python jobs/predict.py models:/quickstart@pareto-knee --images s3://bucket/shards --split val --out s3://bucket/said
python jobs/predict.py vmoe --images /data/photos --out /data/photos-k1 --set routing.k=1 routing.capacity=0.3

Images are files at any depth below --images, or the rows of shards (a directory with manifest.json). An image
that cannot be decoded is a row with the reason in the column error. --out must be a folder of its own, apart
from the images. Killed, the same command continues; then pandas.read_parquet(OUT), or any reader of parquet,
has every image once.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import TYPE_CHECKING

from jobs.usage import MODEL, POINT, add_places, at_least_one, command, plain_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from orchestrator.evaluation.trained import Trained
    from orchestrator.prediction.inputs import Files, Rows
    from orchestrator.prediction.plan import Plan

log = logging.getLogger("orchestrator.predict")

EVERY_S = 5.0  # between lines of progress


def main() -> None:
    args = parser().parse_args()
    with command(f"predicting {args.images} by {args.model}"):
        predict(args)


def parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--images", required=True, help="folder or URI of image files, or of shards")
    parser.add_argument(
        "--out", required=True, help="folder or URI that the parquet files go to, apart from the images"
    )
    parser.add_argument("--split", choices=("train", "val"), help="of shards; default: both")
    parser.add_argument(
        "--batch-size", type=at_least_one, default=64, help="images per forward pass (%(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=at_least_one,
        help="processes, a GPU or a CPU each; default: as many as the cluster has",
    )
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help=f"operating point: {POINT}",
    )
    parser.add_argument("--fresh", action="store_true", help="begin again: delete the predictions in --out")
    add_places(parser)
    return parser


def predict(args: argparse.Namespace) -> None:
    """Predicts every image that --out does not hold yet.

    Raises:
        UsageError: for flags that do not fit, and an --out that holds other files or lies among the images.
    """
    from jobs.command import check_out, tracking
    from jobs.evaluation_flags import models_of
    from orchestrator import storage
    from orchestrator.evaluation.point import parse_point, settings_of
    from orchestrator.prediction.inputs import open_inputs
    from orchestrator.prediction.plan import PART, PLAN, Plan, digest_of, part_size, settle, tidy

    point = parse_point(args.set)
    with tracking(args, "predict") as store:
        (model,) = models_of(args, store)
    moe = model.run.model.moe
    group = moe.images_per_group if moe else 1
    if args.batch_size % group:
        raise UsageError(f"--batch-size {args.batch_size} must be a multiple of {group}, the routing group")
    out, images = (storage.absolute(place).rstrip("/") for place in (args.out, args.images))
    parts_there = [name for name in storage.names(out) if PART.fullmatch(name)]  # `settle` judges them
    check_out(out, own=(PLAN, *parts_there), apart=(images,))
    inputs = open_inputs(images, args.split, cache_bytes=int(model.run.data.cache_gb * 1e9))
    plan = Plan(
        model=model.location,
        model_sha256=digest_of(model.location),
        images=inputs.location,
        images_sha256=inputs.sha256,
        count=inputs.count,
        split=args.split,
        routing=settings_of(point),
        group=group,
        part=part_size(inputs.count, group),
        classes=model.classes,
    )
    plan, there = settle(out, plan, fresh=args.fresh)
    parts = dict(enumerate(inputs.parts(plan.part)))
    missing = {number: part for number, part in parts.items() if number not in there}
    if missing:
        predict_parts(args, plan, missing, model, point, out)
    tidy(out)
    print(f"{inputs.count:,} images in {len(parts)} files: {out}")
    print(f"import pandas; pandas.read_parquet({out!r})")


def predict_parts(
    args: argparse.Namespace,
    plan: Plan,
    missing: dict[int, Files | Rows],
    model: Trained,
    point: RoutingOverrides,
    out: str,
) -> None:
    """Predicts the parts that are missing, with a line about progress now and then."""
    from jobs.command import connect
    from jobs.show import duration
    from orchestrator.prediction.predictor import Settings
    from orchestrator.prediction.run import pool_size, run

    left = sum(part.count() for part in missing.values())
    before = plan.count - left
    log.info("%s of %s images are left to predict by %s", f"{left:,}", f"{plan.count:,}", model.location)
    connect()
    workers, each = pool_size(args.workers)
    settings = Settings(
        model=model,
        point=point,
        out=out,
        batch_size=args.batch_size,
        threads=max(1, int(each["num_cpus"])),
        classes=plan.classes,
    )
    images = errors = 0
    began = said = time.monotonic()
    for done in run(missing, settings, workers=workers, each=each):
        images, errors, now = images + done.images, errors + done.errors, time.monotonic()
        if now - said > EVERY_S or images == left:
            said, speed = now, images / (now - began)
            about = f", about {duration((left - images) / speed)} left" if images < left else ""
            log.info("%s of %s images, %.0f/s%s", f"{before + images:,}", f"{plan.count:,}", speed, about)
    if errors:
        log.info("%d of the %s cannot be decoded: column error says why", errors, f"{images:,}")


if __name__ == "__main__":
    main()
