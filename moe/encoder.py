"""A Transformer encoder: the config, the blocks, their costs, and a pass at many operating points.

Images (`moe.models.vit`), and the texts and bytes of other models, go through it.

Source: the encoders of Soft MoE (Puigcerver et al. 2023, sections 3.3-3.4) and V-MoE (Riquelme et al. 2021),
as in their released code: pre-norm, LayerNorm with epsilon 1e-6, tanh GELU.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from moe.config import PositiveInt
from moe.dense import MLP, Activation, Attention
from moe.init import Draw, constant, dropout, mix, split
from moe.layer import MoEConfig, MoELayer
from moe.model import (
    Activations,
    Costs,
    Model,
    ModelConfig,
    Output,
    UnitOutput,
    with_experts,
    without_experts,
)
from moe.overrides import RoutingOverrides
from moe.routing import LayerShape, RoutingInput

# Salts of keys for dropout begin here; smaller salts are MoE layers'.
DROPOUT_SALT = 1 << 16
FP32 = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """The settings of a model whose units are the blocks of a Transformer encoder.

    Attributes:
        width: length of the vector of a token.
        depth: blocks, each of attention and an MLP or experts.
        heads: attention heads.
        mlp_dim: hidden units of a dense MLP.
        qk_norm: layer-normalises queries and keys, as in Soft MoE; V-MoE does not.
        moe: experts in place of some MLPs.
    """

    width: PositiveInt = 384
    depth: PositiveInt = 12
    heads: PositiveInt = 6
    mlp_dim: PositiveInt = 1536
    qk_norm: bool = False
    moe: MoEConfig | None = None

    def check(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        self.moe_blocks()

    def check_routed_alone(self, samples: str) -> None:
        """Raises ValueError if `samples`, the model's inputs in a word, are routed together."""
        if self.moe and self.moe.images_per_group > 1:
            raise ValueError(
                f"{samples} are routed one by one, got images_per_group={self.moe.images_per_group}"
            )

    def size(self) -> str:
        return f"w{self.width}d{self.depth}"

    def moe_blocks(self) -> tuple[int, ...]:
        return self.moe.blocks(self.depth) if self.moe else ()

    def expert_dim(self) -> int:
        """Returns the number of hidden units per expert."""
        return (self.moe and self.moe.expert_dim) or self.mlp_dim

    def encoder_costs(
        self,
        overrides: RoutingOverrides,
        number: int,
        *,
        embed: float = 0,
        head: float = 0,
        largest: float = 0,
        outside: float = 0,
        map_pooling: bool = False,
        layer_scale: bool = False,
    ) -> Costs:
        """Returns the costs of one input, by formulas: those of the blocks, and what a model has beside them.

        Multiply-adds count every matmul, as in the papers, and leave out softmax, LayerNorm, GELU and sorting
        (0.3-1 % of the published figures). Empty slots are computed, so they are counted. With a subset of
        experts only their slots are mixed, computed and combined, as `experts.run_chosen` does, while the
        router weighs all experts. A random router counts as a learned router.

        Activations are what matmuls, attention, LayerNorm, GELU and the routing's mixes need again. Assumed:
        fused attention, which keeps no S x S scores, and no activation checkpointing. Not counted: router
        internals of the size of its logits beyond gates, indices and mixing weights; the loss.

        Args:
            embed, head: multiply-adds before and behind the blocks.
            largest: multiply-adds of the largest matmul outside of the blocks.
            outside: numbers that are kept for the backward pass outside of the blocks.
            map_pooling: whether a learned probe attends to the tokens (`moe.dense.AttentionPooling`).
            layer_scale: whether blocks have factors for what they add.
        """
        config = self.at_point(overrides)
        D, F, S, H = self.width, self.mlp_dim, self.tokens(), self.heads
        moe_blocks = self.moe_blocks()
        macs: dict[str, float] = {
            "embed": embed,
            "attention_projections": self.depth * S * 4 * D * D,
            "attention_scores": self.depth * 2 * S * S * D,
            "mlp": (self.depth - len(moe_blocks)) * S * 2 * D * F,
            # The probe's query and output, the tokens' keys and values, scores, MLP.
            "pooling": 2 * D * D + 2 * S * D * D + 2 * S * D + 2 * D * F if map_pooling else 0,
            "head": head,
        }
        if map_pooling:
            outside += S * D * (3 + self.qk_norm) + 2 * F + 6 * D
        # What LayerScale scales, in both branches.
        scaled = 2 * S * D if layer_scale else 0
        qk_norm = 2 * S * D + 4 * S * H if self.qk_norm else 0  # normalised queries, keys; means, deviations
        # inputs and outputs of both norms; queries, keys, values; the output of the heads, log-sum-exp
        attention_norms = S * (4 * D + 4) + 3 * S * D + qk_norm + S * D + S * H + scaled
        hidden: dict[bool, float] = {False: F * S}
        saved = {False: number * (attention_norms + 2 * hidden[False])}  # before and after GELU
        if moe := config.moe:
            router, count = moe.router, len(moe_blocks)
            shape = LayerShape(S, moe.images_per_group, moe.num_experts, config.slots(), D)
            macs["experts"] = count * config.expert_rows(overrides) * 2 * D * self.expert_dim()
            if moe.shared_dim:
                macs["shared"] = count * S * 2 * D * moe.shared_dim
            macs["router"] = count * router.gate_macs(shape)
            macs["dispatch_combine"] = count * router.mix_macs(shape, overrides.num_kept(shape.experts))
            hidden[True] = self.expert_dim() * config.expert_rows()
            saved[True] = number * (attention_norms + 2 * hidden[True])
            saved[True] += number * 2 * S * (moe.shared_dim or 0)
            rows, mixing = router.saved(shape)
            saved[True] += number * rows * D + FP32 * (mixing + (S * D if number < FP32 else 0))
        blocks = [block in moe_blocks for block in range(self.depth)]
        activations = Activations(
            saved=[number * outside, *(saved[block] for block in blocks)],
            stream=number * S * D,
            widest=number * max(hidden[block] for block in blocks),
        )
        return Costs(macs, max(S * D * F, largest), activations)


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

    def forward(self, x_BSD: Tensor, routing: RoutingInput) -> UnitOutput:
        keys_B = routing.keys
        y_BSD, keys_BS = self.attention(self.norm1(x_BSD)), None
        if self.dropout and keys_B is not None:
            keys_BS = split(mix(keys_B, self.salt), x_BSD.shape[1])
            y_BSD = dropout(y_BSD, self.dropout, mix(keys_BS, 2))
        kept_2B = self.kept(keys_B)
        x_BSD = self.add(x_BSD, y_BSD, 0, kept_2B)
        if not isinstance(self.mlp, MoELayer):
            y_BSD = self.mlp(self.norm2(x_BSD), keys_BS)
            return without_experts(self.add(x_BSD, y_BSD, 1, kept_2B))
        y_BSD, routed = self.mlp(self.norm2(x_BSD), *routing[:3], routing.stats or routing.routings, True)
        return with_experts(self.add(x_BSD, y_BSD, 1, kept_2B), routed, routing)

    def attended(self, x_BSD: Tensor) -> Tensor:
        """Returns the block's input with what attention adds to it, in evaluation."""
        return self.add(x_BSD, self.attention(self.norm1(x_BSD)), 0)

    def routed(self, x_BSD: Tensor, routing: RoutingInput) -> Tensor:
        """Returns the block's output from that of `attended`, in evaluation of a block with experts."""
        return self.add(x_BSD, self.mlp(self.norm2(x_BSD), *routing[:3]), 1)

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


def blocks_of(config: EncoderConfig, drop_rates: Sequence[float] = (), **options: Any) -> nn.ModuleList:
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


E = TypeVar("E", bound=EncoderConfig)


class Encoder(Model[E]):
    """A model whose units are `blocks`, with a norm behind them."""

    computes: ClassVar = ("at_points",)
    blocks: nn.ModuleList
    norm: nn.LayerNorm

    def units(self) -> Sequence[nn.Module]:
        return [*self.blocks]

    @abstractmethod
    def embedded(self, inputs: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """Returns the first block's input, (B, S, D); `keys_B` seed dropout, if there is any."""

    @abstractmethod
    def heads(self, x_BSD: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        """Returns the model's output from the normalised tokens that the blocks make of its inputs."""

    def output(self, images: Tensor, routing: RoutingInput) -> Output:
        B = images.shape[0]
        inputs, routing = self.whole_groups(images, routing)
        x_BSD, aux, stats, routings = self.through(self.embedded(inputs, routing.keys), routing)
        return Output(self.heads(self.norm(x_BSD[:B]), images), aux, stats, routings)

    @torch.no_grad()
    def at_points(
        self, images: Tensor, valid_B: Tensor | None, points: Sequence[RoutingOverrides]
    ) -> list[dict[str, Tensor]]:
        """Returns the heads at each point from one pass, which computes what they share once.

        Overrides change nothing before the first block whose routing differs: the points form a tree that
        branches between a block's attention and its experts. Points with equal outputs share tensors. Of a
        sharded model, each half of a block gathers its weights when it is called.
        """
        for point in points:
            self.config.check_overrides(point)
        B = images.shape[0]
        inputs, routing = self.whole_groups(images, RoutingInput(valid_B))
        blocks: list[tuple[int, Block]] = list(enumerate(self.blocks))  # pyright: ignore[reportAssignmentType]
        found: dict[int, dict[str, Tensor]] = {}

        def routing_at(point: RoutingOverrides, block: int) -> object:
            """Returns the settings of a point in a block. Points with equal settings have equal outputs."""
            assert self.config.moe
            router = point.apply(self.config.moe.router.eval_config())
            drawn = point.subset_seed, block in point.random_blocks
            return router, point.experts, point.images_per_group, drawn

        def run_from(x_BSD: Tensor, first: int, members: list[int]) -> None:
            """Runs the blocks from `first` on for the points with the indices `members`."""
            for index, block in blocks[first:]:
                if not isinstance(block.mlp, MoELayer):
                    x_BSD = block(x_BSD, routing).x
                    continue
                x_BSD = block.attended(x_BSD)
                branches: dict[object, list[int]] = {}
                for member in members:
                    branches.setdefault(routing_at(points[member], index), []).append(member)
                *others, members = branches.values()
                for branch in others:
                    at = routing._replace(overrides=points[branch[0]])
                    run_from(block.routed(x_BSD, at), index + 1, branch)
                x_BSD = block.routed(x_BSD, routing._replace(overrides=points[members[0]]))
            heads = self.heads(self.norm(x_BSD[:B]), images)
            found.update((member, heads) for member in members)

        if points:
            run_from(self.embedded(inputs), 0, list(range(len(points))))
        return [found[i] for i in range(len(points))]
