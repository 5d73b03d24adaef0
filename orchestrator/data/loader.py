"""Loading in the process that trains: threads decode ahead, and a thread moves batches to the device."""

import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import torch
from torch import Tensor

from orchestrator.data.batch import Batch, PartialBatch, join
from orchestrator.data.stream import Stream

CORES = torch.get_num_threads()  # $OMP_NUM_THREADS, which Ray sets to the CPUs of a process, else all cores
SLOTS = 16  # of a thread's task; even, because images are mixed in pairs
DECODED_BYTES = 64 << 20  # of images decoded ahead, or two steps
BATCHES_AHEAD = 2  # on the device


def in_process(stream: Stream, steps: range) -> Iterator[Batch]:
    """Yields this worker's batches of `steps`, decoded by one thread per core."""
    share = stream.share()
    parts = [range(first, min(first + SLOTS, share)) for first in range(0, share, SLOTS)]
    ahead = max(2, min(32, DECODED_BYTES // (share * 3 * stream.transform.size**2)))
    waiting: deque[list[Future[PartialBatch]]] = deque()
    pool = ThreadPoolExecutor(CORES, thread_name_prefix="decode")
    try:
        for step in steps:
            waiting.append([pool.submit(stream.read, step, part) for part in parts])
            if len(waiting) > ahead:
                yield join([part.result() for part in waiting.popleft()])
        while waiting:
            yield join([part.result() for part in waiting.popleft()])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def prefetched(batches: Iterator[Batch], device: torch.device) -> Generator[Batch]:
    """Yields the same batches on `device`, fetched by a thread.

    A GPU gets them through pinned memory, while it computes.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(BATCHES_AHEAD)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                continue

    def fetch() -> None:
        try:
            for batch in batches:
                put(batch.map(Tensor.pin_memory) if device.type == "cuda" else batch)
                if stopped.is_set():
                    break
            put(None)
        except BaseException as error:  # is raised where the next batch is asked for
            put(error)

    threading.Thread(target=fetch, daemon=True, name="prefetch").start()
    try:
        with closing(_items(ready)) as fetched:
            yield from _on_gpu(fetched, device) if device.type == "cuda" else fetched
    finally:
        stopped.set()


def _items(ready: "queue.Queue[Batch | BaseException | None]") -> Generator[Batch]:
    while (item := ready.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


def _on_gpu(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Copies a batch while the GPU works on the one before."""
    copying = torch.cuda.Stream(device)
    before: Batch | None = None
    for batch in batches:
        with torch.cuda.stream(copying):
            following = batch.map(lambda pinned: pinned.to(device, non_blocking=True))
        if before is not None:
            yield before
        torch.cuda.current_stream(device).wait_stream(copying)
        for field in following[:-1]:
            field.record_stream(torch.cuda.current_stream(device))
        before = following
    if before is not None:
        yield before
