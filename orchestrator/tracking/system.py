"""How busy this machine is, beside the training that it does: what MLflow shows as system metrics."""

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from orchestrator.tracking.runs import TrackedRun

Monitor = CPUMonitor | DiskMonitor | NetworkMonitor | GPUMonitor


class SystemMetrics:
    """CPU, memory, disk, network and GPUs while the block lasts; axis: seconds since the run began."""

    def __init__(self, tracked: TrackedRun, every_s: float = 10) -> None:
        self._tracked = tracked
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="system-metrics")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        monitors = _monitors()
        while not self._stop.wait(self._every_s):
            values = {}
            for monitor in monitors:
                monitor.collect_metrics()
                values |= monitor.aggregate_metrics()
                monitor.clear_metrics()
            place = int(time.time()) - self._tracked.began_s
            self._tracked.log_at(place, {f"system/{name}": value for name, value in values.items()})


def _monitors() -> list[Monitor]:
    monitors: list[Monitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with suppress(RuntimeError):  # no GPU
        monitors.append(GPUMonitor())
    return monitors
