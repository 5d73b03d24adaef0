"""How a model is split over ranks: options, what divides, and this rank's part of a tensor (`moe.parallel`).

Configs and optimisers need these where nothing is split, too. There `torch.distributed.tensor`, which takes
most of a second, is not loaded.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.distributed import ProcessGroup

from moe.config import Config, PositiveInt
from moe.cost import param_shapes
from moe.experts import is_expert
from moe.model import ModelConfig

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """Options that change what a step costs, and no result beyond rounding.

    Attributes:
        dp_replicate: number of copies of the sharded model (HSDP). Weights are gathered within a copy,
            gradients are summed over the copies too. It must divide dp.
        reshard_after_forward: gather weights again for the backward pass (less memory) instead of keeping
            them from the forward pass (less traffic).
        activation_checkpointing: recompute each block in the backward pass instead of storing activations.
        compile: torch.compile every block. On several ranks FSDP's hooks break the graph where a MoE block
            calls its experts, and under bfloat16 where it calls its router.
        overlap_chunks: number of pieces in which rows are sent to experts, to overlap with computation.
    """

    dp_replicate: PositiveInt = 1
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    compile: bool = False
    overlap_chunks: PositiveInt = 1


def check_layout(config: ModelConfig, *, dp: int, ep: int, dp_replicate: int = 1) -> None:
    """Raises ValueError if `dp_replicate` does not divide dp (workers / ep), or the model's experts do not
    split evenly over the ranks of a copy."""
    if dp % dp_replicate:
        raise ValueError(f"dp_replicate={dp_replicate} does not divide dp={dp}")
    if not config.moe:
        return
    if config.moe.num_experts % ep:
        fits = [n for n in range(1, config.moe.num_experts + 1) if config.moe.num_experts % n == 0]
        raise ValueError(
            f"num_experts={config.moe.num_experts} does not divide over ep={ep}; use one of {fits}"
        )
    shards = dp // dp_replicate
    for name, shape in param_shapes(config).items() if shards > 1 else ():
        if is_expert(name) and shape[1] % shards:
            ranks = f"dp={dp}" if dp_replicate == 1 else f"dp / dp_replicate = {dp} / {dp_replicate}"
            raise ValueError(
                f"{name} has {shape[1]} rows in each expert, which {ranks} does not divide to shard them; use"
                f" one of {[n for n in range(1, shape[1] + 1) if shape[1] % n == 0]}"
            )


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Returns whether ranks have parts of a tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def shard_groups(param: Tensor, dim: int) -> list[ProcessGroup]:
    """Returns the groups of ranks over which a dimension is sharded: at most one in a mesh of ours."""
    if not is_sharded(param):
        return []
    return [param.device_mesh.get_group(axis) for axis, p in enumerate(param.placements) if p.is_shard(dim)]


def zeros_without(dim: int, param: Tensor) -> Tensor:
    """Returns zeros of a tensor's shape without `dim`, sharded as its other dimensions are."""
    shape = param.shape[:dim] + param.shape[dim + 1 :]
    if not is_sharded(param):
        return param.new_zeros(shape)
    import torch.distributed.tensor as sharded

    def without(placement: Any) -> Any:
        if not placement.is_shard() or placement.dim < dim:
            return placement
        return sharded.Replicate() if placement.dim == dim else sharded.Shard(placement.dim - 1)

    placements = [without(placement) for placement in param.placements]
    return sharded.zeros(shape, dtype=param.dtype, device_mesh=param.device_mesh, placements=placements)
