"""What a worker sets in its process before it trains: threads, deterministic algorithms, freed memory."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orchestrator import threads
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.stream import in_process
from orchestrator.threads import threads_for
from orchestrator.training.worker import M_MMAP_MAX, M_TRIM_THRESHOLD, Worker
from tests.parts import poison_memory, without

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def run(digits: str, tmp_path: Path) -> RunConfig:
    changes = {"data.path": digits, "storage": str(tmp_path), "model.width": 16, "train.steps": 1}
    return override(RunConfig(), changes)


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def begin(run: RunConfig) -> None:
    Worker(run, lambda step, metrics: None, in_process)


@pytest.mark.parametrize("asked", [False, True])
def test_it_computes_deterministically_if_asked(
    asked: bool, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch has no such algorithm it raises, and fills no memory, which takes time."""
    monkeypatch.setenv(CUBLAS, "")
    monkeypatch.delenv(CUBLAS)
    torch.use_deterministic_algorithms(False)
    begin(override(run, {"scale.deterministic": asked}))
    mode = torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    poison_memory()
    assert (mode, os.environ.get(CUBLAS), fills) == ((2, ":4096:8", False) if asked else (0, None, True))


def test_it_takes_the_threads_that_its_images_keep_busy(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a microbatch."""
    monkeypatch.setattr(threads, "CORES", 4)
    large = {"data.batch_size": 1024, "train.microbatch": 512, "model.width": 64, "model.mlp_dim": 256}
    run = override(run, large)
    wanted = threads_for(run.model, 512)
    assert 1 < wanted < threads_for(run.model, 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begin(run)
        assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)


class MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns; `arena` are the bytes that the process has for what is not mapped."""

    _fields_ = (("arena", ctypes.c_size_t), ("others", ctypes.c_size_t * 9))


def test_memory_that_it_frees_stays_in_the_process(run: RunConfig) -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        without("needs glibc")
    libc.mallinfo2.restype = MallInfo

    def kept(size: int = 1 << 30) -> float:
        """Returns how much of an array, larger than all that is free, the process has once it is freed."""
        libc.malloc_trim(0)
        before = libc.mallinfo2().arena
        np.empty(size, np.uint8)
        return (libc.mallinfo2().arena - before) / size

    # glibc's own settings: another test of this process may have begun a worker.
    libc.mallopt(M_MMAP_MAX, 65536)
    libc.mallopt(M_TRIM_THRESHOLD, 128 << 10)
    assert kept() < 0.1
    begin(run)
    assert kept() > 0.9
    libc.malloc_trim(0)


PAGE_FAULTS = """
import ctypes, resource, torch
from orchestrator.training.worker import keep_freed_memory

x, w = torch.ones(256, 256), torch.ones(32, 256, 1024, requires_grad=True)

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        w.grad = None  # 32 MiB, as the backward below makes it anew
        (x @ w).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = faults(4)
keep_freed_memory()
faults(20)  # until the heap has found its layout
print(fresh, faults(4), hasattr(ctypes.CDLL(None), "mallopt"))
"""


@pytest.mark.smoke
def test_pages_of_freed_tensors_are_used_again() -> None:
    """Four steps take some hundred thousand page faults, and hardly any with `keep_freed_memory`."""
    command = [sys.executable, "-c", PAGE_FAULTS]
    fresh, kept, glibc = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if glibc == "False":
        without("needs glibc")
    assert int(kept) < 0.1 * int(fresh)
