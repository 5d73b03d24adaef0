"""The state at one moment, in host memory: what is written while training changes the state itself."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor


class Snapshot:
    """Memory for a copy of this worker's share of `state`.

    Tensors are looked up once: FSDP, optimisers and our modules write into theirs and never replace one.
    Made before training starts, for its pages are touched here, which takes longer than a copy.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = dict(state)
        self._live = {name: _local(tensor) for name, tensor in state.items()}
        self._copies = {
            name: torch.zeros(live.shape, dtype=live.dtype, pin_memory=live.is_cuda)
            for name, live in self._live.items()
        }

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


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
