"""Measurements of a run: its speed, the load of its workers, and the images that it has read."""

import csv
import io
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist

from moe.config import members
from moe.init import mix
from moe.parallel import sum_over_ranks
from moe.routers import RouterConfig
from orchestrator import storage
from orchestrator.costs import Cost
from orchestrator.data.batch import Batch, DecodeError
from orchestrator.errors import UsageError, reason_of
from orchestrator.runs.run_directory import BAD_IMAGES

log = logging.getLogger(__name__)

MIN_COUNTED = 1000  # images; of fewer images, a single bad one would be a large fraction
LISTED = 20  # bad images in an error message
GIB = 2**30

# 1e12 FLOPs per second of dense bf16 matmuls, by what a GPU's name holds. Source: NVIDIA's data sheets.
PEAK_TFLOPS = {
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "A10G": 70,
}  # fmt: skip

# Unit and meaning of names in `metrics.jsonl`, beside those of costs, tasks and routers.
METRICS = {
    "train/loss": ("nats", "mean loss over the global batch, with the routers' auxiliary losses"),
    "train/loss_router": ("nats", "its part from the routers"),
    "train/grad_norm": ("-", "norm of the gradient before clipping"),
    "train/lr": ("-", "learning rate"),
    "fewshot/acc_<n>shot": (
        "fraction",
        "test images that ridge regression on frozen features, fitted to n"
        " images per class, classifies correctly",
    ),
    "perf/images_per_s": ("1/s", "training images of all workers, without evaluation and checkpoints"),
    "perf/mfu": ("fraction", "of the GPUs' dense bf16 peak that training FLOPs (6mac) reach; of known GPUs"),
    **{
        f"perf/{name}_s": ("s", f"time of the first worker in {what} since the report before")
        for name, what in {
            "forward": "forward passes",
            "backward": "backward passes",
            "optimizer": "updates",
            "evaluate": "evaluation",
            "checkpoint": "saving",
            "report": "reports",
        }.items()
    },
    "perf/cpu_cores": ("cores", "cores that the workers' processes used on average"),
    "perf/gpu_util": ("percent", "time in which a kernel ran, mean over the GPUs"),
    "data/wait_frac": ("fraction", "training time in which the workers waited for images"),
    "data/fingerprint": ("-", "hash of the samples read so far and of their places; equal for equal orders"),
    "data/bad_images": ("-", "images that could not be decoded"),
    "data/s3_requests": ("-", "requests for parts of shards in an object storage"),
    "data/s3_gb": ("GB", "bytes that these requests fetched"),
    "checkpoint/age_s": ("s", "since a checkpoint was saved, or the workers began"),
    "checkpoint/failed": ("-", "checkpoints that could not be written"),
    "init/loss": ("nats", "loss on one batch of evaluation before the first step, with weights taken over"),
    "init/loss_source": ("nats", "the same of the model that the weights are from"),
    "resumed/step": ("steps", "step at which the run continued"),
    "system/*": ("-", "load of the driver's machine, under the names of MLflow's system metrics"),
}

MORE_IS_BETTER = ("perf/images_per_s", "perf/mfu", "perf/gpu_util")  # of those above, beside qualities


def described_metrics() -> dict[str, tuple[str, str]]:
    """Returns unit and meaning of every name in `metrics.jsonl`, beside those of costs and tasks."""
    return METRICS | {
        f"moe/{name}": (statistic.unit, statistic.meaning)
        for router in members(RouterConfig)
        for name, statistic in router.described.items()
    }


class CostCounters:
    """Counts the costs of `train.costs`. All workers make one, and ask it for totals together.

    Args:
        before: what the checkpoint has of them, of all workers.
    """

    def __init__(
        self, costs: Iterable[Cost], device: torch.device, before: Mapping[str, float] | None = None
    ) -> None:
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._reads = {cost: cost.counter(device) for cost in costs}
        self._own = {cost: (before or {}).get(cost.kind, 0.0) if first else 0.0 for cost in self._reads}
        self._at = dict[Cost, float]()
        self.start()

    def start(self) -> None:
        self._at = {cost: read() for cost, read in self._reads.items() if read}

    def stop(self) -> None:
        for cost, at in self._at.items():
            if read := self._reads[cost]:
                now = read()
                self._own[cost] = max(self._own[cost], now) if cost.peak else self._own[cost] + now - at

    def totals(self) -> dict[str, float]:
        """Returns what all workers have counted; the counters must be stopped."""
        by_worker = [self._own]
        if dist.is_initialized() and self._own:
            by_worker = [self._own] * dist.get_world_size()
            dist.all_gather_object(by_worker, self._own)
        return {c.kind: (max if c.peak else math.fsum)(own[c] for own in by_worker) for c in self._own}


class Meter:
    """Measures training speed, and device-seconds: seconds of training times the number of workers.

    `device_s` comes from the checkpoint and is saved in the next, so the number of workers may change.

    Args:
        counters: run while its clock does.
    """

    def __init__(
        self, *, workers: int = 1, device_s: float = 0.0, counters: CostCounters | None = None
    ) -> None:
        self.workers = workers
        self.device_s = device_s
        self._counters = counters
        self._start = time.perf_counter()
        self._read_at = device_s
        self._wait_s = 0.0
        self._images = 0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the same batches; the time until each arrives counts as waiting."""
        asked = time.perf_counter()
        for batch in batches:
            self._wait_s += time.perf_counter() - asked
            self._images += len(batch)
            yield batch
            asked = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock: reports, evaluation and checkpoints do not count as training."""
        device_sync()
        self.device_s += (time.perf_counter() - self._start) * self.workers
        if self._counters:
            self._counters.stop()
        yield
        if self._counters:
            self._counters.start()
        self._start = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Returns the rates of all workers since the last call; the meter must be paused."""
        seconds = (self.device_s - self._read_at) / self.workers
        images, wait_s = self._images * self.workers, self._wait_s
        self._read_at, self._images, self._wait_s = self.device_s, 0, 0.0
        return {
            "perf/images_per_s": images / seconds,
            "data/wait_frac": wait_s / seconds,
            "cost/device_s": self.device_s,
        }


def device_sync() -> None:
    """Waits for the GPU, if this process uses one: otherwise a clock measures only the launches of kernels.

    A process that trains on the CPU of a machine with GPUs never makes a context on them.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def model_flops_utilization(flops_per_s: float, workers: int) -> dict[str, float]:
    """Returns ``perf/mfu`` at this rate of training FLOPs of all workers; nothing without a known GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    return {"perf/mfu": flops_per_s / (workers * peak * 1e12)} if peak else {}


class UtilizationMonitor:
    """Measures the load of all workers since the last reading. All workers call it together."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._at = self._clocks()
        self._gpu_util_known = True

    def read(self) -> dict[str, float]:
        """Returns sums over the workers' processes, without the processes that decode images for them:
        ``perf/cpu_cores``, cores in use on average, and ``perf/memory_gib``.

        With GPUs also means over them: ``perf/gpu_memory_gib``, the peak memory of tensors, and, where the
        driver knows it, ``perf/gpu_util``, the percentage of time in which a kernel ran, as last sampled.
        """
        before, self._at = self._at, self._clocks()
        wall, cpu = (now - then for now, then in zip(self._at, before, strict=True))
        values = [cpu / wall, self._process.memory_info().rss / GIB]
        if torch.cuda.is_initialized():
            values += [torch.cuda.max_memory_allocated() / GIB, 1.0, *self._gpu_util()]
            torch.cuda.reset_peak_memory_stats()
        cpu_cores, memory_gib, *of_gpus = sum_over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()
        load = {"perf/cpu_cores": cpu_cores, "perf/memory_gib": memory_gib}
        if of_gpus:
            gpu_memory_gib, gpus, gpu_util, gpus_known = of_gpus
            load["perf/gpu_memory_gib"] = gpu_memory_gib / gpus
            if gpus_known:
                load["perf/gpu_util"] = gpu_util / gpus_known
        return load

    def _gpu_util(self) -> tuple[float, float]:
        """Returns the utilization of this worker's GPU and 1, or twice 0 where it cannot be measured: on a
        part of a GPU (MIG), without NVIDIA's management library, or without the permission to ask it.
        """
        if self._gpu_util_known:
            try:
                return float(torch.cuda.utilization()), 1.0
            except Exception as error:
                log.warning("perf/gpu_util is not reported: %s", reason_of(error))
                self._gpu_util_known = False
        return 0.0, 0.0

    def _clocks(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


class SampleTracker:
    """Records which samples this worker has read; `gather` returns what all workers have read.

    The fingerprint is a sum over samples of a hash of the sample and its place in the run, so it does not
    depend on how samples are distributed over workers: runs with equal fingerprints after a step have read
    the same samples at the same places. A resumed run starts with what all its workers had read.
    """

    def __init__(self, *, fingerprint: int = 0, bad: Iterable[DecodeError] = ()) -> None:
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._sum = torch.tensor(fingerprint if first else 0)
        self._bad = {DecodeError(*error) for error in bad}
        self._traffic = torch.zeros(2, dtype=torch.int64)

    def training(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in self.validation(batches):
            self._sum = self._sum.to(batch.key.device) + mix(batch.sample, batch.key).sum()
            yield batch

    def validation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Records only decode errors and traffic."""
        for batch in batches:
            self._bad |= {*batch.bad}
            self._traffic += torch.tensor(batch.traffic)
            yield batch

    def gather(self) -> tuple[int, list[DecodeError]]:
        """Returns the fingerprint and the bad images, each once. All workers call it together."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            by_worker: list[set[DecodeError]] = [set()] * dist.get_world_size()
            dist.all_gather_object(by_worker, self._bad)
            self._bad = set[DecodeError]().union(*by_worker)
        return int(sum_over_ranks(self._sum.clone())), sorted(self._bad)

    def traffic(self) -> dict[str, float]:
        """Returns the requests for ranges of shards elsewhere, ``data/s3_requests``, and what they fetched,
        ``data/s3_gb``, since the workers started; nothing if there were none. All workers call it together.
        """
        requests, size = sum_over_ranks(self._traffic.clone()).tolist()
        return {"data/s3_requests": float(requests), "data/s3_gb": size / 1e9} if requests else {}


def fingerprint_metric(fingerprint: int) -> float:
    """Returns the lower 48 bits, which every metric store holds exactly."""
    return float(fingerprint % 2**48)


def check_bad(bad: list[DecodeError], *, read: int, epoch: int, max_frac: float) -> None:
    """Checks the fraction of bad images among the `read` images so far; `epoch` is the size of an epoch.

    Raises:
        UsageError: if more than `max_frac` of them are bad.
    """
    counted = max(read, min(epoch, MIN_COUNTED))
    if len(bad) > max_frac * counted:
        lines = "".join(f"\n  {e.shard} row {e.row}, {e.key}: {e.reason}" for e in bad[:LISTED])
        more = f"\n  .. and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
        raise UsageError(
            f"{len(bad)} of {counted} images cannot be decoded, more than data.max_bad_frac={max_frac:g}:"
            f"{lines}{more}\n{BAD_IMAGES} in the run's directory lists all: repair them, or raise"
            " data.max_bad_frac"
        )


def write_csv(location: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    storage.write_bytes(location, text.getvalue().encode())
