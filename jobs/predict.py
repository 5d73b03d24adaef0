"""Predict many images with a trained model: the five best classes of each, as parquet files.

python jobs/predict.py soft --images /data/photos --out /data/photos-soft
python jobs/predict.py models:/quickstart@pareto-knee --images s3://bucket/shards --split val --out s3://bucket/said
python jobs/predict.py vmoe --images /data/photos --out /data/photos-k1 --set routing.k=1 routing.capacity=0.3

Images are files at any depth below --images, or the rows of shards (a directory with manifest.json). An image
that cannot be decoded is a row with the reason in the column error. --out must be a folder of its own, apart
from the images. After a kill, run the same command again to continue; then pandas.read_parquet(OUT), or any
reader of parquet, has every image once.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import TYPE_CHECKING, Any

from jobs.usage import MODEL, POINT, add_places, at_least_one, command, plain_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.evaluation.predict import Part

log = logging.getLogger("orchestrator.predict")

EVERY_S = 5.0  # between lines of progress
NAMED = 5  # bad images that are named


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
    parser.add_argument("--split", choices=("train", "val"), help="the split of shards; default: both")
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
    from jobs.command import check_out, open_store
    from jobs.evaluation_flags import models_of
    from orchestrator import storage
    from orchestrator.evaluation.points import parse_point, settings_of
    from orchestrator.evaluation.predict import PART, PLAN, begin, digest_of, list_parts

    point = parse_point(args.set)
    store = open_store(args)
    (model,) = models_of(args, store)
    moe = model.run.model.moe
    group = moe.images_per_group if moe else 1
    if args.batch_size % group:
        raise UsageError(f"--batch-size {args.batch_size} must be a multiple of {group}, the routing group")
    out, images = (storage.absolute(place).rstrip("/") for place in (args.out, args.images))
    parts_there = [name for name in storage.names(out) if PART.fullmatch(name)]  # `begin` judges them
    check_out(out, own=(PLAN, *parts_there), apart=(images,))
    digest, parts = list_parts(images, args.split, group=group)
    plan = {
        "model": model.location,
        "model_sha256": digest_of(model.location),
        "images": images,
        "images_sha256": digest,
        "split": args.split,
        "routing": settings_of(point),
        "group": group,
        "classes": model.classes,
    }
    plan, done = begin(out, plan, fresh=args.fresh)
    missing = [part for part in parts if part["number"] not in done]
    count, left = (sum(part["stop"] - part["first"] for part in some) for some in (parts, missing))
    if missing:
        log.info("%s of %s images are left to predict by %s", f"{left:,}", f"{count:,}", model.location)
        predict_parts(
            args, missing, out, left, model=model, point=point, images=images, classes=plan["classes"]
        )
    print(f"{count:,} images in {len(parts)} files: {out}")
    print(f"import pandas; pandas.read_parquet({out!r})")


def predict_parts(
    args: argparse.Namespace, missing: list[Part], out: str, left: int, **settings: Any
) -> None:
    """Predicts the missing parts, with a line about progress every few seconds; names the bad images."""
    from jobs.command import connect
    from jobs.show import duration
    from orchestrator.evaluation import predict

    connect()
    workers, each = predict.pool_size(args.workers)
    settings |= {"batch_size": args.batch_size}
    images, bad = 0, []
    began = printed = time.monotonic()
    for rows in predict.predict(missing, out, workers=workers, each=each, **settings):
        images, now = images + len(rows), time.monotonic()
        bad += [f"{row['key']}: {row['error']}" for row in rows.to_pylist() if row["error"]]
        if now - printed > EVERY_S or images == left:
            printed, speed = now, images / (now - began)
            about = f", about {duration((left - images) / speed)} left" if images < left else ""
            log.info("%s of %s images, %.0f/s%s", f"{images:,}", f"{left:,}", speed, about)
    if bad:
        named = "; ".join(bad[:NAMED]) + ("; .." if len(bad) > NAMED else "")
        log.info(
            "%d of %s images cannot be decoded, see the column error: %s", len(bad), f"{images:,}", named
        )


if __name__ == "__main__":
    main()
