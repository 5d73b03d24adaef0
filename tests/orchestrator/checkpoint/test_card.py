"""The model card beside exported weights."""

import json
import math

from moe.cost import num_params
from orchestrator.checkpoint.card import model_card
from orchestrator.checkpoint.weights import signature_of
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest

ROUTED = {"model.moe.router.kind": "token_choice"}
SOURCE = {"kind": "timm", "location": "/home/me/vit_tiny", "sha256": "abc", "licence": "apache-2.0"}


def card_of(digits: str, *, metrics=None, source=None, step=200, **changes) -> str:
    run = override(RunConfig(), {"name": "tiny", "data.path": digits, "train.seed": 7, **ROUTED, **changes})
    metadata = {} if step is None else {"step": str(step)}
    signature = signature_of(run, classes=open_manifest(digits).classes)
    return model_card(run, signature, metrics=metrics or {}, metadata=metadata, source=source)


def test_what_a_card_says(digits):
    card = card_of(digits, metrics={"val/acc1": 0.9, "val/loss": 0.3}, source=SOURCE)
    manifest = open_manifest(digits)
    images = manifest.rows("val")
    error = math.sqrt(0.9 * 0.1 / images)
    for line in (
        "# tiny",
        f"`{digits.rpartition('/')[2]}`: ",
        f"SHA-256 `{manifest.digest()}`",
        f"200 steps of {RunConfig().data.batch_size} images",
        "seed 7",
        f"| val/acc1 | 0.9000 ± {error:.4f} |",
        "| val/loss | 0.3000 |",
        f"the standard error over {images:,} images",
        f"{num_params(override(RunConfig(), ROUTED).model):,} parameters",
        "- 873.1 kFLOP per image (a multiply-add is two)",
        "- training: 33.53 GFLOP (six)",
        "8 experts in blocks",
        '"kind": "token_choice"',
        "Weights of timm, `vit_tiny`, SHA-256 `abc`; licence: apache-2.0.",
    ):
        assert line in card, line
    assert "/home/me" not in card
    assert digits not in card


def test_what_nobody_knows(digits):
    """Neither a metric, nor data that is gone, nor a licence is made up."""
    card = card_of(digits, **{"data.path": "/gone/flowers", "train.init_from": "/a/run/checkpoints"})
    assert "Not measured at this step." in card
    assert "`flowers`; it was not there when this card was written." in card
    assert "Started from `run`. No licence is given." in card
    unlicensed = card_of(digits, source=SOURCE | {"licence": ""}, step=None)
    assert "licence: unknown: look it up where the weights were published." in unlicensed
    assert "Recipe" not in unlicensed, "an import was not trained here"
    assert "training: " not in unlicensed


def test_a_dense_model_has_no_routing(digits):
    run = override(RunConfig(), {"data.path": digits})
    card = model_card(run, signature_of(run), metrics={}, metadata={}, source=None)
    front = card.split("---")[1]
    assert "tags: [vision, vit]" in front
    assert "None: the model is dense." in card
    assert json.dumps({"kind": "token_choice"})[1:-1] not in card
