"""How many threads compute: few for small models, whose matmuls end before a second thread has woken up."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe.vit import ViTConfig

CORES = torch.get_num_threads()  # $OMP_NUM_THREADS, which Ray sets to the CPUs of a process, else all cores
FLOPS_PER_THREAD = 100e6  # of a matmul, about two milliseconds; below, waiting threads lose all beside others


def threads_for(config: ViTConfig, images: int) -> int:
    """Threads for forward passes of `images`: as many as its largest matmul keeps busy, at most `CORES`."""
    flops = 2 * images * config.tokens() * config.width * config.mlp_dim
    return max(1, min(CORES, int(flops / FLOPS_PER_THREAD)))


def set_threads(config: ViTConfig, images: int) -> None:
    """Lets torch compute with `threads_for` such passes, in the calling thread and those it starts."""
    torch.set_num_threads(threads_for(config, images))


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes on one thread meanwhile: what times of forward passes are taken on, so that they compare."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
