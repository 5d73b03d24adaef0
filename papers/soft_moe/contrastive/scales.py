"""The scale of Soft MoE's appendix F.1: images and texts.

In sources, ``soft_moe`` is ``vmoe/projects/soft_moe/configs`` of google-research/vmoe.
"""

from dataclasses import replace
from typing import Any, cast

from orchestrator.config import DataConfig, RunConfig, TrainConfig
from orchestrator.optimizers import AdamWConfig
from orchestrator.schedules import RsqrtConfig
from orchestrator.sweeps.scales import Scale
from orchestrator.tasks import ClassificationConfig
from papers.scales import VITS, last_half
from wings.image_text.contrastive import ContrastiveConfig
from wings.image_text.presets import TEXT_G, TWO_TOWERS
from wings.image_text.towers import in_image_tower
from wings.image_text.two_towers import TwoTowersConfig


def last_half_of_image(run: RunConfig) -> str:
    """Returns the last half of the blocks of the image tower."""
    return last_half(replace(run, model=cast(TwoTowersConfig, run.model).image, task=ClassificationConfig()))


def _towers(names: str) -> dict[str, dict[str, Any]]:
    return {name: in_image_tower(VITS[name]) for name in names.split()}


# The recipe of appendix F.1 of Soft MoE: soft_moe/pretrain_laion.py. Sizes with patches of 14 pixels are left
# out, because 14 does not divide 256.
_LAION = RunConfig(
    model=TWO_TOWERS["B/16-laion"],
    task=ContrastiveConfig(loss="sigmoid"),
    data=DataConfig(batch_size=16_384, eval_resize="square", eval_crop=1.0),
    train=TrainConfig(
        steps=750_000,
        lr=1e-3,
        report_every=100,
        eval_every=10_000,
        schedule=RsqrtConfig(warmup_steps=20_000, cooldown_steps=20_000, timescale=10_000),
        optimizer=AdamWConfig(weight_decay=0.1),  # kernels; clipped at 1.0, the default
    ),
)
# Section 4: steps of 18 billion images; batch, rate and schedule of LiT are not printed and are those of
# LAION. The text tower is that of ViT-g.
_TABLE_3 = {
    **{f"model.text.{name}": getattr(TEXT_G, name) for name in ("width", "depth", "heads", "mlp_dim")},
    "model.image.image_size": 224,
    "task.loss": "softmax",
    "train.steps": 18_000_000_000 // 16_384,
}
SCALES = {
    "laion": Scale(
        base=_LAION,
        sizes=_towers("S16 B16 L16"),
        experts=128,
        bases={"lit": _TABLE_3},
        sizes_of={"lit": _towers("S16 S14 B16 L16 H14")},
    ),
}
