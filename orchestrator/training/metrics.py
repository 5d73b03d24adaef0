"""What a run measures of itself: speed, load of its workers, and which images it has read."""

import csv
import io
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from moe.init import mix
from moe.parallel import sum_over_ranks
from orchestrator import storage
from orchestrator.data.batch import Batch, DecodeError
from orchestrator.errors import UsageError

BAD_IMAGES = "bad_images.csv"  # in the run's directory, and among its artifacts
COUNTED_FROM = 1000  # images: of few, one bad is many
SHOWN = 20
GIB = 2**30


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


class UtilizationMonitor:
    """Load of all workers together since the last reading, which all of them make at once."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._at = self._clocks()

    def read(self) -> dict[str, float]:
        """``perf/cpu_cores``: cores that computed, on average; without those that decode images elsewhere.

        ``perf/memory_gib``: of the workers' processes. With GPUs also means over them: ``perf/gpu_util``,
        percent of time in which a kernel ran, as last sampled; ``perf/gpu_memory_gib``, peak of tensors.
        """
        before, self._at = self._at, self._clocks()
        wall, cpu = (now - then for now, then in zip(self._at, before, strict=True))
        values = [cpu / wall, self._process.memory_info().rss / GIB]
        if torch.cuda.is_available():
            values += [float(torch.cuda.utilization()), torch.cuda.max_memory_allocated() / GIB, 1.0]
            torch.cuda.reset_peak_memory_stats()
        total = sum_over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()
        found = {"perf/cpu_cores": total[0], "perf/memory_gib": total[1]}
        if len(total) > 2:
            found |= {"perf/gpu_util": total[2] / total[4], "perf/gpu_memory_gib": total[3] / total[4]}
        return found

    def _clocks(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


class SampleTracker:
    """Of this worker's batches; `gather` has that of all workers.

    The fingerprint is a sum over samples, of a hash of each and its place in the run, so it does not depend
    on how they are shared out: runs that have the same after a step have read the same samples in the same
    places.
    """

    def __init__(self, *, fingerprint: int = 0, bad: list[DecodeError]) -> None:
        """With what all workers had read before."""
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._sum = torch.tensor(fingerprint if first else 0)
        self._bad = {DecodeError(*one): None for one in bad}

    def training(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches."""
        for batch in self.validation(batches):
            self._sum = self._sum.to(batch.key.device) + _hashes(batch).sum()
            yield batch

    def validation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, of which only what is bad counts."""
        for batch in batches:
            self._bad |= dict.fromkeys(batch.bad)
            yield batch

    def gather(self) -> tuple[int, list[DecodeError]]:
        """The fingerprint, and what is bad, each once; to be called by all workers together."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone: list[list[DecodeError]] = [[]] * dist.get_world_size()
            dist.all_gather_object(everyone, list(self._bad))
            self._bad = {bad: None for one in everyone for bad in one}
        return int(sum_over_ranks(self._sum.clone())), sorted(self._bad)


def shown(fingerprint: int) -> float:
    """As a metric: the 48 bits that every store holds exactly."""
    return float(fingerprint % 2**48)


def check_bad(bad: list[DecodeError], *, read: int, epoch: int, most: float) -> None:
    """`read`: images so far; `epoch`: images of one.

    Raises:
        UsageError: if more than the part `most` of them is bad.
    """
    base = max(read, min(epoch, COUNTED_FROM))
    if len(bad) > most * base:
        lines = "".join(f"\n  {one.shard} row {one.row}, {one.key}: {one.reason}" for one in bad[:SHOWN])
        more = f"\n  .. and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise UsageError(
            f"{len(bad)} of {base} images cannot be decoded, more than data.max_bad_frac={most:g}:"
            f"{lines}{more}\n{BAD_IMAGES} in the run's directory has all; mend them, or raise"
            " data.max_bad_frac"
        )


def save_bad(directory: str, bad: list[DecodeError]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(DecodeError._fields)
    writer.writerows(bad)
    storage.write_bytes(storage.join(directory, BAD_IMAGES), text.getvalue().encode())


def _hashes(batch: Batch) -> Tensor:
    return mix(batch.sample, batch.key)
