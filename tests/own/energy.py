"""Energy of training, by the counter of each NVIDIA GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import pynvml
import torch

from orchestrator import Cost, UsageError


def millijoules(gpu: int) -> float:
    """Returns what a GPU has used since its driver was loaded."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(gpu).uuid}")
    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))


@dataclass(frozen=True, kw_only=True)
class EnergyCost(Cost):
    """Energy of the workers' GPUs while they train."""

    kind: Literal["cost/energy_j"] = "cost/energy_j"
    unit: ClassVar = "J"
    meaning: ClassVar = "energy of the GPUs in training, without evaluation and checkpoints"
    title: ClassVar = "Energy of training (J)"
    read: ClassVar = staticmethod(millijoules)

    def counter(self, device: torch.device) -> Callable[[], float]:
        gpu = device.index or 0
        try:
            self.read(gpu)
        except (pynvml.NVMLError, AssertionError, RuntimeError) as error:
            raise UsageError(f"{self.kind} cannot be read here: {error}; train with scale.use_gpu") from None
        return lambda: self.read(gpu) / 1000
