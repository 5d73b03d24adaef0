"""A text tower: a Transformer over the tokens of a text, of the blocks of the ViT.

Source: the text towers of big_vision (`models/proj/image_text/text_transformer.py`) and of the authors of
Soft MoE (vmoe, `projects/contrastive/models.py`): pre-norm, padding is not masked, one of five poolings, a
linear head. CLIP's (Radford et al. 2021) attends to earlier tokens only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.config import PositiveInt
from moe.dense import AttentionPooling
from moe.init import Draw, normal
from moe.layer import MoEConfig
from moe.model import Model, ModelConfig, Output
from moe.models.vit import blocks_of
from moe.models.vit_costs import encoder_activations, encoder_macs
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.tokenizers import END, TokenizerConfig, WordsConfig
from moe.trace import Activations


@dataclass(frozen=True, kw_only=True)
class TextConfig(ModelConfig):
    """A text tower. It is a part of models, and none by itself, because it takes no images.

    Attributes:
        tokenizer: makes tokens of texts; commands take that of the data.
        vocabulary: rows of the token embedding, at least the tokenizer's; commands take those.
        length: tokens of a text, with its end; longer texts are cut.
        width, depth, heads, mlp_dim, qk_norm: as those of a ViT.
        attention: of each token to all, or to itself and those before it.
        pooling: the head's input: the last token (``last``), the first, the mean of the tokens up to the end
            of the text, or the output of a learned probe that attends to all tokens (``map``).
        moe: experts in place of some MLPs, for each text by itself.
    """

    tokenizer: TokenizerConfig = WordsConfig()
    vocabulary: PositiveInt = 32_000
    length: PositiveInt = 16
    width: PositiveInt = 512
    depth: PositiveInt = 12
    heads: PositiveInt = 8
    mlp_dim: PositiveInt = 2048
    attention: Literal["full", "causal"] = "full"
    pooling: Literal["last", "first", "mean", "map"] = "last"
    qk_norm: bool = False
    moe: MoEConfig | None = None

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.attention == "causal"

    def check(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.tokenizer.size() > self.vocabulary:
            raise ValueError(
                f"vocabulary={self.vocabulary} is less than the tokenizer's {self.tokenizer.size()} tokens"
            )
        if self.moe and self.moe.images_per_group > 1:
            raise ValueError(f"texts are routed one by one, got images_per_group={self.moe.images_per_group}")
        self.moe_blocks()

    def build(self, *, seed: int | None = 0) -> "TextTower":
        return TextTower(self, seed=seed)

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
        return encoder_macs(self.at_point(overrides), overrides, embed=0, head=0)

    def largest_matmul(self) -> float:
        return self.length * self.width * self.mlp_dim

    def activations(self, number: int = 4, frozen: Sequence[str] = ()) -> Activations:
        return encoder_activations(self, number, outside=self.length * (self.width + 2) + self.width)


class TextTower(Model[TextConfig]):
    """The module of a `TextConfig`. Its output is the pooled text, which the owner's head projects."""

    undecayed: ClassVar = ("embed_VD", "position_LD")

    def add_layers(self) -> None:
        config = self.config
        self.embed_VD = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.position_LD = nn.Parameter(torch.empty(config.length, config.width))
        self.blocks = blocks_of(config, dropout=0.0, causal=config.causal)
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        if config.pooling == "map":
            self.pool = AttentionPooling(config.width, config.heads, config.mlp_dim, qk_norm=config.qk_norm)

    def units(self) -> Sequence[nn.Module]:
        return [*self.blocks]

    def draws(self) -> dict[str, Draw]:
        return {"embed_VD": normal(self.config.width**-0.5), "position_LD": normal(0.02)}

    def forward(
        self,
        images: Tensor,
        valid_B: Tensor | None = None,
        keys_B: Tensor | None = None,
        routing_overrides: RoutingOverrides = AS_TRAINED,
        return_stats: bool = False,
        return_routings: bool = False,
    ) -> Output:
        """Reads tokens (B, length), which take the place of images; its head is ``pooled``, (B, width)."""
        tokens_BL = images
        valid_B = tokens_BL.new_ones(len(tokens_BL), dtype=torch.float32) if valid_B is None else valid_B
        x_BLD = F.embedding(tokens_BL, self.embed_VD) + self.position_LD
        x_BLD, aux, stats, routings = self.through(
            x_BLD, valid_B, keys_B, routing_overrides, return_stats, return_routings
        )
        return Output({"pooled": self.pooled(self.norm(x_BLD), tokens_BL)}, aux, stats, routings)

    def pooled(self, x_BLD: Tensor, tokens_BL: Tensor) -> Tensor:
        """Pools the normalised tokens: (B, L, D) -> (B, D)."""
        match self.config.pooling:
            case "last":
                return x_BLD[:, -1]
            case "first":
                return x_BLD[:, 0]
            case "map":
                return self.pool(x_BLD)
            case "mean":
                ends = (tokens_BL == END).int()
                inside = (ends.cumsum(1) - ends == 0).to(x_BLD.dtype).unsqueeze(-1)
                return (x_BLD * inside).sum(1) / inside.sum(1)
