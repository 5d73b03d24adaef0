"""Cores and memory of a process that is made busy, then idle."""

import mmap
import time

import numpy as np

from orchestrator.training.metrics import GIB, UtilizationMonitor


def test_computing_and_sleeping():
    busy = UtilizationMonitor()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    first = busy.read()
    time.sleep(0.2)
    second = busy.read()
    assert first["perf/cpu_cores"] > 3 * second["perf/cpu_cores"]
    assert second["perf/cpu_cores"] < 0.5


def test_memory():
    busy = UtilizationMonitor()
    before = busy.read()["perf/memory_gib"]
    with mmap.mmap(-1, GIB) as held:  # a malloc may have it from what an earlier test has freed
        np.frombuffer(held, dtype=np.uint8)[:] = 1
        grown = busy.read()["perf/memory_gib"] - before
    assert 0.7 < grown < 1.2  # other pages come and go
