"""Describes in a line the model and the data that a command trains on."""

from contextlib import suppress
from statistics import median

import numpy as np

from moe.model import ModelConfig
from orchestrator.config import RunConfig
from orchestrator.data.images import BadImage, Picture
from orchestrator.data.manifest import open_manifest
from orchestrator.data.shards import DataSet

MOST_EPOCHS = 300  # of the longest common ImageNet recipes; runs with more are pointed out
HEADERS_READ = 16  # images whose headers show the data's own size


def describe_model(model: ModelConfig) -> str:
    size = f"{model.kind} of size {model.size()}"
    if not model.moe:
        return f"dense {size}, without experts"
    blocks = ", ".join(map(str, model.moe_blocks()))
    return f"{size} with {model.moe.num_experts} {model.family()} experts in blocks [{blocks}]"


def describe_data(run: RunConfig) -> str:
    """The images or sequences of a run, the passes over them, and the accuracy that guessing would reach."""
    manifest, size = open_manifest(run.data.path), run.model.image_side()
    rows, seen = manifest.rows("train"), run.train.steps * run.data.batch_size
    own = own_size(run) if size else None
    epochs = f"{seen / rows:.3g}" if seen < 1000 * rows else f"{seen / rows:,.0f}"
    noun, what = ("images", f"{size} x {size} px") if size else ("sequences", f"{run.model.tokens()} bytes")
    scaled = "" if own in (None, (size, size)) else f" (the data's median: {own[0]} x {own[1]} px)"
    floor = guessing(run)
    floors = f"; always guessing the largest class: {run.task.quality} {floor:.4f}" if floor else ""
    repeats = f", more than {MOST_EPOCHS}: fewer train.steps may do" if seen > MOST_EPOCHS * rows else ""
    return (
        f"{noun} of {what}{scaled}, batch {run.data.batch_size}, {run.train.steps} steps ="
        f" {epochs} epochs of {rows:,} {noun}{repeats}{floors}"
    )


def guessing(run: RunConfig) -> float:
    """The accuracy of always guessing the largest class; 0 for other tasks than classification."""
    manifest = open_manifest(run.data.path)
    return manifest.val_majority / manifest.rows("val") if run.task.classifies else 0.0


def own_size(run: RunConfig) -> tuple[int, int] | None:
    """Median width and height in pixels of some validation images as stored; None if all are damaged."""
    path, cache = run.data.path, int(run.data.cache_gb * 1e9)
    data = DataSet(path=path, manifest=open_manifest(path), cache_bytes=cache)
    rows = data.manifest.splits["val"][0].rows
    row = np.arange(0, rows, -(-rows // HEADERS_READ))
    shard = np.zeros_like(row)
    pictures = []
    for image in data.images("val", shard, data.records("val", shard, row))[0]:
        with suppress(BadImage):
            pictures.append(Picture(image()))
    if not pictures:
        return None
    return int(median(p.width for p in pictures)), int(median(p.height for p in pictures))
