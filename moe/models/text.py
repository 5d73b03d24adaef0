"""A text tower: a Transformer over the tokens of a text, through the encoder of `moe.encoder`.

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
from moe.encoder import Encoder, EncoderConfig, blocks_of
from moe.init import Draw, normal
from moe.model import Costs
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.tokenizers import END, TokenizerConfig, WordsConfig


@dataclass(frozen=True, kw_only=True)
class TextConfig(EncoderConfig):
    """A text tower. It is a part of models, and none by itself, because it takes no images.

    Attributes:
        tokenizer: makes tokens of texts; commands take that of the data.
        vocabulary: rows of the token embedding, at least the tokenizer's; commands take those.
        length: tokens of a text, with its end; longer texts are cut.
        width, depth, heads, mlp_dim, qk_norm: as those of an `EncoderConfig`.
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

    @property
    def causal(self) -> bool:
        return self.attention == "causal"

    def check(self) -> None:
        super().check()
        if self.tokenizer.size() > self.vocabulary:
            raise ValueError(
                f"vocabulary={self.vocabulary} is less than the tokenizer's {self.tokenizer.size()} tokens"
            )
        self.check_routed_alone("texts")

    def build(self, *, seed: int | None = 0) -> "TextTower":
        return TextTower(self, seed=seed)

    def example(self, count: int) -> Tensor:
        return torch.zeros(count, self.length, dtype=torch.int32)

    def tokens(self) -> int:
        return self.length

    def costs(
        self, overrides: RoutingOverrides = AS_TRAINED, *, number: int = 4, frozen: Sequence[str] = ()
    ) -> Costs:
        outside = self.length * (self.width + 2) + self.width
        return self.encoder_costs(overrides, number, outside=outside, map_pooling=self.pooling == "map")


class TextTower(Encoder[TextConfig]):
    """The module of a `TextConfig`. It reads tokens, (B, length); its head ``pooled``, (B, width), is
    what the owner's head projects.
    """

    undecayed: ClassVar = ("embed_VD", "position_LD")

    def add_layers(self) -> None:
        config = self.config
        self.embed_VD = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.position_LD = nn.Parameter(torch.empty(config.length, config.width))
        self.blocks = blocks_of(config, dropout=0.0, causal=config.causal)
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        if config.pooling == "map":
            self.pool = AttentionPooling(config.width, config.heads, config.mlp_dim, qk_norm=config.qk_norm)

    def draws(self) -> dict[str, Draw]:
        return {"embed_VD": normal(self.config.width**-0.5), "position_LD": normal(0.02)}

    def embedded(self, inputs: Tensor, keys_B: Tensor | None = None) -> Tensor:
        return F.embedding(inputs, self.embed_VD) + self.position_LD

    def heads(self, x_BSD: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        return {"pooled": self.pooled(x_BSD, inputs)}

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
