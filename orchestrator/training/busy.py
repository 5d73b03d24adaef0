"""How busy the workers of a run keep what they hold, beside how fast they are."""

import time

import psutil
import torch

from moe.parallel import sum_over_ranks

GIB = 2**30


class Busy:
    """Of all workers together, since the last reading; to be read by all of them at once."""

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
