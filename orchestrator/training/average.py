"""The average of a model's weights over the updates.

It is a part of the optimiser's state, so that it is sharded, saved and resumed as moments are. Buffers are
not averaged. The running statistics of batch norm belong to the weights that computed them, so the average
gets its own where it is used; other buffers belong to both.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe.batch_norm import renew_statistics
from moe.layout import local_part
from moe.model import Model
from moe.parallel import weights_changed
from orchestrator.checkpoint.files import EMA
from orchestrator.config import EMAConfig

FOREACH: Any = torch  # has operators on lists of tensors, which are not in its public types


class Average:
    """Follows the weights that an optimiser updates.

    Attributes:
        updates: how many it has seen; a run that resumes sets its step.
        batches: returns the inputs from which a model of ``whole_batch`` computes statistics of its own.
    """

    def __init__(
        self,
        config: EMAConfig,
        optimizer: torch.optim.Optimizer,
        batches: Callable[[], Iterable[tuple[Any, Tensor]]] = tuple,
    ) -> None:
        self.config, self.optimizer, self.batches, self.updates = config, optimizer, batches, 0
        optimizer.register_step_post_hook(self._follow)

    @torch.no_grad()
    def _follow(self, *_: Any) -> None:
        self.updates += 1
        averages, weights = [], []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                # The optimiser itself takes a state that is not empty for its own.
                if param.grad is not None or self.optimizer.state.get(param):
                    state = self.optimizer.state[param]
                    if EMA not in state:
                        state[EMA] = param.detach().clone()
                    averages.append(local_part(state[EMA]))
                    weights.append(local_part(param))
        FOREACH._foreach_lerp_(averages, weights, 1 - self.config.decay_at(self.updates))

    @contextmanager
    def in_place_of_weights(self, model: Model) -> Iterator[None]:
        """The averages are the weights of `model`, which this optimiser updates, to the end of the block."""
        self._swap(model)
        kept = [buffer.clone() for buffer in model.buffers()]
        try:
            if model.config.whole_batch:
                renew_statistics(model, self.batches())
            yield
        finally:
            for buffer, before in zip(model.buffers(), kept, strict=True):
                buffer.copy_(before)
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for param, state in self.optimizer.state.items():
            weight, average = local_part(param), local_part(state[EMA])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        weights_changed(model)
