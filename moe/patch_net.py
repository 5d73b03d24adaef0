"""The small net that shows expert specialisation: one Soft MoE layer and a linear head.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", section 4.2:
four patches of an MNIST digit, no residual connection, one slot per expert, experts 196 -> 784/n -> 196 with
ReLU, so that all numbers of experts n have as many expert weights; the head reads all 784 outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.experts import Experts, chosen_alone, run_chosen
from moe.init import init_weights
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers.soft import SoftConfig, SoftRouter


@dataclass(frozen=True, kw_only=True)
class PatchNetConfig:
    """Attributes:
    total_hidden: width of the hidden layers of all experts together.
    """

    image_size: int = 28
    patch_size: int = 14
    channels: int = 1
    num_experts: int = 8
    total_hidden: int = 784
    num_classes: int = 10

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "channels", "num_experts", "total_hidden", "num_classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if self.total_hidden % self.num_experts:
            fits = [n for n in range(1, self.total_hidden + 1) if self.total_hidden % n == 0]
            raise ValueError(
                f"num_experts={self.num_experts} does not divide total_hidden={self.total_hidden}; use one of"
                f" {fits}"
            )

    def tokens(self) -> int:
        """Patches per image."""
        return (self.image_size // self.patch_size) ** 2

    def width(self) -> int:
        """Numbers per patch."""
        return self.channels * self.patch_size**2


class PatchNet(nn.Module):
    """Weights are drawn from `seed`."""

    def __init__(self, config: PatchNetConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        device, width = torch.get_default_device(), config.width()
        with torch.device("meta"):  # torch's layers draw weights of their own, from the global generator
            self.router = SoftRouter(SoftConfig(normalize="none"), dim=width, num_experts=config.num_experts)
            hidden = config.total_hidden // config.num_experts
            self.experts = Experts(config.num_experts, width, hidden, activation="relu")
            self.head = nn.Linear(config.tokens() * width, config.num_classes)
        if device.type != "meta":
            self.to_empty(device=device)
            init_weights(self, seed)

    def forward(self, images: Tensor, routing_overrides: RoutingOverrides = AS_TRAINED) -> Tensor:
        """(B, channels, H, W) -> logits (B, num_classes)."""
        x_BSD = patches(images, self.config.patch_size)
        valid_BS = x_BSD.new_ones(x_BSD.shape[:2])
        routing = self.router(x_BSD, valid_BS, overrides=routing_overrides)
        if k := chosen_alone(self.experts, routing, routing_overrides):
            y_BSD = run_chosen(self.experts, routing, x_BSD, k)
        else:
            y_BSD = routing.combine(self.experts(routing.dispatch(x_BSD)))
        return self.head(y_BSD.flatten(1))


def patches(images: Tensor, size: int) -> Tensor:
    """(B, C, H, W) -> (B, patches in reading order, C * size * size)."""
    B, C, H, W = images.shape
    x = images.reshape(B, C, H // size, size, W // size, size)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * size * size)
