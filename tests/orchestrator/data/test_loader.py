"""Batches that a thread fetches: the same, a few ahead, with the reader's errors; chunks of a plan."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.data.loader import BATCHES_AHEAD, prefetched
from orchestrator.data.ray_data import ReadPlan
from tests.orchestrator.training.batches import make_batch

CPU = torch.device("cpu")


def numbered(count: int, read: list[int]) -> Iterator[Batch]:
    for number in range(count):
        read.append(number)
        yield make_batch(torch.full((2, 3, 1, 1), number), torch.full((2,), number))


def settled(read: list[int]) -> int:
    """How many batches were read, once no more are."""
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
    for taken in (1, 2):
        next(batches)
        assert settled(read) == taken + BATCHES_AHEAD + 1  # the thread holds another


def test_errors_arrive_after_what_was_read() -> None:
    def fails() -> Iterator[Batch]:
        yield from numbered(3, [])
        raise OSError("the disk is gone")

    batches = prefetched(fails(), CPU)
    assert [int(next(batches).label[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_its_thread_ends_with_the_consumer() -> None:
    batches = prefetched(numbered(1000, []), CPU)
    next(batches)
    batches.close()
    while any(thread.name == "prefetch" for thread in threading.enumerate()):
        time.sleep(0.05)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for number, batch in enumerate(prefetched(numbered(50, []), torch.device("cuda"))):
        assert batch.image.device.type == "cuda"
        assert (batch.image.cpu() == number).all()


@pytest.mark.parametrize(("batch_size", "image_size"), [(48, 16), (48, 512), (6, 3000), (2048, 8), (30, 224)])
def test_chunks_cover_every_slot_in_order(batch_size: int, image_size: int) -> None:
    run = override(RunConfig(), {"data.batch_size": batch_size, "model.image_size": image_size})
    for workers, steps in itertools.product((1, 2, 3), (range(0), range(5, 6), range(3, 50))):
        plan = ReadPlan(run, "train", steps.start, steps.stop, workers)
        parts = [part for number in range(plan.chunk_count()) for part in plan.chunk(number)]
        slots = [(step, slot) for step, part in parts for slot in part]
        assert slots == [(step, slot) for step in steps for slot in range(batch_size // workers)]
        assert all(part.start % 2 == 0 for _, part in parts)
