"""What a trained model says of many images: its five best classes for each, as parquet files.

python jobs/predict.py soft --images /data/photos --out /data/photos-soft
python jobs/predict.py models:/moe-frontier@pareto-knee --images s3://bucket/shards --split val --out s3://bucket/said
python jobs/predict.py vmoe --images /data/photos --out /data/photos-k1 --set routing.k=1 routing.capacity=0.3

Images are files at any depth below --images, or the rows of shards (a directory with manifest.json). An image
that cannot be decoded is a row with the reason in the column error. Killed, the same command continues; then
pandas.read_parquet(OUT), or any reader of parquet, has every image once.
"""

import argparse
import logging
import time

from jobs.command import add_places, connect, tracking
from jobs.evaluation_flags import models_of
from jobs.show import duration
from jobs.usage import command
from moe.overrides import RoutingOverrides
from orchestrator import storage
from orchestrator.config import UsageError
from orchestrator.evaluation.point import HELP, parse_point, settings_of
from orchestrator.evaluation.trained import NAMES, Trained
from orchestrator.prediction.inputs import Files, Rows, open_inputs
from orchestrator.prediction.plan import Plan, digest_of, part_size, settle, tidy
from orchestrator.prediction.predictor import Settings
from orchestrator.prediction.run import pool_size, run

log = logging.getLogger("orchestrator.predict")

EVERY_S = 5.0  # between lines of progress


def main() -> None:
    args = arguments()
    with command():
        point = parse_point(args.set)
        with tracking(args, "predict") as store:
            (model,) = models_of(args, store)
        moe = model.run.model.moe
        group = moe.images_per_group if moe else 1
        if args.batch_size < 1 or args.batch_size % group:
            raise UsageError(
                f"--batch-size {args.batch_size} must be a multiple of {group}, the routing group"
            )
        out = storage.absolute(args.out).rstrip("/")
        inputs = open_inputs(args.images, args.split, cache_bytes=int(model.run.data.cache_gb * 1e9))
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
            predict(args, plan, missing, model, point, out)
        tidy(out)
        print(f"{inputs.count:,} images in {len(parts)} files: {out}")
        print(f"import pandas; pandas.read_parquet({out!r})")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=NAMES)
    parser.add_argument("--images", required=True, help="folder or URI of image files, or of shards")
    parser.add_argument("--out", required=True, help="folder or URI that the parquet files go to")
    parser.add_argument("--split", choices=("train", "val"), help="of shards; default: both")
    parser.add_argument("--batch-size", type=int, default=64, help="images of a forward pass (%(default)s)")
    parser.add_argument(
        "--workers", type=int, help="processes, a GPU or a CPU each; default: as many as the cluster has"
    )
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help=f"operating point: {HELP}",
    )
    parser.add_argument("--fresh", action="store_true", help="begin again: predictions that are in --out go")
    add_places(parser)
    args = parser.parse_args()
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    return args


def predict(
    args: argparse.Namespace,
    plan: Plan,
    missing: dict[int, Files | Rows],
    model: Trained,
    point: RoutingOverrides,
    out: str,
) -> None:
    """Does the parts that are missing, with a line now and then."""
    left = sum(part.count() for part in missing.values())
    before = plan.count - left
    log.info("%s of %s images are to be looked at by %s", f"{left:,}", f"{plan.count:,}", model.location)
    connect(show_workers=False)
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
