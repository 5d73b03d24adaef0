"""Batches on the device before they are asked for."""

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import closing

import torch
from torch import Tensor

from orchestrator.data.stream import Batch

AHEAD = 2


def prefetched(batches: Iterator[Batch], device: torch.device) -> Generator[Batch]:
    """The same batches on `device`, fetched by a thread; to a GPU through pinned memory, beside its work."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(AHEAD)
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
        except BaseException as error:  # belongs to whoever asks for the next batch
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
    """One batch is copied while the one before it is worked on."""
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
