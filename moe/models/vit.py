"""A Vision Transformer with optional MoE blocks.

Source: the models of Soft MoE (Puigcerver et al. 2023, sections 3.3-3.4) and V-MoE (Riquelme et al. 2021), as
in their released code: the encoder of `moe.encoder`, and a head that starts at zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from moe.config import DropoutRate, PositiveFloat, PositiveInt
from moe.dense import Activation, AttentionPooling, ConvStem, Head, sincos2d, stem_channels
from moe.encoder import DROPOUT_SALT, Encoder, EncoderConfig, blocks_of
from moe.init import Draw, dropout, mix, normal, split, zeros
from moe.model import Costs, ImageModelConfig
from moe.overrides import AS_TRAINED, RoutingOverrides


@dataclass(frozen=True, kw_only=True)
class ViTConfig(EncoderConfig, ImageModelConfig):
    """A Vision Transformer; with `moe`, some of its blocks have experts in place of the MLP.

    Attributes:
        patch_size: pixels of a patch's side; it divides `image_size`, and each patch becomes a token.
        width, depth, heads, mlp_dim, qk_norm, moe: as those of an `EncoderConfig`.
        stem: ``conv`` makes tokens by convolutions (`moe.dense.ConvStem`); None by one projection per patch.
        pooling: the head's input: the mean of the tokens (``gap``), a class token (``token``: the first,
            routed like any other), or the output of a learned probe that attends to the tokens (``map``).
        position: position embedding. The learned one covers the class token, ``sincos2d`` does not.
        representation_size: width of a tanh layer between pooling and head; None for no such layer.
        gelu: by ``tanh``, as JAX computes it, or ``exact``, as most models of timm and Hugging Face; in MLPs,
            experts, pooling and stem.
        norm_eps: epsilon of the layer norms, except those of queries and keys.
        dropout: dropout of tokens after the position embedding and after attention, and after both layers of
            dense MLPs, as `dropout_rate` of the authors' encoder; experts have `moe.expert_dropout`.
        drop_path: rate at which an image skips attention, and the MLP or experts, of a block in training
            (stochastic depth, Huang et al. 2016). Its tokens have then been routed, and count as others do.
        drop_path_schedule: ``linear``: from 0 in the first block to `drop_path` in the last, as timm;
            ``constant``: the same in all, as DeiT III.
        layer_scale: initial value of a learned factor for each entry of what attention, and the MLP or
            experts, add (LayerScale, Touvron et al. 2021); None for no factors. DeiT III has 1e-4.
        head_bias: initial bias of the head. The authors' sigmoid losses start from -ln(num_classes) or -10;
            a softmax loss is not affected.
    """

    kind: Literal["vit"] = "vit"
    patch_size: PositiveInt = 16
    stem: Literal["conv"] | None = None
    pooling: Literal["gap", "token", "map"] = "gap"
    position: Literal["learned", "sincos2d", "none"] = "learned"
    representation_size: PositiveInt | None = None
    qk_norm: bool = True
    gelu: Literal["tanh", "exact"] = "tanh"
    norm_eps: PositiveFloat = 1e-6
    dropout: DropoutRate = 0.0
    drop_path: DropoutRate = 0.0
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    layer_scale: PositiveFloat | None = None
    head_bias: float = 0.0

    def check(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if self.stem:
            stem_channels(self.width, self.patch_size)
        super().check()
        if self.position == "sincos2d" and (self.width % 4 or self.width < 8):
            raise ValueError(f"position='sincos2d' needs a width in multiples of 4 from 8, got {self.width}")
        if self.moe and not self.moe.residual and (self.drop_path or self.layer_scale):
            raise ValueError(
                f"drop_path={self.drop_path:g} and layer_scale={self.layer_scale} are for what a block adds,"
                " and with moe.residual=False experts add to nothing: use drop_path=0 and layer_scale=None"
            )

    def check_inputs(self, inputs: Tensor) -> None:
        """As `ImageModelConfig` checks; without positions, sides may be any multiple of the patches'."""
        height, width = inputs.shape[-2:]
        if self.position != "none" or inputs.ndim != 4 or height % self.patch_size or width % self.patch_size:
            super().check_inputs(inputs)

    def build(self, *, seed: int | None = 0) -> "ViT":
        return ViT(self, seed=seed)

    def grid(self) -> int:
        """Returns the number of patches per side of an image."""
        return self.image_size // self.patch_size

    def tokens(self) -> int:
        """Returns the number of tokens per image, including a class token."""
        return self.grid() ** 2 + (self.pooling == "token")

    def size(self) -> str:
        return f"{super().size()}p{self.patch_size}"

    def drop_rates(self) -> list[float]:
        """Returns each block's rate of drop path."""
        last = self.depth - 1
        if self.drop_path_schedule == "constant" or not last:
            return [self.drop_path] * self.depth
        return [self.drop_path * block / last for block in range(self.depth)]

    def activation(self) -> Activation:
        return "gelu" if self.gelu == "tanh" else "exact_gelu"

    def costs(
        self, overrides: RoutingOverrides = AS_TRAINED, *, number: int = 4, frozen: Sequence[str] = ()
    ) -> Costs:
        D, S, features = self.width, self.tokens(), self.representation_size or 0
        channels = stem_channels(D, self.patch_size) if self.stem else ()
        outside = 3 * self.image_size**2 + S * (D + 2) + D + 2 * features
        outside += sum(3 * n * (self.image_size >> i) ** 2 for i, n in enumerate(channels, start=1))
        embed = self.grid() ** 2 * D * (D if self.stem else 3 * self.patch_size**2)
        embed += sum(
            (self.image_size >> i) ** 2 * 9 * before * after
            for i, (before, after) in enumerate(pairwise([3, *channels]), start=1)
        )
        return self.encoder_costs(
            overrides,
            number,
            embed=embed,
            head=D * features + (features or D) * self.num_classes,
            outside=outside,
            map_pooling=self.pooling == "map",
            layer_scale=self.layer_scale is not None,
        )


class ViT(Encoder[ViTConfig]):
    """The module of a `ViTConfig`."""

    undecayed: ClassVar = ("position_SD",)

    def add_layers(self) -> None:
        config, activation = self.config, self.config.activation()
        if config.stem:
            self.embed = ConvStem(config.width, config.patch_size, activation=activation)
        else:
            self.embed = nn.Conv2d(3, config.width, config.patch_size, config.patch_size)
        if config.pooling == "token":
            self.class_token_D = nn.Parameter(torch.empty(config.width))
        if config.position == "learned":
            self.position_SD = nn.Parameter(torch.empty(config.tokens(), config.width))
        self.blocks = blocks_of(
            config,
            config.drop_rates(),
            dropout=config.dropout,
            norm_eps=config.norm_eps,
            activation=activation,
            layer_scale=config.layer_scale,
        )
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        if config.pooling == "map":
            self.pool = AttentionPooling(
                config.width,
                config.heads,
                config.mlp_dim,
                qk_norm=config.qk_norm,
                norm_eps=config.norm_eps,
                activation=activation,
            )
        if config.representation_size:
            self.pre_logits = nn.Linear(config.width, config.representation_size)
        self.head = Head(config.representation_size or config.width, config.num_classes, config.head_bias)

    def draws(self) -> dict[str, Draw]:
        return {"position_SD": normal(0.02), "class_token_D": zeros()}

    def embedded(self, inputs: Tensor, keys_B: Tensor | None = None) -> Tensor:
        # Contiguous, or every LayerNorm of the residual stream would copy its input.
        x_BSD = self.embed(inputs).flatten(2).transpose(1, 2).contiguous()
        if self.config.position == "sincos2d":
            x_BSD = x_BSD + sincos2d(self.config.grid(), self.config.width, like=x_BSD)
        if self.config.pooling == "token":
            x_BSD = torch.cat([self.class_token_D.expand(x_BSD.shape[0], 1, -1), x_BSD], 1)
        if self.config.position == "learned":
            x_BSD = x_BSD + self.position_SD
        if self.config.dropout and keys_B is not None:
            keys_BS = split(mix(keys_B, DROPOUT_SALT - 1), x_BSD.shape[1])
            x_BSD = dropout(x_BSD, self.config.dropout, keys_BS)
        return x_BSD

    def heads(self, x_BSD: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.pooled(x_BSD))}

    def pooled(self, x_BSD: Tensor) -> Tensor:
        """Pools the normalised tokens: (B, S, D) -> (B, width or representation_size), the head's input."""
        if self.config.pooling == "map":
            x_BD = self.pool(x_BSD)
        else:
            x_BD = x_BSD[:, 0] if self.config.pooling == "token" else x_BSD.mean(1)
        return self.pre_logits(x_BD).tanh() if self.config.representation_size else x_BD
