"""The state at one moment, in host memory: what is written while training changes the state itself."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from orchestrator.checkpoint.state import state_of


class Snapshot:
    """Memory for a copy of this worker's share of the state.

    Tensors are looked up once, for that takes as long as a copy: FSDP, optimisers and our modules write into
    theirs and replace none. Made before training starts, for its pages are touched here, which takes longer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.state = state_of(model, optimizer)
        self._tensors = _tensors_of(model, optimizer)
        self._live = {name: _local(tensor) for name, tensor in self.state.items()}
        self._copies = {
            name: torch.zeros(live.shape, dtype=live.dtype, pin_memory=live.is_cuda)
            for name, live in self._live.items()
        }

    def is_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these tensors are still theirs."""
        now = _tensors_of(model, optimizer)
        return len(now) == len(self._tensors) and all(map(operator.is_, now, self._tensors))

    def take(self) -> "Copied":
        """Copies the state as it is now. The planner that writes it in place of `state`; good until the next
        call.
        """
        for name, live in self._live.items():
            self._copies[name].copy_(live, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Copied(self._copies)


class Copied(DefaultSavePlanner):
    """Plans as the state is spread over workers, and gives the copies to be written."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.copies[index.fqn]


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Those that training writes to; parameters as the optimiser has them, for FSDP swaps a model's own."""
    parameters = (param for group in optimizer.param_groups for param in group["params"])
    moments = (value for state in optimizer.state.values() for value in state.values())
    return [model, *parameters, *moments, *model.buffers()]


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
