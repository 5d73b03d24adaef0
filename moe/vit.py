"""A pre-norm Vision Transformer with optional MoE blocks.

Source: the models of Soft MoE (Puigcerver et al. 2023, sections 3.3-3.4) and V-MoE (Riquelme et al. 2021), as
in their released code: LayerNorm with epsilon 1e-6, tanh GELU, a head that starts at zero.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.config import Config, DropoutRate, PositiveInt
from moe.dense import MLP, Attention, AttentionPooling, ConvStem, Head, sincos2d, stem_channels
from moe.init import Draw, dropout, init_weights, mix, normal, split, zeros
from moe.layer import MoEConfig, MoELayer
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routing import LayerShape, RouterConfig, Routing

# Salts of keys for dropout begin here; smaller salts are MoE layers'.
DROPOUT_SALT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Config):
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
        dropout: dropout of tokens after the position embedding and after attention, and after both layers of
            dense MLPs, as `dropout_rate` of the authors' encoder; experts have `moe.expert_dropout`.
        head_bias: initial bias of the head. The authors' sigmoid losses start from -ln(num_classes) or -10;
            a softmax loss is not affected.
    """

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
    dropout: DropoutRate = 0.0
    head_bias: float = 0.0
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if self.stem:
            stem_channels(self.width, self.patch_size)
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.position == "sincos2d" and (self.width % 4 or self.width < 8):
            raise ValueError(f"position='sincos2d' needs a width in multiples of 4 from 8, got {self.width}")
        if self.moe:
            self.moe.blocks(self.depth)
            self.slots()
            self.slots(self.moe.router.evaluated())

    def grid(self) -> int:
        """Patches per side of an image."""
        return self.image_size // self.patch_size

    def tokens(self) -> int:
        """Tokens per image, including a class token."""
        return self.grid() ** 2 + (self.pooling == "token")

    def moe_blocks(self) -> tuple[int, ...]:
        """Indices of the MoE blocks."""
        return self.moe.blocks(self.depth) if self.moe else ()

    def family(self) -> str:
        """The routing algorithm: ``dense``, or the router's kind, prefixed by the kind of its affinity unless
        that is softmax, e.g. ``sinkhorn_token_choice``.
        """
        if not self.moe:
            return "dense"
        router = self.moe.router
        affinity = getattr(router, "affinity", None)
        if affinity is None or affinity.kind == "softmax":
            return router.kind
        return f"{affinity.kind}_{router.kind}"

    def expert_dim(self) -> int:
        """Hidden units per expert."""
        return (self.moe and self.moe.expert_dim) or self.mlp_dim

    def slots(self, router: RouterConfig | None = None) -> int:
        """C: slots per expert and group of a MoE layer, here or with another router; 0 for a dense model."""
        if not self.moe:
            return 0
        group = self.tokens() * self.moe.images_per_group
        return (router or self.moe.router).slots(num_tokens=group, num_experts=self.moe.num_experts)

    def layer_shape(self) -> LayerShape:
        """The sizes of a MoE layer, which a dense model does not have."""
        assert self.moe
        return LayerShape(
            self.tokens(), self.moe.images_per_group, self.moe.num_experts, self.slots(), self.width
        )


class Output(NamedTuple):
    """The output of a forward pass.

    Attributes:
        logits: (B, num_classes).
        aux: scalar, the routers' auxiliary losses: mean over groups, sum over layers.
        stats: routing statistics, name -> (MoE layers,), detached; empty unless requested.
        routings: one routing per MoE layer if requested, else ().
    """

    logits: Tensor
    aux: Tensor
    stats: dict[str, Tensor]
    routings: tuple[Routing, ...]


class Block(nn.Module):
    """Attention, then an MLP or experts, each behind a norm and with a skip connection.

    `hidden` is the number of hidden units of the MLP or of each expert; `index` is the block's position.
    """

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
    ) -> None:
        super().__init__()
        self.dropout = dropout
        # A tensor, as in `MoELayer`, whose salts are smaller.
        self.salt = torch.tensor(DROPOUT_SALT + index, device="cpu")
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, qk_norm=qk_norm)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.residual = not moe or moe.residual
        self.mlp = (
            MoELayer(moe, dim=width, hidden=hidden, block=index)
            if moe
            else MLP(width, hidden, dropout=dropout)
        )

    def forward(
        self,
        x_BSD: Tensor,
        valid_B: Tensor,
        keys_B: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        return_stats: bool = False,
        return_routing: bool = False,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Routing | None]:
        """Returns x, the auxiliary loss, and the statistics and the routing if they are requested.

        All but the routing are plain tensors, which FSDP hooks and activation checkpointing need.
        """
        y_BSD, keys_BS = self.attention(self.norm1(x_BSD)), None
        if self.dropout and keys_B is not None:
            keys_BS = split(mix(keys_B, self.salt), x_BSD.shape[1])
            y_BSD = dropout(y_BSD, self.dropout, mix(keys_BS, 2))
        x_BSD = x_BSD + y_BSD
        if not isinstance(self.mlp, MoELayer):
            y_BSD = self.mlp(self.norm2(x_BSD), keys_BS)
            return x_BSD + y_BSD, x_BSD.new_zeros((), dtype=torch.float32), {}, None
        y_BSD, routing = self.mlp(
            self.norm2(x_BSD), valid_B, keys_B, overrides, return_stats or return_routing, True
        )
        x_BSD = x_BSD + y_BSD if self.residual else y_BSD
        return x_BSD, routing.aux_G.mean(), dict(routing.stats), routing if return_routing else None


class ViT(nn.Module):
    """The model, with weights drawn from `seed`. Without a seed they are not set, for a checkpoint to fill or
    `moe.parallel.set_weights` to draw; nor are they on the meta device.
    """

    undecayed: ClassVar = ("position_SD",)

    def __init__(self, config: ViTConfig, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        device, moe_blocks = torch.get_default_device(), config.moe_blocks()
        # On the meta device torch's layers do not draw weights from the global generator.
        with torch.device("meta"):
            if config.stem:
                self.embed = ConvStem(config.width, config.patch_size)
            else:
                self.embed = nn.Conv2d(3, config.width, config.patch_size, config.patch_size)
            if config.pooling == "token":
                self.class_token_D = nn.Parameter(torch.empty(config.width))
            if config.position == "learned":
                self.position_SD = nn.Parameter(torch.empty(config.tokens(), config.width))
            self.blocks = nn.ModuleList(
                Block(
                    config.width,
                    config.mlp_dim if i not in moe_blocks else config.expert_dim(),
                    heads=config.heads,
                    qk_norm=config.qk_norm,
                    dropout=config.dropout,
                    moe=config.moe if i in moe_blocks else None,
                    index=i,
                )
                for i in range(config.depth)
            )
            self.norm = nn.LayerNorm(config.width, eps=1e-6)
            if config.pooling == "map":
                self.pool = AttentionPooling(
                    config.width, config.heads, config.mlp_dim, qk_norm=config.qk_norm
                )
            if config.representation_size:
                self.pre_logits = nn.Linear(config.width, config.representation_size)
            self.head = Head(config.representation_size or config.width, config.num_classes, config.head_bias)
        if device.type != "meta":
            self.to_empty(device=device)
            if seed is not None:
                init_weights(self, seed)

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
        """Classifies images (B, 3, H, W) in -1..1; an incomplete last routing group is padded.

        Args:
            valid_B: 0 for padding images, which take no capacity, else 1; None: all are valid.
            keys_B: int64 seeds of router noise and dropout; None, as in evaluation, turns both off.

        Raises ValueError if an override names a block without experts, or the router refuses its value.
        """
        x_BD, aux, stats, routings = self.encoded(
            images, valid_B, keys_B, routing_overrides, return_stats, return_routings
        )
        return Output(self.head(x_BD), aux, stats, routings)

    def features(self, images: Tensor, routing_overrides: RoutingOverrides = AS_TRAINED) -> Tensor:
        """Returns the head's input: (B, 3, H, W) in -1..1 -> (B, width or representation_size).

        Raises ValueError as a forward pass does.
        """
        return self.encoded(images, routing_overrides=routing_overrides)[0]

    def encoded(
        self,
        images: Tensor,
        valid_B: Tensor | None = None,
        keys_B: Tensor | None = None,
        routing_overrides: RoutingOverrides = AS_TRAINED,
        return_stats: bool = False,
        return_routings: bool = False,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], tuple[Routing, ...]]:
        """Returns the head's input, (B, width or representation_size), and the rest of `Output`."""
        check_overrides(self.config, routing_overrides)
        B = len(images)
        images, valid_B, keys_B = self.whole_groups(images, valid_B, keys_B)
        x_BSD = self.embedded(images)
        if self.config.dropout and keys_B is not None:
            keys_BS = split(mix(keys_B, DROPOUT_SALT - 1), x_BSD.shape[1])
            x_BSD = dropout(x_BSD, self.config.dropout, keys_BS)
        aux, layers, routings = x_BSD.new_zeros((), dtype=torch.float32), [], []
        for block in self.blocks:
            x_BSD, block_aux, stats, routing = block(
                x_BSD, valid_B, keys_B, routing_overrides, return_stats, return_routings
            )
            aux = aux + block_aux
            if stats:
                layers.append(stats)
            if routing:
                routings.append(routing)
        names = layers[0] if layers else ()
        stats = {name: torch.stack([layer[name] for layer in layers]) for name in names}
        return self.pooled(self.norm(x_BSD[:B])), aux, stats, tuple(routings)

    def whole_groups(
        self, images: Tensor, valid_B: Tensor | None, keys_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Pads images, mask and keys to whole routing groups."""
        valid_B = images.new_ones(len(images)) if valid_B is None else valid_B
        missing = -len(images) % (self.config.moe.images_per_group if self.config.moe else 1)
        if missing:
            images, valid_B = F.pad(images, (0, 0) * 3 + (0, missing)), F.pad(valid_B, (0, missing))
            keys_B = keys_B if keys_B is None else F.pad(keys_B, (0, missing))
        return images, valid_B, keys_B

    def embedded(self, images: Tensor) -> Tensor:
        """Returns the first block's input: (B, 3, H, W) -> (B, S, D)."""
        # Contiguous, or every LayerNorm of the residual stream would copy its input.
        x_BSD = self.embed(images).flatten(2).transpose(1, 2).contiguous()
        if self.config.position == "sincos2d":
            x_BSD = x_BSD + sincos2d(self.config.grid(), self.config.width, like=x_BSD)
        if self.config.pooling == "token":
            x_BSD = torch.cat([self.class_token_D.expand(len(images), 1, -1), x_BSD], 1)
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


def check_overrides(config: ViTConfig, overrides: RoutingOverrides) -> None:
    """Raises ValueError if the model has no routing to override, or `random_blocks` are not MoE blocks."""
    moe_blocks = config.moe_blocks()
    if not config.moe and overrides != AS_TRAINED:
        raise ValueError("a dense model has no routing to override")
    if dense := sorted(set(overrides.random_blocks).difference(moe_blocks)):
        raise ValueError(
            f"random_blocks={dense} are no MoE blocks; the MoE blocks of this model are {moe_blocks}"
        )
