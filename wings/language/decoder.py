"""A causal decoder over bytes: the blocks of the ViT, of which each token attends to itself and those before.

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
from moe.init import Draw, normal
from moe.layer import MoEConfig
from moe.model import Model, ModelConfig, Output
from moe.models.vit import blocks_of
from moe.models.vit_costs import encoder_activations, encoder_macs
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.trace import Activations

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder, which predicts the byte after each byte of a sequence.

    Attributes:
        length: bytes of a sequence; commands take that of the data.
        width, depth, heads, mlp_dim, qk_norm: as those of a ViT.
        moe: experts in place of some MLPs, for each sequence by itself.
        num_classes: classes of the data. No weight depends on them.
    """

    kind: Literal["decoder"] = "decoder"
    length: PositiveInt = 128
    width: PositiveInt = 384
    depth: PositiveInt = 6
    heads: PositiveInt = 6
    mlp_dim: PositiveInt = 1536
    qk_norm: bool = False
    moe: MoEConfig | None = None
    num_classes: PositiveInt = 1

    gives: ClassVar = ("next_byte",)
    causal: ClassVar = True
    image_size: ClassVar = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    pooling: ClassVar = "none"

    def check(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.moe and self.moe.images_per_group > 1:
            raise ValueError(
                f"sequences are routed one by one, got images_per_group={self.moe.images_per_group}"
            )
        self.moe_blocks()

    def build(self, *, seed: int | None = 0) -> "Decoder":
        return Decoder(self, seed=seed)

    def example(self, count: int) -> Tensor:
        return torch.zeros(count, self.length, dtype=torch.int32)

    def tokens(self) -> int:
        return self.length

    def size(self) -> str:
        return f"w{self.width}d{self.depth}"

    def moe_blocks(self) -> tuple[int, ...]:
        return self.moe.blocks(self.depth) if self.moe else ()

    def expert_dim(self) -> int:
        """Returns the number of hidden units per expert."""
        return (self.moe and self.moe.expert_dim) or self.mlp_dim

    def macs(self, overrides: RoutingOverrides = AS_TRAINED) -> dict[str, float]:
        head = self.length * self.width * BYTES
        return encoder_macs(self.at_point(overrides), overrides, embed=0, head=head)

    def largest_matmul(self) -> float:
        return self.length * self.width * max(self.mlp_dim, BYTES)

    def activations(self, number: int = 4, frozen: Sequence[str] = ()) -> Activations:
        # tokens, the last norm's input, output and scales, logits
        outside = self.length * (2 * self.width + 3 + BYTES)
        return encoder_activations(self, number, outside=outside)


class Decoder(Model[DecoderConfig]):
    """The module of a `DecoderConfig`."""

    undecayed: ClassVar = ("embed_VD", "position_LD")

    def add_layers(self) -> None:
        config = self.config
        self.embed_VD = nn.Parameter(torch.empty(BYTES, config.width))
        self.position_LD = nn.Parameter(torch.empty(config.length, config.width))
        self.blocks = blocks_of(config, dropout=0.0, causal=True)
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.head = Head(config.width, BYTES, 0.0)

    def units(self) -> Sequence[nn.Module]:
        return [*self.blocks]

    def draws(self) -> dict[str, Draw]:
        return {"embed_VD": normal(0.02), "position_LD": normal(0.02)}

    def forward(
        self,
        images: Tensor,
        valid_B: Tensor | None = None,
        keys_B: Tensor | None = None,
        routing_overrides: RoutingOverrides = AS_TRAINED,
        return_stats: bool = False,
        return_routings: bool = False,
    ) -> Output:
        """Reads bytes (B, S), which take the place of images, at most `length` of each sequence. Its head
        ``next_byte``, (B, S, 256), has the logits of the byte after each.
        """
        bytes_BS = images
        valid_B = bytes_BS.new_ones(len(bytes_BS), dtype=torch.float32) if valid_B is None else valid_B
        x_BSD = F.embedding(bytes_BS, self.embed_VD) + self.position_LD[: bytes_BS.shape[1]]
        x_BSD, aux, stats, routings = self.through(
            x_BSD, valid_B, keys_B, routing_overrides, return_stats, return_routings
        )
        # A copy: FSDP warns of a view, which the output of a linear layer is here.
        logits_BSV = self.head(self.norm(x_BSD)).clone()
        return Output({"next_byte": logits_BSV}, aux, stats, routings)
