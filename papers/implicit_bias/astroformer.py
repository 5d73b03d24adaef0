"""Stages of convolutions and of transformer blocks, with optional experts in the last stage.

Source: Astroformer (Dagli 2023, https://arxiv.org/abs/2304.05350), as in its released code
(`pytorch-image-models/timm/models/astroformer.py`), which follows CoAtNet in timm: batch norm before and
between convolutions, exact GELU, relative position bias. Implicit Bias in Soft MoE (section 4.4.1) replaces
both MLPs of Astroformer-1's last stage. Ours: the order of queries, keys and values, and a classifier that
starts at zero.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.batch_norm import BatchNorm, follow_batch
from moe.config import DropoutRate, PositiveInt
from moe.dense import MLP, Head
from moe.init import Draw, dropout, mix, normal, zeros
from moe.layer import MAX_BLOCKS, MoEConfig, MoELayer
from moe.model import ImageModelConfig, Model, Output, UnitOutput, with_experts, without_experts
from moe.presets import PRESETS
from moe.routers import SoftConfig
from moe.routing import RoutingInput

EXPAND, SQUEEZE = 4, 4  # hidden units of a block per output, and outputs per squeezed channel


@dataclass(frozen=True, kw_only=True)
class AstroformerConfig(ImageModelConfig):
    """An Astroformer, by default Astroformer-1.

    Attributes:
        image_size: pixels of an image's side. The stem halves it, and so does every stage.
        stages: a letter for each stage, C for blocks of convolutions and T for those of a transformer.
        widths, depths: channels and blocks of each stage.
        stem_width: channels of the two convolutions before the stages.
        head_dim: channels of each attention head.
        dropout: dropout of the head's input.
        moe: experts in place of MLPs of the last stage, whose blocks alone are counted.
    """

    kind: Literal["astroformer"] = "astroformer"
    stages: str = "CCCT"
    widths: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (2, 6, 14, 2)
    stem_width: PositiveInt = 64
    head_dim: PositiveInt = 32
    dropout: DropoutRate = 0.0
    moe: MoEConfig | None = None

    @property
    def whole_batch(self) -> bool:
        return True

    def check(self) -> None:
        if not re.fullmatch("[CT]+", self.stages):
            raise ValueError(f"stages are letters C and T, such as 'CCCT', got {self.stages!r}")
        for name in ("widths", "depths"):
            values = getattr(self, name)
            if len(values) != len(self.stages) or min(values) < 1:
                raise ValueError(
                    f"{name} has a positive number for each of stages={self.stages!r}, got {values}"
                )
        for letter, width in zip(self.stages, self.widths, strict=True):
            part = self.head_dim if letter == "T" else SQUEEZE
            if width % part:
                what = f"head_dim={part}" if letter == "T" else f"the {part} of squeeze and excitation"
                raise ValueError(f"{what} does not divide a width of stage {letter}: widths={self.widths}")
        halvings = 1 + len(self.stages)
        if self.image_size % 2**halvings:
            raise ValueError(
                f"image_size={self.image_size} cannot be halved {halvings} times, by the stem and"
                f" {len(self.stages)} stages: use a multiple of {2**halvings}"
            )
        if self.moe and self.stages[-1] == "C":
            raise ValueError(f"experts replace the MLPs of a last stage T, got stages={self.stages!r}")
        self.moe_blocks()

    def build(self, *, seed: int | None = 0) -> "Astroformer":
        return Astroformer(self, seed=seed)

    def tokens(self) -> int:
        return self.grid(len(self.stages)) ** 2

    def size(self) -> str:
        return f"{self.stages}w{self.widths[-1]}d{sum(self.depths)}"

    def moe_blocks(self) -> tuple[int, ...]:
        first = sum(self.depths[:-1])
        return tuple(first + i for i in self.moe.blocks(self.depths[-1])) if self.moe else ()

    def grid(self, stages: int) -> int:
        """Returns the side of the map behind the stem and some stages."""
        return self.image_size >> 1 + stages


class Convolution(nn.Conv2d):
    """A convolution whose weights keep the variance of gradients, as in EfficientNet."""

    def draws(self) -> dict[str, Draw]:
        fan_out = self.out_channels * self.weight[0, 0].numel() // self.groups
        return {"weight": normal((2 / fan_out) ** 0.5), "bias": zeros()}


class Shortcut(nn.Module):
    """The skip connection of a block: where the block halves the map, the mean of each 2 x 2 places."""

    def __init__(self, before: int, width: int, *, halves: bool) -> None:
        super().__init__()
        self.halves = halves
        self.project = nn.Linear(before, width) if before != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 2) if self.halves else x
        return self.project(x.movedim(1, -1)).movedim(-1, 1)


class ConvBlock(nn.Module):
    """An inverted bottleneck: a wide depthwise convolution between two of 1 x 1, and a factor for each of its
    channels that depends on their means (squeeze and excitation).
    """

    def __init__(self, before: int, width: int, *, halves: bool) -> None:
        super().__init__()
        hidden = EXPAND * width
        self.shortcut = Shortcut(before, width, halves=halves)
        self.norm1 = BatchNorm(before)
        self.expand = Convolution(before, hidden, 1, bias=False)
        self.norm2 = BatchNorm(hidden)
        self.depthwise = Convolution(hidden, hidden, 3, 1 + halves, padding=1, groups=hidden, bias=False)
        self.norm3 = BatchNorm(hidden)
        self.squeeze = Convolution(hidden, width // SQUEEZE, 1)
        self.excite = Convolution(width // SQUEEZE, hidden, 1)
        self.project = Convolution(hidden, width, 1)

    def forward(self, x: Tensor, routing: RoutingInput) -> UnitOutput:
        h = self.expand(self.norm1(x, routing.valid))
        h = self.depthwise(F.gelu(self.norm2(h, routing.valid)))
        h = F.gelu(self.norm3(h, routing.valid))
        factor = self.excite(F.silu(self.squeeze(h.mean((2, 3), keepdim=True)))).sigmoid()
        return without_experts(self.shortcut(x) + self.project(h * factor))


class RelativeAttention(nn.Module):
    """Self-attention on a map of grid x grid places, with a learned bias for each offset of two places."""

    undecayed: ClassVar = ("bias_OH",)

    def __init__(self, before: int, width: int, heads: int, grid: int) -> None:
        super().__init__()
        self.heads, self.grid = heads, grid
        self.qkv = nn.Linear(before, 3 * width)
        self.bias_OH = nn.Parameter(torch.empty((2 * grid - 1) ** 2, heads))
        self.out = nn.Linear(width, width)

    def draws(self) -> dict[str, Draw]:
        return {"bias_OH": normal(0.02)}

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BSD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, S, D/H)
        bias_HSS = self.bias_OH[self.offsets()].movedim(-1, 0)
        weights_BHSS = (q @ k.mT * q.shape[-1] ** -0.5 + bias_HSS).softmax(-1)
        return self.out((weights_BHSS @ v).transpose(1, 2).flatten(2))

    def offsets(self) -> Tensor:
        """Returns (S, S), the number of the offset from each place to each."""
        place = torch.arange(self.grid**2, device=self.bias_OH.device)
        axes = (place // self.grid, place % self.grid)
        rows_SS, columns_SS = (axis[:, None] - axis + self.grid - 1 for axis in axes)
        return rows_SS * (2 * self.grid - 1) + columns_SS


class AttentionBlock(nn.Module):
    """Attention, then an MLP or experts, on a map. `index` is the block's position, `grid` its map's side."""

    def __init__(
        self,
        before: int,
        width: int,
        *,
        halves: bool,
        grid: int,
        heads: int,
        moe: MoEConfig | None,
        index: int,
    ) -> None:
        super().__init__()
        self.halves, self.residual = halves, not moe or moe.residual
        self.shortcut = Shortcut(before, width, halves=halves)
        self.norm1 = nn.LayerNorm(before, eps=1e-6)
        self.attention = RelativeAttention(before, width, heads, grid)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = (
            MoELayer(moe, dim=width, hidden=EXPAND * width, block=index, activation="exact_gelu")
            if moe
            else MLP(width, EXPAND * width, activation="exact_gelu")
        )

    def forward(self, x: Tensor, routing: RoutingInput) -> UnitOutput:
        y = self.norm1(x.movedim(1, -1)).movedim(-1, 1)
        y = F.avg_pool2d(y, 2) if self.halves else y
        x_BSD = _tokens(self.shortcut(x)) + self.attention(_tokens(y))
        if not isinstance(self.mlp, MoELayer):
            return without_experts(self.as_map(x_BSD + self.mlp(self.norm2(x_BSD))))
        y_BSD, routed = self.mlp(self.norm2(x_BSD), *routing[:3], routing.stats or routing.routings, True)
        y_BSD = x_BSD + y_BSD if self.residual else y_BSD
        return with_experts(self.as_map(y_BSD), routed, routing)

    def as_map(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) -> (B, D, H, W), a copy: FSDP's units return no views."""
        grid = self.attention.grid
        return x_BSD.mT.unflatten(-1, (grid, grid)).clone(memory_format=torch.contiguous_format)


class Stem(nn.Module):
    """Two convolutions of 3 x 3, of which the first halves the map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = Convolution(3, width, 3, 2, padding=1, bias=False)
        self.norm = BatchNorm(width)
        self.conv2 = Convolution(width, width, 3, padding=1, bias=False)

    def forward(self, images: Tensor, valid_B: Tensor) -> Tensor:
        return self.conv2(F.gelu(self.norm(self.conv1(images), valid_B)))


class Astroformer(Model[AstroformerConfig]):
    """The module of an `AstroformerConfig`."""

    def add_layers(self) -> None:
        config, before, moe_blocks = self.config, self.config.stem_width, self.config.moe_blocks()
        self.stem, self.blocks = Stem(before), nn.ModuleList()
        for stage, (letter, width, depth) in enumerate(
            zip(config.stages, config.widths, config.depths, strict=True), start=1
        ):
            for halves in (True, *[False] * (depth - 1)):
                if letter == "C":
                    block = ConvBlock(before, width, halves=halves)
                else:
                    block = AttentionBlock(
                        before,
                        width,
                        halves=halves,
                        grid=config.grid(stage),
                        heads=width // config.head_dim,
                        moe=config.moe if len(self.blocks) in moe_blocks else None,
                        index=len(self.blocks),
                    )
                self.blocks.append(block)
                before = width
        self.norm = nn.LayerNorm(before, eps=1e-6)
        self.pre_logits = nn.Linear(before, before)
        self.head = Head(before, config.num_classes, 0.0)

    def units(self) -> Sequence[nn.Module]:
        return [*self.blocks]

    def output(self, images: Tensor, routing: RoutingInput) -> Output:
        B = images.shape[0]
        images, routing = self.whole_groups(images, routing)
        x, aux, stats, routings = self.through(self.stem(images, routing.valid), routing)
        follow_batch(self)
        x_BD = self.pre_logits(self.norm(x[:B].mean((2, 3)))).tanh()
        if self.config.dropout and routing.keys is not None:
            x_BD = dropout(x_BD, self.config.dropout, mix(routing.keys[:B], MAX_BLOCKS))
        return Output({"logits": self.head(x_BD)}, aux, stats, routings)


def _tokens(x: Tensor) -> Tensor:
    """(B, D, H, W) -> (B, S, D)."""
    return x.flatten(2).mT


_FIRST = AstroformerConfig()
PRESETS["astroformer-1"] = _FIRST
# Section 4.4.1, for CIFAR: Soft MoE in place of both MLPs, without the skip connection around it; one slot
# per expert, and the same number of hidden units in all for any number of experts.
for _experts in (2, 8, 16, 64, 128):
    _moe = MoEConfig(
        layers="last_2",
        num_experts=_experts,
        expert_dim=49_152 // _experts,
        residual=False,
        router=SoftConfig(),
    )
    PRESETS[f"astroformer-1-soft-{_experts}e"] = replace(_FIRST, moe=_moe)
