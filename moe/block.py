"""A transformer block: attention, then an MLP or experts, each behind a norm and beside the residual stream.

Source: the models of V-MoE and Soft MoE, as their released code has them: LayerNorm with epsilon 1e-6.
"""

import torch
from torch import Tensor, nn

from moe.dense import MLP, Attention
from moe.layer import MoEConfig, MoELayer
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routing import Routing


class Block(nn.Module):
    """`hidden`: units of its MLP, or of each of its experts; `index`: its place in the model."""

    def __init__(
        self, width: int, hidden: int, *, heads: int, qk_norm: bool, moe: MoEConfig | None, index: int
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, qk_norm=qk_norm)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.residual = not moe or moe.residual
        self.mlp = MoELayer(moe, dim=width, hidden=hidden, block=index) if moe else MLP(width, hidden)

    def forward(
        self,
        x_BSD: Tensor,
        valid_B: Tensor,
        keys_B: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        return_routing: bool = False,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Routing | None]:
        """New x, auxiliary loss, statistics: plain tensors, as FSDP hooks and checkpointing want them; the
        routing only where it is asked for.
        """
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD))
        if not isinstance(self.mlp, MoELayer):
            return x_BSD + self.mlp(self.norm2(x_BSD)), x_BSD.new_zeros((), dtype=torch.float32), {}, None
        y_BSD, routing = self.mlp(self.norm2(x_BSD), valid_B, keys_B, overrides)
        x_BSD = x_BSD + y_BSD if self.residual else y_BSD
        return x_BSD, routing.aux_G.mean(), dict(routing.stats), routing if return_routing else None
