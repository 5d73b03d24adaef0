"""Gauges of each worker for Prometheus. Ray exports them from the worker's node as ``ray_moe_<name>`` with
the labels run, rank and node; the dashboard and the alerts of ``cluster/`` read them.
"""

import time

import ray
from ray.util.metrics import Gauge

from orchestrator.runs.metrics_file import Metrics

GAUGES = {  # name -> metric and description
    "step": ("", "step of the last report"),
    "reported_s": ("", "time of the last report, in seconds since the epoch"),
    "loss": ("train/loss", "mean loss over the global batch"),
    "images_per_s": ("perf/images_per_s", "training images of all workers"),
    "wait_frac": ("data/wait_frac", "training time in which this worker waited for images"),
    "busy_cores": ("", "cores that this worker's process used: one that waits for the others uses few"),
    "checkpoint_age_s": ("checkpoint/age_s", "seconds since a checkpoint was saved"),
    "bad_images": ("data/bad_images", "images that could not be decoded"),
}


class Gauges:
    """The gauges of one worker."""

    def __init__(self, run: str, rank: int) -> None:
        self._clocks = time.perf_counter(), time.process_time()
        self._tags = {"run": run, "rank": str(rank), "node": ray.util.get_node_ip_address()}
        self._gauges = {
            name: Gauge(f"moe_{name}", description=about, tag_keys=tuple(self._tags))
            for name, (_, about) in GAUGES.items()
        }

    def report(self, step: int, metrics: Metrics) -> None:
        before, self._clocks = self._clocks, (time.perf_counter(), time.process_time())
        wall_s, busy_s = (now - then for now, then in zip(self._clocks, before, strict=True))
        values = {"step": step, "reported_s": time.time(), "busy_cores": busy_s / wall_s}
        values |= {name: metrics[metric] for name, (metric, _) in GAUGES.items() if metric in metrics}
        for name, value in values.items():
            self._gauges[name].set(value, self._tags)
