"""The dense parts of a Vision Transformer: attention, MLP, positions, pooling, head, convolutional stem.

Source: google-research/vmoe (vmoe/nn/vit_moe.py), the authors' code of V-MoE and Soft MoE.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.init import Draw, constant, dropout, mix, xavier_uniform, zeros

Activation = Literal["gelu", "exact_gelu", "relu"]  # gelu: by tanh, as JAX computes it

# Numbers that a core keeps in its cache from one step to the next, and the least width worth the steps. It is
# no number of rows, so that an image has the same logits in any batch.
GELU_PIECE, GELU_WIDTH = 1 << 16, 1024


def activate(h: Tensor, activation: Activation, *, inplace: bool = False) -> Tensor:
    """Returns the activation of h, which it may overwrite with `inplace`."""
    if activation == "relu":
        return F.relu(h)
    if activation == "gelu" and _pays_by_pieces(h):
        return _gelu_by_pieces_(h if inplace else h.clone())
    return F.gelu(h, approximate="tanh" if activation == "gelu" else "none")


def _pays_by_pieces(h: Tensor) -> bool:
    """Returns whether h has wide rows of float32 numbers on the CPU, and no gradient, graph or lower
    precision depends on the steps by which they are processed.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    # Tensors of another class have no numbers, or have them elsewhere.
    plain = type(h) is Tensor and h.is_cpu and h.dtype is torch.float32 and h.is_contiguous()
    return plain and h.shape[-1] >= GELU_WIDTH and not torch.is_autocast_enabled("cpu")


def _gelu_by_pieces_(h: Tensor) -> Tensor:
    """Overwrites h with its GELU by tanh, as h * sigmoid(2u), which is h * (1 + tanh u) / 2.

    Torch's own kernel takes about twice as long on a CPU, whose cache holds a piece through all steps.
    """
    slope = math.sqrt(8 / math.pi)
    linear, cubic = h.new_full((), slope), 0.044715 * slope
    for x in h.view(-1).split(GELU_PIECE * torch.get_num_threads()):
        x.mul_(torch.addcmul(linear, x, x, value=cubic).mul_(x).sigmoid_())
    return h


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, qk_norm: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = Projections(width, 3 * width)
        self.norm_q = head_norm(width, heads) if qk_norm else nn.Identity()
        self.norm_k = head_norm(width, heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BSD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, S, D/H)
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them: the part of a block that experts take the place of."""

    def __init__(
        self, width: int, hidden: int, *, dropout: float = 0.0, activation: Activation = "gelu"
    ) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = dropout
        self.activation: Activation = activation

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Applies the MLP; `keys` (int64, one per token) seed dropout after both layers."""
        h = activate(self.up(x), self.activation)
        if keys is None:
            return self.down(h)
        return dropout(self.down(dropout(h, self.dropout, mix(keys, 0))), self.dropout, mix(keys, 1))


class AttentionPooling(nn.Module):
    """A learned probe attends to the tokens; its output, after a residual MLP, represents the image."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_dim: int,
        *,
        qk_norm: bool,
        norm_eps: float = 1e-6,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.probe_D = nn.Parameter(torch.empty(width))
        self.q = Projections(width, width)
        self.kv = Projections(width, 2 * width)
        self.norm_q = head_norm(width, heads) if qk_norm else nn.Identity()
        self.norm_k = head_norm(width, heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = MLP(width, mlp_dim, activation=activation)

    def draws(self) -> dict[str, Draw]:
        return {"probe_D": xavier_uniform(1, len(self.probe_D))}

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Pools (B, S, D) -> (B, D)."""
        probe_B1D = self.probe_D.expand(x_BSD.shape[0], 1, -1)
        q = self.q(probe_B1D).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, 1, D/H)
        k, v = self.kv(x_BSD).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        x_BD = self.out(y.flatten(1))
        return x_BD + self.mlp(self.norm(x_BD))


class Projections(nn.Linear):
    """Queries, keys and values in one matmul, each initialised as a projection of its own."""

    def draws(self) -> dict[str, Draw]:
        return {"weight": xavier_uniform(self.in_features, self.in_features), "bias": zeros()}


class Head(nn.Linear):
    """A classifier whose weights start at zero: the initial prediction is the same for every image."""

    def __init__(self, width: int, num_classes: int, bias: float) -> None:
        super().__init__(width, num_classes)
        self.initial_bias = bias

    def draws(self) -> dict[str, Draw]:
        return {"weight": zeros(), "bias": constant(self.initial_bias)}


def head_norm(width: int, heads: int) -> nn.LayerNorm:
    return nn.LayerNorm(width // heads, eps=1e-6, bias=False)


def sincos2d(grid: int, width: int, *, like: Tensor) -> Tensor:
    """Position embedding (grid^2, width): sines and cosines of column, then row, at width/4 frequencies.

    Source: MoCo v3, https://arxiv.org/abs/2104.02057, as in the authors' code.
    """
    at_least_fp32 = torch.promote_types(like.dtype, torch.float32)
    index = torch.arange(width // 4, device=like.device, dtype=at_least_fp32)
    frequency = 10_000 ** -(index / (width // 4 - 1))
    place = torch.arange(grid, device=like.device, dtype=at_least_fp32)
    row, column = (axis.reshape(-1, 1) * frequency for axis in torch.meshgrid(place, place, indexing="ij"))
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], 1).to(like.dtype)


class ConvStem(nn.Sequential):
    """Convolutions in place of the patch projection: (B, 3, H, W) -> (B, width, H / patch, W / patch).

    Each factor of two in `patch_size` is a 3x3 convolution of stride 2, a norm and GELU; a projection
    follows.

    Source: Xiao et al. 2021, "Early Convolutions Help Transformers See Better",
    https://arxiv.org/abs/2106.14881. The Astroformer of Implicit Bias in Soft MoE (section 4.4.1) also has
    convolutions before its experts. The number of channels is ours.
    """

    def __init__(self, width: int, patch_size: int, *, activation: Activation = "gelu") -> None:
        super().__init__()
        before = 3
        for i, channels in enumerate(stem_channels(width, patch_size)):
            self.add_module(f"conv{i}", nn.Conv2d(before, channels, 3, stride=2, padding=1))
            # Over all numbers of one image: the paper's batch norm would mix images with each other.
            self.add_module(f"norm{i}", nn.GroupNorm(1, channels, eps=1e-6))
            self.add_module(f"gelu{i}", nn.GELU("tanh" if activation == "gelu" else "none"))
            before = channels
        self.project = nn.Conv2d(before, width, 1)


def stem_channels(width: int, patch_size: int) -> list[int]:
    """Output channels of each convolution, doubling up to `width`. Raises ValueError if the patch size is not
    a power of two, or below 2."""
    halvings = patch_size.bit_length() - 1
    if halvings < 1 or patch_size != 2**halvings:
        raise ValueError(
            f"stem='conv' needs a patch_size that is a power of two and at least 2, got {patch_size}"
        )
    return [max(1, width >> left) for left in reversed(range(halvings))]
