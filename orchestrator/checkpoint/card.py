"""The files beside exported weights: a model card, and how an image becomes the model's input.

Paths of the machine that trained are cut to their last part.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from moe.cost import forward_gflops_2mac, num_active_params, num_params, train_flops_6mac
from moe.exported import CONFIG, WEIGHTS
from moe.signature import Signature
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.codec import to_dict
from orchestrator.config import DataConfig, RunConfig
from orchestrator.costs import FORWARD, TRAIN_FLOPS
from orchestrator.data.images import resized_side
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.units import amount

CARD, PREPROCESSOR = "README.md", "preprocessor_config.json"
TRAINED_GROUP = "trained_images_per_group"  # in the metadata of a model that routes fewer images together
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers


def preprocessor(image_size: int, data: DataConfig) -> dict[str, Any]:
    """Returns the content of `PREPROCESSOR` as transformers reads it; the resized side is a whole number."""
    whole = resized_side(image_size, data.eval_crop, data.eval_pixels)
    shorter = data.eval_resize == "shorter"
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": whole} if shorter else {"height": whole, "width": whole},
        "resample": RESAMPLE[data.eval_interpolation],
        "do_center_crop": shorter or whole > image_size,
        "crop_size": {"height": image_size, "width": image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def model_card(
    run: RunConfig,
    signature: Signature,
    *,
    metrics: Mapping[str, float],
    metadata: Mapping[str, str],
    source: Mapping[str, str] | None,
) -> str:
    """Returns the text of `CARD`: what the model is, what it learned from, how good it is and what it costs.

    Args:
        metrics: of the validation at the step of these weights; none if there was none.
        metadata: of the file of weights.
        source: where the initial weights come from, as an import notes it.
    """
    model, train = run.model, run.train
    moe, training = model.moe, train_flops_6mac(model, train.steps * run.data.batch_size)
    parts = {
        "Data": _data(run),
        "Recipe": [
            f"{train.steps} steps of {run.data.batch_size} images, learning rate {train.lr:g}"
            f" ({train.schedule.kind}), {train.optimizer.kind}, seed {train.seed}.",
        ],
        "Results": _results(run, metrics, metadata),
        "Cost": [
            f"- {num_params(model):,} parameters, {round(num_active_params(model)):,} of them per token",
            f"- {amount(FORWARD, forward_gflops_2mac(model))} per image (a multiply-add is two)",
            f"- training: {amount(TRAIN_FLOPS, training)} (six)",
        ],
        "Routing": [
            f"{moe.num_experts} experts in blocks {', '.join(map(str, model.moe_blocks()))};"
            f" {moe.images_per_group} images are routed together by `{json.dumps(to_dict(moe.router))}`."
            if moe
            else "None: the model is dense."
        ],
        "Input and output": [f"The model {signature}."],
        "Initial weights and licence": _origin(run, source),
        "Use": [
            "Copy the folder `moe` of moe-frontier beside this one; torch and safetensors are all it needs.",
            "",
            "```python",
            "from moe import load",
            "",
            'model = load("this folder")',
            *_call(run),
            "```",
            "",
            f"`{WEIGHTS}` are the weights, `{CONFIG}` the model"
            + (
                f" and the names of {len(signature.classes) if signature.classes else 'its'} classes,"
                f" `{PREPROCESSOR}` resize and crop."
                if model.image_side()
                else "."
            ),
        ],
    }
    if "step" not in metadata:  # an import, which was not trained here
        parts = {name: part for name, part in parts.items() if name not in ("Data", "Recipe", "Results")}
        parts["Cost"].pop()
    front = ["---", "pipeline_tag: image-classification", "library_name: moe-frontier"]
    front += [f"tags: [vision, {'mixture-of-experts' if moe else 'vit'}]", "---"]
    if not model.image_side():
        front[1:] = ["pipeline_tag: text-generation", "library_name: moe-frontier", "---"]
    text = [*front, f"# {run.name}", ""]
    for title, lines in parts.items():
        text += [f"## {title}", "", *lines, ""]
    return "\n".join(text)


def _call(run: RunConfig) -> list[str]:
    """The lines that run the model."""
    size = run.model.image_side()
    if not size:
        return [f"logits = model(tokens).heads  # tokens: (B, {run.model.tokens()}) int32"]
    return [f"logits = model(pixels / 127.5 - 1).logits  # pixels: (B, 3, {size}, {size}), RGB, 0..255"]


def _data(run: RunConfig) -> list[str]:
    path = run.data.path
    name = path.rstrip("/").rpartition("/")[2] or "the digits of scikit-learn"
    try:
        manifest = open_manifest(path)
    except (UsageError, OSError):
        return [f"`{name}`; it was not there when this card was written."]
    images = {split: manifest.rows(split) for split in manifest.splits}
    counts = ", ".join(f"{count:,} images of {split}" for split, count in images.items())
    return [f"`{name}`: {counts}, {len(manifest.classes)} classes; SHA-256 `{manifest.digest()}`."]


def _results(run: RunConfig, metrics: Mapping[str, float], metadata: Mapping[str, str]) -> list[str]:
    """The metrics of a single training, and the error of an accuracy on so many images."""
    if TRAINED_GROUP in metadata:
        return [
            f"Not measured: training and validation routed {metadata[TRAINED_GROUP]} images together, and"
            f" this model routes {run.model.images_per_group}. `evaluate.py` measures it."
        ]
    if not metrics:
        return ["Not measured at this step."]
    try:
        images = open_manifest(run.data.path).rows("val")
    except (UsageError, OSError, KeyError):
        images = 0
    lines = ["| metric | value |", "|---|--:|"]
    for name, value in metrics.items():
        error = ""
        if images and name.startswith("val/acc"):
            error = f" ± {math.sqrt(max(0.0, value * (1 - value)) / images):.4f}"
        lines.append(f"| {name} | {value:.4f}{error} |")
    said = f"One training, seed {run.train.seed}: nothing is known of the spread over seeds."
    return [*lines, "", said + (f" ± is the standard error over {images:,} images." if images else "")]


def _origin(run: RunConfig, source: Mapping[str, str] | None) -> list[str]:
    if source is None:
        start = run.train.init_from
        said = f"Started from `{_last(start)}`." if start else f"Drawn from seed {run.train.seed}."
        return [f"{said} No licence is given."]
    licence = source.get("licence") or "unknown: look it up where the weights were published"
    return [
        f"Weights of {source['kind']}, `{_last(source['location'])}`, SHA-256 `{source['sha256']}`;"
        f" licence: {licence}."
    ]


def _last(location: str) -> str:
    """The last part of a path that says something."""
    parts = [part for part in location.split("/") if part and part != "checkpoints"]
    named = [part for part in parts if part != f"model{SUFFIX}"]
    return (named or parts or [location])[-1]
