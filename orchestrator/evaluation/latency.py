"""Measured milliseconds per image of a trained model, at one operating point or several."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.vit import ViT
from orchestrator.training.loop import one_thread
from orchestrator.training.meter import device_sync

WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds per image of each timed forward pass, over batches of `batch` images, on `device`."""

    ms: tuple[float, ...]
    batch: int
    device: str

    @property
    def median(self) -> float:
        return self._quantile(0.5)

    @property
    def low(self) -> float:
        """The lower quartile."""
        return self._quantile(0.25)

    @property
    def high(self) -> float:
        """The upper quartile."""
        return self._quantile(0.75)

    def summary(self) -> dict[str, Any]:
        """Median, quartiles and how they were measured, as JSON has them."""
        figures = {"median": self.median, "low": self.low, "high": self.high}
        return figures | {"batch": self.batch, "repeats": len(self.ms), "device": self.device}

    def _quantile(self, share: float) -> float:
        return float(np.quantile(self.ms, share))


@torch.no_grad()
def latencies(
    model: ViT, images: Tensor, points: Sequence[RoutingOverrides] = (AS_TRAINED,), *, repeats: int = 10
) -> list[Latency]:
    """The latency of each point on these very images (B, 3, H, W), with one CPU thread.

    `WARM_UP` passes come first, and the device is waited for before and after each pass that counts. Points
    take turns, so that a change of the machine's speed affects all of them alike.
    """
    ms: list[list[float]] = [[] for _ in points]
    with one_thread():
        for turn in range(WARM_UP + repeats):
            for point, taken in zip(points, ms, strict=True):
                device_sync()
                began = time.perf_counter()
                model(images, routing_overrides=point)
                device_sync()
                if turn >= WARM_UP:
                    taken.append(1000 * (time.perf_counter() - began) / len(images))
    device = device_name(images.device)
    return [Latency(ms=tuple(taken), batch=len(images), device=device) for taken in ms]


def device_name(device: torch.device) -> str:
    """The device that `latencies` measures on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, 1 thread"
