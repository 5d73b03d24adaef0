"""Learning from label proportions: of a batch, only the part that each class has in it is known.

Source: Dulac-Arnold et al. 2019, https://arxiv.org/abs/1905.12909, the cross-entropy of mean predictions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from moe import ModelConfig, gather
from orchestrator import Batch, Heads, TaskConfig


@dataclass(frozen=True, kw_only=True)
class ProportionsConfig(TaskConfig):
    kind: Literal["proportions"] = "proportions"

    qualities: ClassVar = ("val/recognised",)
    scope: ClassVar = "batch"
    described: ClassVar = {
        "train/loss_proportions": ("nats", "cross-entropy of the mean prediction and the proportions"),
        "val/recognised": ("fraction", "images whose class has the largest probability"),
    }

    def chance(self, model: ModelConfig) -> float:
        return 1 / model.num_classes

    def loss_share(self, heads: Heads, batch: Batch, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        classes = heads["logits"].shape[-1]
        mean_C = gather(heads["logits"].softmax(-1)).mean(0)
        proportion_C = gather(F.one_hot(batch["label"][:, 0], classes)).to(mean_C.dtype).mean(0)
        # Every worker knows the whole loss, and answers for its part.
        share = -(proportion_C * mean_C.log()).sum() * (len(batch) / batch_size)
        return share, {"train/loss_proportions": share.detach()}

    def scores(self, heads: Heads, batch: Batch) -> dict[str, Tensor]:
        right_B = heads["logits"].argmax(-1) == batch["label"][:, 0]
        return {"right": (right_B * batch.valid).sum(), "samples": batch.valid.sum()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"recognised": float(sums["right"] / sums["samples"])}
