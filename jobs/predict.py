"""Predict many images with a trained model: five classes of each, or all that it shows, as parquet files.

python jobs/predict.py soft --images /data/photos --out /data/photos-soft
python jobs/predict.py models:/quickstart@pareto-knee --images s3://bucket/shards --split val --out s3://bucket/said
python jobs/predict.py vmoe --images /data/photos --out /data/photos-k1 --set routing.k=1 routing.capacity=0.3
python jobs/predict.py multi --images /data/photos --out /data/photos-all --threshold 0.5
python jobs/predict.py lit --images /data/photos --out /data/photos-named --classes cat dog "fire engine"

Images are files at any depth below --images, or the rows of shards (a directory with manifest.json). An image
that cannot be decoded is a row with the reason in the column error. --out must be a folder of its own, apart
from the images. After a kill, run the same command again to continue; then pandas.read_parquet(OUT), or any
reader of parquet, has every image once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jobs._cli import WORTH_A_CLUSTER, Places, check_out, command, connect, model_of
from jobs._flags import MODEL, flag, parse
from jobs._sharded import DTYPE, EP, Dtype, start
from orchestrator.errors import UsageError
from orchestrator.evaluation.kinds.scores import POINT

if TYPE_CHECKING:
    from pyarrow import Table

    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.data.preparation import Preparation
    from orchestrator.evaluation.predict import ImagePart
    from orchestrator.tasks.base import ClassNames

log = logging.getLogger("orchestrator.predict")

EVERY_S = 5.0  # between lines of progress
NAMED = 5  # bad images that are named


@dataclass(frozen=True, kw_only=True)
class PredictFlags:
    model: str = flag(help=MODEL, positional=True)
    images: str = flag(help="folder or URI of image files, or of shards")
    out: str = flag(help="folder or URI for the parquet files, apart from the images")
    split: Literal["train", "val"] | None = flag(None, "the split of shards; default: both")
    batch_size: int = flag(64, "images per forward pass", least=1)
    workers: int | None = flag(
        None, "processes, with a GPU or a CPU each; default: as many as the cluster has", least=1
    )
    ep: int | None = flag(None, f"let all workers hold one model together: {EP}", least=1)
    dtype: Dtype = flag("float32", DTYPE)
    set: tuple[str, ...] = flag((), POINT, metavar="FIELD=VALUE", nargs="+")
    background: str | None = flag(
        None, "colour under transparent pixels; default: that of the model's data, else alpha is dropped"
    )
    classes: tuple[str, ...] = flag(
        (), "names of classes, for a model of images and texts", metavar="NAME", nargs="+"
    )
    template: tuple[str, ...] = flag(
        (), "text with {} in the place of a name; default: those of the model's task", metavar="TEXT"
    )
    threshold: float | None = flag(
        None,
        "write every class of at least this probability, 0 to 1, in place of the five best; 0: all classes",
    )
    features: bool = flag(False, "write the input of the model's head in place of predictions")
    fresh: bool = flag(False, "delete the predictions in --out and start over")
    places: Places

    def __post_init__(self) -> None:
        if self.ep is None and self.dtype != "float32":
            raise UsageError(f"--dtype {self.dtype} does nothing without --ep")
        if self.threshold is not None and self.features:
            raise UsageError("--threshold is a probability of classes, and --features writes none")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UsageError(f"--threshold {self.threshold:g}: a probability is at least 0 and at most 1")


def main() -> None:
    flags = parse(PredictFlags, __doc__)
    with command(f"predicting {flags.images} by {flags.model}", flags.places):
        predict(flags)


def predict(flags: PredictFlags) -> None:
    """Predicts every image that --out does not hold yet.

    Raises:
        UsageError: for flags that do not fit, and an --out that holds other files or lies among the images.
    """
    from orchestrator import storage
    from orchestrator.evaluation import predict
    from orchestrator.evaluation.points import parse_point, settings_of
    from orchestrator.evaluation.predict import PART, PLAN, begin, digest_of, list_parts

    point = parse_point(flags.set)
    model = model_of(flags.model, flags.places)
    names, preparation = class_names(flags, model), preparation_for(flags, model)
    if not (model.run.task.classifies or names or flags.features):
        raise UsageError(
            f"{model.name} was trained for {model.run.task.kind}: it has no classes to predict;"
            " --features writes what its head sees"
        )
    group = model.run.model.images_per_group
    if flags.batch_size % group:
        raise UsageError(f"--batch-size {flags.batch_size} must be a multiple of {group}, the routing group")
    out, images = (storage.absolute(place).rstrip("/") for place in (flags.out, flags.images))
    # `begin` judges the parts that are there.
    check_out(out, own=(PLAN, *filter(PART.fullmatch, storage.names(out))), apart=(images,))
    digest, parts = list_parts(images, flags.split, group=group)
    plan = {
        "model": model.location,
        "model_sha256": digest_of(model.location),
        "images": images,
        "images_sha256": digest,
        "split": flags.split,
        "routing": settings_of(point),
        "group": group,
        **vars(preparation),
        "features": flags.features or None,  # as plans of earlier versions have it
        "threshold": flags.threshold,
        "names": [list(names.classes), list(names.templates)] if names else None,
        "dtype": flags.dtype if flags.dtype != "float32" else None,
        "classes": names.classes if names else model.classes,
    }
    plan, done = begin(out, plan, fresh=flags.fresh)
    missing = [part for part in parts if part["number"] not in done]
    count, left = (sum(part["stop"] - part["first"] for part in some) for some in (parts, missing))
    if missing:
        log.info("%s of %s images are left to predict by %s", f"{left:,}", f"{count:,}", model.location)
        settings = {"model": model, "point": point, "images": images, "classes": plan["classes"]}
        settings |= {"preparation": preparation, "features": flags.features, "names": names}
        settings |= {"threshold": flags.threshold}
        tables = predicted(flags, missing, batch_size=flags.batch_size, **settings)
        follow(predict.write_parts(out, tables), left)
    print(f"{count:,} images in {len(parts)} file{'s' * (len(parts) != 1)}: {out}")
    print(f"import pandas; pandas.read_parquet({out!r})")


def preparation_for(flags: PredictFlags, model: ModelRef) -> Preparation:
    """What is done to images before they are decoded: what was done to those that the model learned from.
    Raises UsageError for a --background that contradicts it.
    """
    from orchestrator.data.preparation import colour

    known = model.preparation
    if known.background and flags.background and colour(known.background) != colour(flags.background):
        raise UsageError(
            f"--background {flags.background}: {model.name} learned from images on {known.background}, which"
            " it is given without the flag"
        )
    return replace(known, background=known.background or flags.background)


def class_names(flags: PredictFlags, model: ModelRef) -> ClassNames | None:
    """The classes that --classes names, or else those of the model's task; None for a classifier. Raises
    UsageError for names that cannot tell classes apart, and for a classifier that is given some.
    """
    names = model.run.task.class_names(flags.classes or (), flags.template or ())
    if flags.features or names is None:
        return None
    try:
        model.run.task.by_names(model.run.model, names)
    except ValueError as error:
        raise UsageError(f"{model.name}: {error}") from None
    return names


def predicted(flags: PredictFlags, missing: list[ImagePart], **settings: Any) -> Iterator[Table]:
    """Tables of the missing parts, by models that are whole or one that all workers hold together."""
    from orchestrator.evaluation import predict

    if flags.ep:
        layout = {"workers": flags.workers or flags.ep, "ep": flags.ep, "dtype": flags.dtype}
        batch_size = flags.batch_size * layout["workers"]
        sharding = start([settings["model"]], batch_size, root=flags.places.root(), **layout)
        return predict.predict_together(missing, sharding, **settings)
    own_ray = os.environ.get("RAY_ADDRESS", "local") in ("", "local")
    if len(missing) < WORTH_A_CLUSTER and flags.workers is None and own_ray:
        return map(predict.Predictor(**settings).table, missing)
    connect()
    log.info("Ray's line about constructor arguments is harmless: this process keeps them")
    workers, each = predict.pool_size(flags.workers)
    return predict.predict_in_pool(missing, workers=workers, each=each, **settings)


def follow(written: Iterator[Table], left: int) -> None:
    """Prints a line about progress every few seconds while parts are written; names the bad images."""
    from orchestrator.output import duration

    images, bad = 0, []
    began = printed = time.monotonic()
    for rows in written:
        images, now = images + len(rows), time.monotonic()
        bad += [f"{row['key']}: {row['error']}" for row in rows.to_pylist() if row["error"]]
        if now - printed > EVERY_S or images == left:
            printed, speed = now, images / (now - began)
            about = f", about {duration((left - images) / speed)} left" if images < left else ""
            log.info("%s of %s images, %.1f/s%s", f"{images:,}", f"{left:,}", speed, about)
    if bad:
        names = "; ".join(bad[:NAMED]) + ("; .." if len(bad) > NAMED else "")
        log.info(
            "%d of %s images cannot be decoded, see the column error: %s", len(bad), f"{images:,}", names
        )


if __name__ == "__main__":
    main()
