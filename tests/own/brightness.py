"""A task whose target is a number of each sample, beside a field of bytes: how bright an image is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from moe.model import ModelConfig
from orchestrator.data.batch import Batch
from orchestrator.data.fields import BytesField, Field, NumberField
from orchestrator.tasks import TaskConfig
from orchestrator.tasks.base import Heads


@dataclass(frozen=True, kw_only=True)
class BrightnessConfig(TaskConfig):
    kind: Literal["brightness"] = "brightness"

    qualities: ClassVar = ("val/within",)
    described: ClassVar = {
        "train/loss_brightness": ("-", "mean squared error"),
        "val/within": ("fraction", "images whose brightness is found to 0.1"),
    }

    def fields(self, model: ModelConfig) -> Mapping[str, Field]:
        return {"brightness": NumberField(), "text": BytesField(length=6)}

    def chance(self, model: ModelConfig) -> float:
        return 0.0

    def loss_share(self, heads: Heads, batch: Batch, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        loss = ((heads["logits"][:, 0] - batch["brightness"].float()) ** 2).sum() / batch_size
        return loss, {"train/loss_brightness": loss.detach()}

    def scores(self, heads: Heads, batch: Batch) -> dict[str, Tensor]:
        near_B = (heads["logits"][:, 0] - batch["brightness"]).abs() < 0.1
        return {"near": (near_B * batch.valid).sum(), "samples": batch.valid.sum()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"within": float(sums["near"] / sums["samples"])}
