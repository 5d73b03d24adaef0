"""Speed of training: one worker's seconds, by what they were spent on."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from orchestrator.data.stream import Batch


class Meter:
    """Counts seconds of training; `trained_s` comes from the checkpoint and goes into it."""

    def __init__(self, *, trained_s: float = 0.0) -> None:
        self.trained_s = trained_s
        self._start = time.perf_counter()
        self._read_at = trained_s
        self._wait_s = 0.0
        self._images = 0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; the time until each arrives counts as waiting."""
        asked = time.perf_counter()
        for batch in batches:
            self._wait_s += time.perf_counter() - asked
            self._images += len(batch.label)
            yield batch
            asked = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reports, evaluation and checkpoints are no training."""
        device_sync()
        self.trained_s += time.perf_counter() - self._start
        yield
        self._start = time.perf_counter()

    def read(self, *, workers: int) -> dict[str, float]:
        """Rates of all workers since the last reading, while paused."""
        seconds, images, wait_s = self.trained_s - self._read_at, self._images, self._wait_s
        self._read_at, self._images, self._wait_s = self.trained_s, 0, 0.0
        return {
            "perf/images_per_s": images * workers / seconds,
            "data/wait_frac": wait_s / seconds,
            "cost/device_s": self.trained_s * workers,
        }


def device_sync() -> None:
    """Waits for the GPU, where there is one: without it a clock measures only the launches."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
