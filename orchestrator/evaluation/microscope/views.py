"""A layer's routing seen from the images: which experts see which patch, and what they weigh there.

Groups become images again, padding images and class tokens are left out. P: patches of an image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.routing import DenseRouting, GatherRouting, Routing, SoftRouting
from moe.vit import ViTConfig


@dataclass(frozen=True, kw_only=True)
class View:
    """One MoE layer's routing of B images.

    Attributes:
    gate_BPE: how much of the patch's combination each expert has, before any dropping; sums to 1 over E.
    seat_BPE: whether the expert sees the patch.
    weight_BPE: of the expert's output in the patch's sum; 0 without a seat.
    """

    gate_BPE: Tensor
    seat_BPE: Tensor
    weight_BPE: Tensor

    def experts_BP(self) -> Tensor:
        """How many experts see the patch."""
        return self.seat_BPE.sum(-1)

    def discarded_BP(self) -> Tensor:
        """Whether no expert does: the patch passes the layer by its skip connection alone."""
        return ~self.seat_BPE.any(-1)

    def best_BP(self) -> Tensor:
        """The expert of the largest weight in the patch's sum; -1 for discarded patches."""
        return self.weight_BPE.masked_fill(~self.seat_BPE, -1).argmax(-1).masked_fill(self.discarded_BP(), -1)


def view_of(routing: Routing, config: ViTConfig, valid_B: Tensor) -> View:
    """Of the images that count: 1 in `valid_B`."""
    weight_GSE, seat_GSE = seated(routing)
    return View(
        gate_BPE=patches(routing.gates_GSE, config, valid_B),
        seat_BPE=patches(seat_GSE, config, valid_B),
        weight_BPE=patches(weight_GSE, config, valid_B),
    )


def patches(x_GS: Tensor, config: ViTConfig, valid_B: Tensor) -> Tensor:
    """(G, S, ..) -> (B, P, ..): whole images again, without class tokens and padding images."""
    return tokens(x_GS, config)[valid_B.bool(), -(config.grid() ** 2) :]


def tokens(x_GS: Tensor, config: ViTConfig) -> Tensor:
    """(G, S, ..) -> (B, tokens per image, ..), padding among them."""
    return x_GS.reshape(-1, config.tokens(), *x_GS.shape[2:])


def seated(routing: Routing) -> tuple[Tensor, Tensor]:
    """(G, S, E) twice: what each expert weighs in each token's sum, and whether it sees the token."""
    if isinstance(routing, GatherRouting):
        G, S, E = routing.gates_GSE.shape
        token_GCE = routing.token_GEC.transpose(1, 2)
        weight_GSE = routing.weight_GEC.new_zeros(G, S + 1, E)  # row S takes the empty slots
        weight_GSE = weight_GSE.scatter(1, token_GCE, routing.weight_GEC.transpose(1, 2))
        seat_GSE = torch.zeros_like(weight_GSE, dtype=torch.bool).scatter(1, token_GCE, True)
        return weight_GSE[:, :S], seat_GSE[:, :S]
    if isinstance(routing, SoftRouting):
        return routing.combine_GSEC.sum(-1), (routing.dispatch_GSEC > 0).any(-1)
    assert isinstance(routing, DenseRouting)
    return routing.weight_GSE, torch.ones_like(routing.weight_GSE, dtype=torch.bool)
