"""Measured milliseconds per image of a trained model, at one operating point or several."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.vit import ViT
from orchestrator.training.meter import device_sync

WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds per image of forward passes over batches of `batch`, on `device`."""

    median: float
    least: float
    most: float
    batch: int
    repeats: int
    device: str


@torch.no_grad()
def latencies(
    model: ViT, images: Tensor, points: Sequence[RoutingOverrides] = (AS_TRAINED,), *, repeats: int = 10
) -> list[Latency]:
    """Of each point on these very images (B, 3, H, W): `WARM_UP` passes first, the device waited for before
    and after each that counts. Points take turns, so that what slows the machine down slows all of them.
    """
    seconds: list[list[float]] = [[] for _ in points]
    for turn in range(WARM_UP + repeats):
        for point, taken in zip(points, seconds, strict=True):
            device_sync()
            began = time.perf_counter()
            model(images, routing_overrides=point)
            device_sync()
            if turn >= WARM_UP:
                taken.append(time.perf_counter() - began)
    return [
        Latency(
            median=1000 * median(taken) / len(images),
            least=1000 * min(taken) / len(images),
            most=1000 * max(taken) / len(images),
            batch=len(images),
            repeats=repeats,
            device=device_name(images.device),
        )
        for taken in seconds
    ]


def device_name(device: torch.device) -> str:
    """What a figure of time was measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
