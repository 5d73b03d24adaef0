"""Keeps freed memory in the process: a step's gradients reuse the pages of the step before.

glibc maps every large tensor anew and unmaps it when freed, so each step pays a page fault for every 4 KiB of
its weight gradients; with many experts that costs more than computing them. Measured: `bench/results/`.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """From now on this process neither maps tensors one by one nor returns memory; glibc alone, else nothing.

    The same as MALLOC_MMAP_MAX_=0 and no MALLOC_TRIM_THRESHOLD_ in the environment, but it also works in a
    process that runs already.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
