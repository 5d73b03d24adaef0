"""Next token: a decoder predicts each byte of a text from the bytes before it.

All figures are in bits per byte, nats / ln 2, which compare with compressors. The quality is 2 to the minus
bits per byte, in 0..1: the likelihood of a byte, as a geometric mean.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.model import Model, ModelConfig
from moe.overrides import RoutingOverrides
from moe.parallel import sum_over_ranks
from orchestrator.data.batch import Batch
from orchestrator.data.fields import Field
from orchestrator.tasks.base import Heads, TaskConfig
from wings.language.decoder import BYTES
from wings.language.sequences import SEQUENCE, SequenceField, length_of

PREFIXES = 8  # of each sequence, that an evaluation runs alone


@dataclass(frozen=True, kw_only=True)
class NextTokenConfig(TaskConfig):
    """Prediction of the next byte."""

    kind: Literal["next_token"] = "next_token"

    qualities: ClassVar = ("val/likelihood",)
    needs: ClassVar = ("next_byte",)
    described: ClassVar = {
        "train/bits_per_byte": ("bits", "the part of the training loss from the text"),
        "val/bits_per_byte": (
            "bits",
            "mean over the validation text: of each byte, given those before it",
        ),
        "val/likelihood": ("fraction", "2 to the minus of it: the geometric mean of the bytes' likelihoods"),
        "val/loss": ("bits", "the same as val/bits_per_byte"),
    }

    @property
    def output(self) -> Literal["tokens"]:
        return "tokens"

    def fields(self, model: ModelConfig) -> Mapping[str, Field]:
        return {SEQUENCE: SequenceField(length=model.tokens() + 1)}

    def chance(self, model: ModelConfig) -> float:
        return 1 / BYTES

    def for_data(self, model: ModelConfig, path: str) -> Mapping[str, Any]:
        return {"model.length": length_of(path) - 1}

    def inputs(self, batch: Batch) -> Tensor:
        """Returns all bytes of each sequence but the last, (B, length) int32."""
        return batch[SEQUENCE][:, :-1].int()

    def loss_share(self, heads: Heads, batch: Batch, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        share = bits(heads["next_byte"], batch[SEQUENCE]).mean(1).sum() / batch_size
        return share, {"train/bits_per_byte": share.detach()}

    def scores(self, heads: Heads, batch: Batch) -> dict[str, Tensor]:
        bits_B = bits(heads["next_byte"], batch[SEQUENCE]).mean(1)
        return {"bits": bits_B @ batch.valid, "samples": batch.valid.sum()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        mean = float(sums["bits"] / sums["samples"])
        return {"likelihood": math.exp2(-mean), "bits_per_byte": mean, "loss": mean}

    @torch.no_grad()
    def of_model(self, model: Model, batch: Batch, point: RoutingOverrides) -> dict[str, float]:
        """Returns the bits of the bytes after some prefixes: with the whole sequence as input, and with each
        prefix alone. A model that sees no later bytes has the same twice.
        """
        length = batch[SEQUENCE].shape[1] - 1
        places = sorted({length * (1 + number) // PREFIXES - 1 for number in range(PREFIXES)} - {-1})

        def bits_of(inputs: Tensor) -> Tensor:
            heads = model(inputs, batch.valid, routing_overrides=point).heads
            return bits(heads["next_byte"], batch[SEQUENCE])

        alone = []
        for place in places:
            # Later bytes are zeros, because a shorter input could have other capacities.
            inputs = self.inputs(batch)
            inputs[:, place + 1 :] = 0
            alone.append(bits_of(inputs)[:, place])
        whole = bits_of(self.inputs(batch))[:, places]
        count = sum_over_ranks(batch.valid.sum())
        return {
            f"{name}_bits_per_byte": float(sum_over_ranks(found.mean(1) @ batch.valid) / count)
            for name, found in (("prefix", torch.stack(alone, 1)), ("whole", whole))
        }


def bits(logits_BLV: Tensor, sequence_BS: Tensor) -> Tensor:
    """Returns the bits of each byte of sequences but the first, (B, L), S = L + 1."""
    nats = F.cross_entropy(logits_BLV.transpose(1, 2), sequence_BS[:, 1:].long(), reduction="none")
    return nats / math.log(2)
