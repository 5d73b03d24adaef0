"""The counters and results of a run that its checkpoints hold beside the weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.data.batch import DecodeError
from orchestrator.runs.metrics_file import Metrics


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counts and metrics in a checkpoint, beside the step and the weights.

    Attributes:
        device_s: device-seconds of training.
        counted: the costs of `train.costs` so far, of all workers.
        reported, metrics: step and values of the last report.
        best_k: the k best finite values of the task's quality, with their steps, best first; of equal values
            the earliest.
        trunk: steps and device-seconds of the run that this run branched from.
        fingerprint, bad: what was read (`SampleTracker`).
        scheduled: whether an undisturbed run saves this step too, and not only one that was cut there.
    """

    device_s: float = 0.0
    counted: Metrics = field(default_factory=Metrics)
    reported: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    best_k: list[tuple[float, int]] = field(default_factory=list)
    trunk: tuple[int, float] | None = None
    fingerprint: int = 0
    bad: list[DecodeError] = field(default_factory=list)
    scheduled: bool = True

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "Progress":
        """Returns the progress that a checkpoint holds; older ones hold the best value alone."""
        fields = {name: value for name, value in saved.items() if name != "best"}
        pairs = saved.get("best_k") or ([saved["best"]] if saved.get("best") else [])
        fields["best_k"] = [(value, step) for value, step in pairs if math.isfinite(value)]
        return cls(**fields)

    @property
    def best(self) -> tuple[float, int] | None:
        return self.best_k[0] if self.best_k else None

    def after(self, step: int, metrics: Metrics, quality_name: str, k: int = 1) -> "Progress":
        """Returns the progress after the report of `step`, with at most `k` of them."""
        best_k, quality = self.best_k, metrics.get(quality_name, math.nan)
        if math.isfinite(quality):
            best_k = sorted([*best_k, (quality, step)], key=lambda pair: (-pair[0], pair[1]))[:k]
        return replace(self, reported=step, metrics=metrics, best_k=best_k)

    def best_so_far(self, quality_name: str) -> str:
        if not self.best:
            return f"no {quality_name} yet"
        return f"best {quality_name} {self.best[0]:.4g} at step {self.best[1]}"
