"""A pre-norm Vision Transformer with global average pooling and optional MoE blocks.

Source: the models of Soft MoE (Puigcerver et al. 2023, sections 3.3-3.4) as their released code has them:
learned position embedding, LayerNorm with epsilon 1e-6, tanh GELU, layer-normalised queries and keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.init import Draw, init_weights, normal, xavier_uniform, zeros
from moe.layer import MoEConfig, MoELayer


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    image_size: int = 224
    patch_size: int = 16
    width: int = 384
    depth: int = 12
    heads: int = 6
    mlp_dim: int = 1536
    num_classes: int = 1000
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "width", "depth", "heads", "mlp_dim", "num_classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.moe:
            self.moe.blocks(self.depth)
            self.slots()

    def tokens(self) -> int:
        """Tokens per image."""
        return (self.image_size // self.patch_size) ** 2

    def moe_blocks(self) -> tuple[int, ...]:
        return self.moe.blocks(self.depth) if self.moe else ()

    def slots(self) -> int:
        """C: slots per expert and group of a MoE layer; 0 for a dense model."""
        if not self.moe:
            return 0
        group = self.tokens() * self.moe.images_per_group
        return self.moe.router.slots(num_tokens=group, num_experts=self.moe.num_experts)


class Output(NamedTuple):
    """Attributes:
    logits: (B, num_classes).
    aux: scalar, the routers' auxiliary losses: mean over groups, sum over layers.
    stats: name -> (MoE layers,), detached.
    """

    logits: Tensor
    aux: Tensor
    stats: dict[str, Tensor]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = QKV(width, 3 * width)
        self.norm_q = nn.LayerNorm(width // heads, eps=1e-6, bias=False)
        self.norm_k = nn.LayerNorm(width // heads, eps=1e-6, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BSD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, S, D/H)
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: ViTConfig, moe: MoEConfig | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=1e-6)
        self.attention = Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-6)
        self.mlp = (
            MoELayer(moe, dim=config.width, hidden=config.mlp_dim)
            if moe
            else MLP(config.width, config.mlp_dim)
        )

    def forward(self, x_BSD: Tensor, valid_B: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Plain tensors, as FSDP hooks and compile want them: new x, auxiliary loss, statistics."""
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD))
        if not isinstance(self.mlp, MoELayer):
            return x_BSD + self.mlp(self.norm2(x_BSD)), x_BSD.new_zeros((), dtype=torch.float32), {}
        y_BSD, routing = self.mlp(self.norm2(x_BSD), valid_B)
        return x_BSD + y_BSD, routing.aux_G.mean(), dict(routing.stats)


class ViT(nn.Module):
    """Weights are drawn from `seed`, except on the meta device, where `init_weights` comes after sharding."""

    def __init__(self, config: ViTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        device, moe_blocks = torch.get_default_device(), config.moe_blocks()
        with torch.device("meta"):  # torch's layers draw weights of their own, from the global generator
            self.embed = nn.Conv2d(3, config.width, config.patch_size, config.patch_size)
            self.position_SD = nn.Parameter(torch.empty(config.tokens(), config.width))
            self.blocks = nn.ModuleList(
                Block(config, config.moe if i in moe_blocks else None) for i in range(config.depth)
            )
            self.norm = nn.LayerNorm(config.width, eps=1e-6)
            self.head = Head(config.width, config.num_classes)
        if device.type != "meta":
            self.to_empty(device=device)
            init_weights(self, seed)

    def draws(self) -> dict[str, Draw]:
        return {"position_SD": normal(0.02)}

    def forward(self, images: Tensor, valid_B: Tensor | None = None) -> Output:
        """images: (B, 3, H, W) in -1..1. `valid_B`: 0 for padding, which must not take capacity; else 1."""
        if valid_B is None:
            valid_B = images.new_ones(len(images))
        x_BSD = self.embed(images).flatten(2).transpose(1, 2) + self.position_SD
        aux, layers = x_BSD.new_zeros((), dtype=torch.float32), []
        for block in self.blocks:
            x_BSD, block_aux, stats = block(x_BSD, valid_B)
            aux = aux + block_aux
            if stats:
                layers.append(stats)
        names = layers[0] if layers else ()
        stats = {name: torch.stack([layer[name] for layer in layers]) for name in names}
        return Output(self.head(self.norm(x_BSD).mean(1)), aux, stats)


class QKV(nn.Linear):
    """Queries, keys and values in one matmul, each drawn as a projection of its own."""

    def draws(self) -> dict[str, Draw]:
        return {"weight": xavier_uniform(self.in_features, self.out_features // 3), "bias": zeros()}


class Head(nn.Linear):
    """Starts at zero, so that training starts from the uniform prediction."""

    def draws(self) -> dict[str, Draw]:
        return {"weight": zeros(), "bias": zeros()}
