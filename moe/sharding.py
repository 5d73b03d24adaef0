"""How one training step lies on the ranks of a (dp, ep) mesh: what plans of memory and of traffic share.

As `parallel.py` has it: dense parameters are sharded over all ranks of a copy of the model, experts over ep
(dim 0) and dp (dim 1). FSDP gathers, frees and reduces together what is in no block, a block's dense
parameters, and a block's experts.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from moe.cost import param_shapes
from moe.vit import ViTConfig

FP32 = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rank computes per update.

    Attributes:
    images: of one forward pass.
    passes: forward and backward passes. Above 1 gradients stay whole on every rank, and are reduced once.
    compute_bytes: of a number in matmuls, gathered weights, activations and all-to-all: 4 for float32, 2 for
        bfloat16. A rank's own parameters, gradients and moments are float32, and so are routers.
    moments: numbers that the optimiser keeps per parameter: AdamW 2, SGD with momentum 1.
    """

    images: int
    passes: int = 1
    compute_bytes: int = 4
    moments: int = 2

    def __post_init__(self) -> None:
        if self.images < 1 or self.passes < 1:
            raise ValueError(f"images={self.images} and passes={self.passes} must be at least 1")
        if self.compute_bytes not in (2, 4):
            raise ValueError(f"compute_bytes must be 2 or 4, got {self.compute_bytes}")


class Share(NamedTuple):
    """How many numbers a rank holds, and how many it has when it has gathered the others' shares."""

    held: int
    gathered: int


class Unit(NamedTuple):
    """The parameters of one block, or those in no block."""

    dense: Share
    experts: Share

    def held(self) -> int:
        return self.dense.held + self.experts.held

    def gathered(self) -> int:
        return self.dense.gathered + self.experts.gathered


@cache
def units(config: ViTConfig, *, dp: int, ep: int) -> tuple[Unit, ...]:
    """What is in no block, then every block, on the first of dp * ep ranks: FSDP pads what does not divide,
    so no rank holds more.
    """
    held = [[0, 0] for _ in range(1 + config.depth)]
    for name, shape in param_shapes(config).items():
        unit = held[1 + int(name.split(".")[1]) if name.startswith("blocks.") else 0]
        if ".experts." in name:
            unit[1] += prod(shape) // (dp * ep)
        else:
            unit[0] += -(-shape[0] // (dp * ep)) * prod(shape[1:])
    return tuple(Unit(Share(dense, dense * dp * ep), Share(experts, experts * dp)) for dense, experts in held)
