"""The contract of an optimiser: its config, and the groups of parameters that decay alike."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.config import Bound, Config, Family, NonNegativeFloat
from moe.experts import is_expert
from moe.layout import is_sharded, local_part
from moe.model import Model

# Operators on lists of tensors, of one launch or few on a GPU; torch's own optimisers have them, its public
# types do not.
FOREACH: Any = torch
CHUNK = 1 << 25  # numbers: 128 MiB in float32


@dataclass(frozen=True, kw_only=True)
class RatesConfig(Config):
    """Factors of the learning rate for the parts of a model.

    Attributes:
        router: of the routers' parameters.
        experts: of the weights of experts.
        head: of the head.
        backbone: of all others.
    """

    router: NonNegativeFloat = 1.0
    experts: NonNegativeFloat = 1.0
    head: NonNegativeFloat = 1.0
    backbone: NonNegativeFloat = 1.0

    def of(self, name: str) -> float:
        """Returns the factor of the parameter of that name."""
        if is_expert(name):
            return self.experts
        parts = name.split(".")
        return self.router if "router" in parts else self.head if "head" in parts else self.backbone


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Family, ABC, default="adamw"):
    """The settings of an optimiser, and weight decay by groups of parameters, times the learning rate.

    Sources: the released configs of Soft MoE (kernels .03, head 3, scale .03) and V-MoE (all parameters .1);
    for rates by layer BEiT (Bao et al. 2022, https://arxiv.org/abs/2106.08254) and timm.

    Attributes:
        weight_decay: of kernels, the weights of matmuls and convolutions.
        weight_decay_head: of the head's kernel; None: that of the other kernels.
        weight_decay_scale: of the scales of Soft MoE's routers.
        decays: whether ``kernels`` decay, or ``all`` parameters as kernels do.
        layer_decay: factor of the learning rate from one layer to the layer before it. The head has the whole
            rate, the last block, its experts and the norm behind it this part of it, as in timm, and the
            embeddings the smallest. None: all have the whole rate.
        rates: factors of the learning rate for router, experts, head and backbone, on top of that.
    """

    weight_decay: NonNegativeFloat = 0.0
    weight_decay_head: NonNegativeFloat | None = None
    weight_decay_scale: NonNegativeFloat = 0.0
    decays: Literal["kernels", "all"] = "kernels"
    layer_decay: Annotated[float, Bound(">", 0), Bound("<=", 1)] | None = None
    rates: RatesConfig = RatesConfig()

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
    """Returns the model's parameters that are trained in torch's groups, one for each weight decay, each
    factor of `rates`, and with `layer_decay` each layer. A group's rate is to be multiplied by its
    ``lr_scale``, if it has one.

    Kernels are parameters of two and more dimensions but those that a module lists as `undecayed`: stacked
    biases, position embeddings, soft routing.
    """
    exempt = {
        getattr(module, name, None) for module in model.modules() for name in getattr(module, "undecayed", ())
    }
    above = {} if config.layer_decay is None else cast(Model, model).layers_above()
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        decay = _weight_decay(config, name, is_kernel=param.ndim > 1 and param not in exempt)
        scale = config.rates.of(name) * (config.layer_decay or 1.0) ** above.get(name, 0)
        groups.setdefault((decay, scale), []).append(param)
    return [
        {"params": members, "weight_decay": decay, "lr_scale": scale}
        for (decay, scale), members in groups.items()
    ]


def _weight_decay(config: OptimizerConfig, name: str, *, is_kernel: bool) -> float:
    if name.endswith("head.weight") and config.weight_decay_head is not None:
        return config.weight_decay_head
    if name.endswith("router.scale") and config.weight_decay_scale:
        return config.weight_decay_scale
    return config.weight_decay if is_kernel or config.decays == "all" else 0.0


def with_gradients(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """Returns the group of each parameter that has a gradient."""
    return {p: group for group in optimizer.param_groups for p in group["params"] if p.grad is not None}


def count_steps(states: Iterable[dict[str, Tensor]]) -> None:
    """Counts an update in the states of parameters, which hold their number of updates on the host."""
    if steps := [state["step"] for state in states]:
        FOREACH._foreach_add_(steps, 1)


def chunks(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields parameters in parts of `CHUNK` numbers of this rank and of one parameter at most, so that copies
    of a part need little memory.
    """
    chunk, size = list[nn.Parameter](), 0
    for param in params:
        chunk.append(param)
        size += local_part(param).numel()
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def alike(params: Iterable[nn.Parameter], experts: Container[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups parameters that an operator can compute with as one stack: they have one shape, are split over
    ranks alike, and all or none are of `experts`.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        tensor: Tensor = param
        layout = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None
        groups.setdefault((param.shape, param.dtype, layout, param in experts), []).append(param)
    return list(groups.values())


def empty_stack(params: list[nn.Parameter]) -> Tensor:
    """Returns memory for the numbers of this rank's parts of parameters that are alike, (params, *shape)."""
    part = local_part(params[0])
    return part.new_empty(len(params), *part.shape)


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
