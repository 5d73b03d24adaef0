"""A network of convolutions whose last blocks have experts in place of the pointwise MLP.

Source: the blocks of ConvNeXt, https://arxiv.org/abs/2201.03545; a place of the map is a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from moe import (
    MLP,
    Head,
    ImageModelConfig,
    Model,
    MoEConfig,
    MoELayer,
    Output,
    PositiveInt,
    RoutingInput,
    UnitOutput,
    with_experts,
    without_experts,
)


@dataclass(frozen=True, kw_only=True)
class ConvNetConfig(ImageModelConfig):
    kind: Literal["convnet"] = "convnet"
    image_size: PositiveInt = 8
    num_classes: PositiveInt = 10
    stride: PositiveInt = 2
    width: PositiveInt = 32
    depth: PositiveInt = 2
    moe: MoEConfig | None = None

    def build(self, *, seed: int | None = 0) -> "ConvNet":
        return ConvNet(self, seed=seed)

    def tokens(self) -> int:
        return (self.image_size // self.stride) ** 2

    def size(self) -> str:
        return f"w{self.width}d{self.depth}s{self.stride}"


class ConvBlock(nn.Module):
    def __init__(self, width: int, moe: MoEConfig | None, index: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = MoELayer(moe, dim=width, hidden=4 * width, block=index) if moe else MLP(width, 4 * width)

    def forward(self, x: Tensor, routing: RoutingInput) -> UnitOutput:
        tokens_BSD = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        if not isinstance(self.mlp, MoELayer):
            return without_experts(x + self.mlp(tokens_BSD).transpose(1, 2).view_as(x))
        y_BSD, routed = self.mlp(tokens_BSD, *routing[:3], routing.stats or routing.routings, True)
        return with_experts(x + y_BSD.transpose(1, 2).view_as(x), routed, routing)


class ConvNet(Model[ConvNetConfig]):
    def add_layers(self) -> None:
        config = self.config
        experts = config.moe.blocks(config.depth) if config.moe else ()
        self.stem = nn.Conv2d(3, config.width, config.stride, config.stride)
        self.blocks = nn.ModuleList(
            ConvBlock(config.width, config.moe if i in experts else None, i) for i in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = Head(config.width, config.num_classes, 0.0)

    def units(self) -> Sequence[nn.Module]:
        return [*self.blocks]

    def output(self, images: Tensor, routing: RoutingInput) -> Output:
        padded, routing = self.whole_groups(images, routing)
        x, aux, stats, routings = self.through(self.stem(padded), routing)
        logits = self.head(self.norm(x[: len(images)].mean((2, 3))))
        return Output({"logits": logits}, aux, stats, routings)
