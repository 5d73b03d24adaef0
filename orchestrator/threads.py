"""How many threads a process computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe.cost import model_costs
from moe.model import ModelConfig

CORES = torch.get_num_threads()  # $OMP_NUM_THREADS, which Ray sets to the CPUs of a process, else all cores
# About two milliseconds of a matmul; with less, threads wait longer than they compute.
FLOPS_PER_THREAD = 100e6


def threads_for(config: ModelConfig, images: int) -> int:
    """Returns the number of threads that the largest matmul of `images` keeps busy, at most `CORES`.

    Matmuls of small models end before a second thread has woken up.
    """
    return max(1, min(CORES, int(2 * images * model_costs(config).largest / FLOPS_PER_THREAD)))


def set_threads(config: ModelConfig, images: int) -> None:
    torch.set_num_threads(threads_for(config, images))


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one thread, so that times of forward passes can be compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
