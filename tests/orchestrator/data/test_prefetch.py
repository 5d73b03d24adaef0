"""Batches that a thread fetches: the same, a few ahead, with the errors of whoever reads."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from orchestrator.data.prefetch import AHEAD, prefetched
from orchestrator.data.stream import Batch
from tests.orchestrator.training.batches import make_batch

CPU = torch.device("cpu")


def numbered(count: int, read: list[int]) -> Iterator[Batch]:
    for number in range(count):
        read.append(number)
        yield make_batch(torch.full((2, 3, 1, 1), number), torch.full((2,), number))


def settled(read: list[int]) -> int:
    """How many were read, when no more are."""
    before = -1
    while before != len(read):
        before = len(read)
        time.sleep(0.1)
    return before


def test_the_same_batches() -> None:
    found = [int(batch.label[0]) for batch in prefetched(numbered(20, []), CPU)]
    assert found == list(range(20))
    assert list(prefetched(iter([]), CPU)) == []


def test_a_few_ahead_and_no_more() -> None:
    read: list[int] = []
    batches = prefetched(numbered(20, read), CPU)
    next(batches)
    assert settled(read) == 1 + AHEAD + 1  # one is in the thread's hand
    next(batches)
    assert settled(read) == 2 + AHEAD + 1


def test_errors_arrive_after_what_was_read() -> None:
    def fails() -> Iterator[Batch]:
        yield from numbered(3, [])
        raise OSError("the disk is gone")

    batches = prefetched(fails(), CPU)
    assert [int(next(batches).label[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_its_thread_ends_with_who_asked() -> None:
    batches = prefetched(numbered(1000, []), CPU)
    next(batches)
    batches.close()
    deadline = time.monotonic() + 10
    while any(thread.name == "prefetch" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    for number, batch in enumerate(prefetched(numbered(50, []), cuda)):
        assert batch.image.device.type == "cuda"
        assert (batch.image.cpu() == number).all()
