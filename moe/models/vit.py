"""A pre-norm Vision Transformer with optional MoE blocks.

Source: the models of Soft MoE (Puigcerver et al. 2023, sections 3.3-3.4) and V-MoE (Riquelme et al. 2021), as
in their released code: LayerNorm with epsilon 1e-6, tanh GELU, a head that starts at zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from moe.config import DropoutRate, PositiveFloat, PositiveInt
from moe.dense import MLP, Activation, Attention, AttentionPooling, ConvStem, Head, sincos2d, stem_channels
from moe.init import Draw, constant, dropout, mix, normal, split, zeros
from moe.layer import MoEConfig, MoELayer
from moe.model import Model, ModelConfig, Output, UnitOutput, with_experts, without_experts
from moe.models.vit_costs import activations, macs
from moe.models.vit_points import at_points
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.trace import Activations

if TYPE_CHECKING:
    from moe.models.vit_costs import Encoder

# Salts of keys for dropout begin here; smaller salts are MoE layers'.
DROPOUT_SALT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ViTConfig(ModelConfig):
    """A Vision Transformer; with `moe`, some of its blocks have experts in place of the MLP.

    Attributes:
        image_size: pixels of an image's side.
        patch_size: pixels of a patch's side; it divides `image_size`, and each patch becomes a token.
        width: length of the vector of a token.
        depth: blocks, each of attention and an MLP or experts.
        heads: attention heads.
        mlp_dim: hidden units of a dense MLP.
        num_classes: outputs of the head; commands take the number of classes of the data.
        stem: ``conv`` makes tokens by convolutions (`moe.dense.ConvStem`); None by one projection per patch.
        pooling: the head's input: the mean of the tokens (``gap``), a class token (``token``: the first,
            routed like any other), or the output of a learned probe that attends to the tokens (``map``).
        position: position embedding. The learned one covers the class token, ``sincos2d`` does not.
        representation_size: width of a tanh layer between pooling and head; None for no such layer.
        qk_norm: layer-normalises queries and keys, as in Soft MoE; V-MoE does not.
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
    image_size: PositiveInt = 224
    patch_size: PositiveInt = 16
    width: PositiveInt = 384
    depth: PositiveInt = 12
    heads: PositiveInt = 6
    mlp_dim: PositiveInt = 1536
    num_classes: PositiveInt = 1000
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
    moe: MoEConfig | None = None

    def check(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if self.stem:
            stem_channels(self.width, self.patch_size)
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.position == "sincos2d" and (self.width % 4 or self.width < 8):
            raise ValueError(f"position='sincos2d' needs a width in multiples of 4 from 8, got {self.width}")
        if self.moe and not self.moe.residual and (self.drop_path or self.layer_scale):
            raise ValueError(
                f"drop_path={self.drop_path:g} and layer_scale={self.layer_scale} are for what a block adds,"
                " and with moe.residual=False experts add to nothing: use drop_path=0 and layer_scale=None"
            )
        self.moe_blocks()

    def check_images(self, images: Tensor) -> None:
        """As `ModelConfig.check_images`; without positions, sides may be any multiple of the patches'."""
        height, width = images.shape[-2:]
        if self.position != "none" or images.ndim != 4 or height % self.patch_size or width % self.patch_size:
            super().check_images(images)

    def build(self, *, seed: int | None = 0) -> "ViT":
        return ViT(self, seed=seed)

    def grid(self) -> int:
        """Returns the number of patches per side of an image."""
        return self.image_size // self.patch_size

    def tokens(self) -> int:
        """Returns the number of tokens per image, including a class token."""
        return self.grid() ** 2 + (self.pooling == "token")

    def size(self) -> str:
        return f"w{self.width}d{self.depth}p{self.patch_size}"

    def moe_blocks(self) -> tuple[int, ...]:
        return self.moe.blocks(self.depth) if self.moe else ()

    def expert_dim(self) -> int:
        """Returns the number of hidden units per expert."""
        return (self.moe and self.moe.expert_dim) or self.mlp_dim

    def drop_rates(self) -> list[float]:
        """Returns each block's rate of drop path."""
        last = self.depth - 1
        if self.drop_path_schedule == "constant" or not last:
            return [self.drop_path] * self.depth
        return [self.drop_path * block / last for block in range(self.depth)]

    def activation(self) -> Activation:
        return "gelu" if self.gelu == "tanh" else "exact_gelu"

    def macs(self, overrides: RoutingOverrides = AS_TRAINED) -> dict[str, float]:
        return macs(self.at_point(overrides), overrides)

    def largest_matmul(self) -> float:
        return self.tokens() * self.width * self.mlp_dim

    def activations(self, number: int = 4, frozen: Sequence[str] = ()) -> Activations:
        return activations(self, number)


class Block(nn.Module):
    """Attention, then an MLP or experts, each behind a norm and with a skip connection.

    `hidden` is the number of hidden units of the MLP or of each expert; `index` is the block's position.
    `drop_path` is the rate of this block.
    """

    computes: ClassVar = ("attended", "routed")

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        heads: int,
        qk_norm: bool,
        dropout: float,
        moe: MoEConfig | None,
        index: int,
        norm_eps: float = 1e-6,
        activation: Activation = "gelu",
        causal: bool = False,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.layer_scale = dropout, layer_scale
        # Tensors, as in `MoELayer`, whose salts are smaller.
        self.salt = torch.tensor(DROPOUT_SALT + index, device="cpu")
        self.drop_path = torch.tensor(drop_path, device="cpu") if drop_path else None
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = Attention(width, heads, qk_norm=qk_norm, causal=causal)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.residual = not moe or moe.residual
        self.mlp = (
            MoELayer(moe, dim=width, hidden=hidden, block=index, activation=activation)
            if moe
            else MLP(width, hidden, dropout=dropout, activation=activation)
        )
        self.scale1_D, self.scale2_D = (
            nn.Parameter(torch.empty(width)) if layer_scale else None for _ in range(2)
        )

    def draws(self) -> dict[str, Draw]:
        return dict.fromkeys(("scale1_D", "scale2_D"), constant(self.layer_scale or 0.0))

    def forward(
        self,
        x_BSD: Tensor,
        valid_B: Tensor,
        keys_B: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        return_stats: bool = False,
        return_routing: bool = False,
    ) -> UnitOutput:
        y_BSD, keys_BS = self.attention(self.norm1(x_BSD)), None
        if self.dropout and keys_B is not None:
            keys_BS = split(mix(keys_B, self.salt), x_BSD.shape[1])
            y_BSD = dropout(y_BSD, self.dropout, mix(keys_BS, 2))
        kept_2B = self.kept(keys_B)
        x_BSD = self.add(x_BSD, y_BSD, 0, kept_2B)
        if not isinstance(self.mlp, MoELayer):
            y_BSD = self.mlp(self.norm2(x_BSD), keys_BS)
            return without_experts(self.add(x_BSD, y_BSD, 1, kept_2B))
        y_BSD, routing = self.mlp(
            self.norm2(x_BSD), valid_B, keys_B, overrides, return_stats or return_routing, True
        )
        x_BSD = self.add(x_BSD, y_BSD, 1, kept_2B)
        return with_experts(x_BSD, routing, return_routing=return_routing)

    def attended(self, x_BSD: Tensor) -> Tensor:
        """Returns the block's input with what attention adds to it, in evaluation."""
        return self.add(x_BSD, self.attention(self.norm1(x_BSD)), 0)

    def routed(self, x_BSD: Tensor, valid_B: Tensor, overrides: RoutingOverrides) -> Tensor:
        """Returns the block's output from that of `attended`, in evaluation of a block with experts."""
        return self.add(x_BSD, self.mlp(self.norm2(x_BSD), valid_B, None, overrides), 1)

    def kept(self, keys_B: Tensor | None) -> Tensor | None:
        """Returns (2, B), what drop path multiplies the outputs of an image's attention and MLP with: 0, or
        1 / (1 - rate); None if it is off.
        """
        if self.drop_path is None or keys_B is None:
            return None
        ones_2B1 = keys_B.new_ones(2, len(keys_B), 1, dtype=torch.float32)
        return dropout(ones_2B1, self.drop_path, split(mix(keys_B, ~self.salt), 2).T).squeeze(-1)

    def add(self, x_BSD: Tensor, y_BSD: Tensor, branch: int, kept_2B: Tensor | None = None) -> Tensor:
        """Adds to x what attention (branch 0), or the MLP or the experts (1), make of it."""
        if (scale_D := (self.scale1_D, self.scale2_D)[branch]) is not None:
            y_BSD = y_BSD * scale_D
        if kept_2B is not None:
            y_BSD = y_BSD * kept_2B[branch].to(y_BSD.dtype)[:, None, None]
        return x_BSD + y_BSD if self.residual or branch == 0 else y_BSD


def blocks_of(config: "Encoder", drop_rates: Sequence[float] = (), **options: Any) -> nn.ModuleList:
    """Makes the blocks of a config, with experts where it has them; `options` are those of all blocks."""
    moe_blocks = config.moe_blocks()
    return nn.ModuleList(
        Block(
            config.width,
            config.expert_dim() if i in moe_blocks else config.mlp_dim,
            heads=config.heads,
            qk_norm=config.qk_norm,
            moe=config.moe if i in moe_blocks else None,
            index=i,
            drop_path=drop_rates[i] if drop_rates else 0.0,
            **options,
        )
        for i in range(config.depth)
    )


class ViT(Model[ViTConfig]):
    """The module of a `ViTConfig`."""

    undecayed: ClassVar = ("position_SD",)
    computes: ClassVar = ("at_points",)

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

    def units(self) -> Sequence[nn.Module]:
        return [*self.blocks]

    def draws(self) -> dict[str, Draw]:
        return {"position_SD": normal(0.02), "class_token_D": zeros()}

    def forward(
        self,
        images: Tensor,
        valid_B: Tensor | None = None,
        keys_B: Tensor | None = None,
        routing_overrides: RoutingOverrides = AS_TRAINED,
        return_stats: bool = False,
        return_routings: bool = False,
    ) -> Output:
        B = images.shape[0]
        images, valid_B, keys_B = self.whole_groups(images, valid_B, keys_B, routing_overrides)
        x_BSD = self.embedded(images)
        if self.config.dropout and keys_B is not None:
            keys_BS = split(mix(keys_B, DROPOUT_SALT - 1), x_BSD.shape[1])
            x_BSD = dropout(x_BSD, self.config.dropout, keys_BS)
        x_BSD, aux, stats, routings = self.through(
            x_BSD, valid_B, keys_B, routing_overrides, return_stats, return_routings
        )
        logits = self.head(self.pooled(self.norm(x_BSD[:B])))
        return Output({"logits": logits}, aux, stats, routings)

    def at_points(
        self, images: Tensor, valid_B: Tensor | None, points: Sequence[RoutingOverrides]
    ) -> list[dict[str, Tensor]]:
        return [{"logits": logits} for logits in at_points(self, images, valid_B, points)]

    def embedded(self, images: Tensor) -> Tensor:
        """Returns the first block's input: (B, 3, H, W) -> (B, S, D)."""
        # Contiguous, or every LayerNorm of the residual stream would copy its input.
        x_BSD = self.embed(images).flatten(2).transpose(1, 2).contiguous()
        if self.config.position == "sincos2d":
            x_BSD = x_BSD + sincos2d(self.config.grid(), self.config.width, like=x_BSD)
        if self.config.pooling == "token":
            x_BSD = torch.cat([self.class_token_D.expand(x_BSD.shape[0], 1, -1), x_BSD], 1)
        if self.config.position == "learned":
            x_BSD = x_BSD + self.position_SD
        return x_BSD

    def pooled(self, x_BSD: Tensor) -> Tensor:
        """Pools the normalised tokens: (B, S, D) -> (B, width or representation_size), the head's input."""
        if self.config.pooling == "map":
            x_BD = self.pool(x_BSD)
        else:
            x_BD = x_BSD[:, 0] if self.config.pooling == "token" else x_BSD.mean(1)
        return self.pre_logits(x_BD).tanh() if self.config.representation_size else x_BD
