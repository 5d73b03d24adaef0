"""The state of routers that training changes beside its gradients: when it changes, and what it counts.

Counts are integers, of valid tokens of training alone, summed over microbatches and workers before a router
sees them. So its state is the same to the bit however a batch is split.
"""

import torch
from torch import nn

from moe.parallel import sum_over_ranks
from moe.routing import Router


def before_step(model: nn.Module, step: int) -> None:
    """Prepares the routers of `model` for update `step`, which counts from 0."""
    for router in _trained(model):
        router.before_step(step)


@torch.no_grad()
def after_batch(model: nn.Module) -> None:
    """Lets the routers of `model` learn from what all ranks counted since the last update. It belongs between
    the backward pass of the last microbatch and the optimiser, and all ranks call it together.
    """
    routers = [router for router in _trained(model) if router.counts is not None]
    if not routers:
        return
    counts = [router.counts for router in routers if router.counts is not None]
    total = sum_over_ranks(torch.cat([count.flatten() for count in counts]))
    for count, summed in zip(counts, total.split([count.numel() for count in counts]), strict=True):
        count.copy_(summed.view_as(count))
    for router in routers:
        router.after_batch(routers)
    for count in counts:
        count.zero_()


def _trained(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router) and not module.frozen]
