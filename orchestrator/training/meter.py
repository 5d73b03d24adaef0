"""Speed of training: one worker's seconds, by what they were spent on."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from orchestrator.data.batch import Batch


class Meter:
    """Counts device-seconds: of training, times the workers. `device_s` comes from the checkpoint and goes
    into it, so a run may change its workers on the way.
    """

    def __init__(self, *, workers: int = 1, device_s: float = 0.0) -> None:
        self.workers = workers
        self.device_s = device_s
        self._start = time.perf_counter()
        self._read_at = device_s
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
        self.device_s += (time.perf_counter() - self._start) * self.workers
        yield
        self._start = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Rates of all workers since the last reading, while paused."""
        seconds = (self.device_s - self._read_at) / self.workers
        images, wait_s = self._images * self.workers, self._wait_s
        self._read_at, self._images, self._wait_s = self.device_s, 0, 0.0
        return {
            "perf/images_per_s": images / seconds,
            "data/wait_frac": wait_s / seconds,
            "cost/device_s": self.device_s,
        }


def device_sync() -> None:
    """Waits for the GPU, where there is one: without it a clock measures only the launches."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
