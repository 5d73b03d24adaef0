"""A causal decoder over bytes: an encoder (`moe.encoder`) in which each token attends to itself and to those
before it.

Source: GPT-2 (Radford et al. 2019): pre-norm, learned positions, a norm before the head; its head here has
weights of its own, which start at zero. The article SoftMoE: Beyond Hard Expert Selection trains a decoder
with Soft MoE, which lets a token see later ones (section 6 of the paper of Soft MoE): its router is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.config import PositiveInt
from moe.dense import Head
from moe.encoder import Encoder, EncoderConfig, blocks_of
from moe.init import Draw, normal
from moe.model import Costs
from moe.overrides import AS_TRAINED, RoutingOverrides

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(EncoderConfig):
    """A decoder, which predicts the byte after each byte of a sequence.

    Attributes:
        length: bytes of a sequence; commands take that of the data.
        width, depth, heads, mlp_dim, qk_norm: as those of an `EncoderConfig`.
        moe: experts in place of some MLPs, for each sequence by itself.
    """

    kind: Literal["decoder"] = "decoder"
    length: PositiveInt = 128
    depth: PositiveInt = 6

    gives: ClassVar = ("next_byte",)

    @property
    def causal(self) -> bool:
        return True

    def check(self) -> None:
        super().check()
        self.check_routed_alone("sequences")

    def build(self, *, seed: int | None = 0) -> "Decoder":
        return Decoder(self, seed=seed)

    def example(self, count: int) -> Tensor:
        return torch.zeros(count, self.length, dtype=torch.int32)

    def tokens(self) -> int:
        return self.length

    def costs(
        self, overrides: RoutingOverrides = AS_TRAINED, *, number: int = 4, frozen: Sequence[str] = ()
    ) -> Costs:
        head = self.length * self.width * BYTES
        # tokens, the last norm's input, output and scales, logits
        outside = self.length * (2 * self.width + 3 + BYTES)
        return self.encoder_costs(overrides, number, head=head, largest=head, outside=outside)


class Decoder(Encoder[DecoderConfig]):
    """The module of a `DecoderConfig`. It reads bytes (B, S), at most `length` of each sequence; its head
    ``next_byte``, (B, S, 256), has the logits of the byte after each.
    """

    undecayed: ClassVar = ("embed_VD", "position_LD")

    def add_layers(self) -> None:
        config = self.config
        self.embed_VD = nn.Parameter(torch.empty(BYTES, config.width))
        self.position_LD = nn.Parameter(torch.empty(config.length, config.width))
        self.blocks = blocks_of(config, dropout=0.0, causal=True)
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.head = Head(config.width, BYTES, 0.0)

    def draws(self) -> dict[str, Draw]:
        return {"embed_VD": normal(0.02), "position_LD": normal(0.02)}

    def embedded(self, inputs: Tensor, keys_B: Tensor | None = None) -> Tensor:
        return F.embedding(inputs, self.embed_VD) + self.position_LD[: inputs.shape[1]]

    def heads(self, x_BSD: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        # A copy: FSDP warns of a view, which the output of a linear layer is here.
        return {"next_byte": self.head(x_BSD).clone()}
