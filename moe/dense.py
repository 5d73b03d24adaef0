"""The dense parts of a Vision Transformer: attention, MLP, position, head.

Source: google-research/vmoe (vmoe/nn/vit_moe.py), the authors' code of V-MoE and Soft MoE.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.init import Draw, constant, xavier_uniform, zeros


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, qk_norm: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Projections(width, 3 * width)
        self.norm_q = head_norm(width, heads) if qk_norm else nn.Identity()
        self.norm_k = head_norm(width, heads) if qk_norm else nn.Identity()
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


class AttentionPooling(nn.Module):
    """A learned probe attends to the tokens; its answer, through a residual MLP, stands for the image."""

    def __init__(self, width: int, heads: int, mlp_dim: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.probe_D = nn.Parameter(torch.empty(width))
        self.q = Projections(width, width)
        self.kv = Projections(width, 2 * width)
        self.norm_q = head_norm(width, heads) if qk_norm else nn.Identity()
        self.norm_k = head_norm(width, heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, mlp_dim)

    def draws(self) -> dict[str, Draw]:
        return {"probe_D": xavier_uniform(1, len(self.probe_D))}

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) -> (B, D)."""
        probe_B1D = self.probe_D.expand(len(x_BSD), 1, -1)
        q = self.q(probe_B1D).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, 1, D/H)
        k, v = self.kv(x_BSD).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        x_BD = self.out(y.flatten(1))
        return x_BD + self.mlp(self.norm(x_BD))


class Projections(nn.Linear):
    """Queries, keys and values in one matmul, each drawn as a projection of its own."""

    def draws(self) -> dict[str, Draw]:
        return {"weight": xavier_uniform(self.in_features, self.in_features), "bias": zeros()}


class Head(nn.Linear):
    """Starts at zero, so that training starts from the same prediction for every image."""

    def __init__(self, width: int, num_classes: int, bias: float) -> None:
        super().__init__(width, num_classes)
        self.start = bias

    def draws(self) -> dict[str, Draw]:
        return {"weight": zeros(), "bias": constant(self.start)}


def head_norm(width: int, heads: int) -> nn.LayerNorm:
    return nn.LayerNorm(width // heads, eps=1e-6, bias=False)


def sincos2d(grid: int, width: int, *, like: Tensor) -> Tensor:
    """(grid^2, width): sines and cosines of the column, then of the row, at width/4 frequencies.

    Source: MoCo v3, https://arxiv.org/abs/2104.02057, as the authors' code has it.
    """
    at_least_fp32 = torch.promote_types(like.dtype, torch.float32)
    index = torch.arange(width // 4, device=like.device, dtype=at_least_fp32)
    frequency = 10_000 ** -(index / (width // 4 - 1))
    place = torch.arange(grid, device=like.device, dtype=at_least_fp32)
    row, column = (axis.reshape(-1, 1) * frequency for axis in torch.meshgrid(place, place, indexing="ij"))
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], 1).to(like.dtype)
