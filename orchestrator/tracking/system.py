"""The load of the driver's machine, which MLflow shows as system metrics."""

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from orchestrator.runs.metrics_file import SYSTEM, LineWriter

PATIENCE_S = 10.0
Monitor = CPUMonitor | DiskMonitor | NetworkMonitor | GPUMonitor


class SystemMetrics:
    """Writes CPU, memory, disk, network and GPUs to `system.jsonl` of a directory while the block lasts."""

    def __init__(self, directory: str, every_s: float = 10) -> None:
        self._lines = LineWriter(directory, SYSTEM)
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
        # A network disk or a GPU driver that does not answer must not keep the command from ending.
        self._thread.join(PATIENCE_S)
        if not self._thread.is_alive():
            self._lines.close()

    def _sample(self) -> None:
        monitors: list[Monitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        with suppress(RuntimeError):  # no GPU
            monitors.append(GPUMonitor())
        while not self._stop.wait(self._every_s):
            values = {}
            for monitor in monitors:
                monitor.collect_metrics()
                values |= monitor.aggregate_metrics()
                monitor.clear_metrics()
            named = {f"system/{name}": float(value) for name, value in values.items()}
            self._lines.append({"time_s": time.time(), "metrics": named})
