"""The contract of an optimiser: its config, and the groups of parameters that decay alike."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from moe.config import Family, NonNegativeFloat
from moe.experts import is_expert


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Family, ABC, default="adamw"):
    """The settings of an optimiser, and weight decay by groups of parameters, times the learning rate.

    Source: the released configs of Soft MoE (kernels .03, head 3, scale .03) and V-MoE (all parameters .1).

    Attributes:
        weight_decay: of kernels, the weights of matmuls and convolutions.
        weight_decay_head: of the head's kernel; None: that of the other kernels.
        weight_decay_scale: of the scales of Soft MoE's routers.
        decays: whether ``kernels`` decay, or ``all`` parameters as kernels do.
    """

    weight_decay: NonNegativeFloat = 0.0
    weight_decay_head: NonNegativeFloat | None = None
    weight_decay_scale: NonNegativeFloat = 0.0
    decays: Literal["kernels", "all"] = "kernels"

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimiser of the model's parameters; their rate is set before every step."""

    @abstractmethod
    def state_bytes(self, shape: Sequence[int], held: Sequence[int], *, expert: bool) -> int:
        """Returns the bytes that a rank keeps for a parameter of that shape, of which it holds a part.

        expert: whether the parameter is a stack with a layer of each expert.
        """


def expert_stacks(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if is_expert(name)]


def decay_groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Returns the model's parameters that are trained in torch's groups, one for each weight decay.

    Kernels are parameters of two and more dimensions but those that a module lists as `undecayed`: stacked
    biases, position embeddings, soft routing.
    """
    exempt = {
        getattr(module, name, None) for module in model.modules() for name in getattr(module, "undecayed", ())
    }
    groups: dict[float, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        is_kernel = param.ndim > 1 and param not in exempt
        groups.setdefault(_weight_decay(config, name, is_kernel=is_kernel), []).append(param)
    return [{"params": members, "weight_decay": decay} for decay, members in groups.items()]


def _weight_decay(config: OptimizerConfig, name: str, *, is_kernel: bool) -> float:
    if name.endswith("head.weight") and config.weight_decay_head is not None:
        return config.weight_decay_head
    if name.endswith("router.scale") and config.weight_decay_scale:
        return config.weight_decay_scale
    return config.weight_decay if is_kernel or config.decays == "all" else 0.0


def shard_groups(param: nn.Parameter, dim: int) -> list[dist.ProcessGroup]:
    """Returns the groups of ranks over which a dimension is sharded: at most one in a mesh of ours."""
    if not isinstance(param, DTensor):
        return []
    return [param.device_mesh.get_group(axis) for axis, p in enumerate(param.placements) if p == Shard(dim)]


def sum_over_groups(parts: Iterable[tuple[Tensor, Iterable[dist.ProcessGroup]]]) -> None:
    """Sums tensors in place over their groups of ranks, by one all-reduce for each group."""
    together: dict[dist.ProcessGroup, list[Tensor]] = {}
    for part, groups in parts:
        for group in groups:
            together.setdefault(group, []).append(part)
    for group, members in together.items():
        flat = torch.cat([part.flatten() for part in members])
        dist.all_reduce(flat, group=group)
        for part, whole in zip(members, flat.split([part.numel() for part in members]), strict=True):
            part.copy_(whole.view_as(part))
