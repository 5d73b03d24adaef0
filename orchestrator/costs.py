"""Costs: what a model takes to train or to use, each a class whose ``kind`` is its metric. Less is better.

A class says how its cost is had: computed from a config before anything is trained, counted while a run
trains, measured on trained models, or reported by every run. It may be a plugin. Each may be the cost of a
sweep, an axis of its page, and a bound. Conventions are in the names (`moe.cost`).
"""

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from moe.config import Family, did_you_mean
from moe.cost import forward_gflops_2mac, num_params, train_flops_6mac
from moe.model import ModelConfig

if TYPE_CHECKING:
    import torch

    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.config import RunConfig

TRAIN_FLOPS = "cost/train_flops_6mac"
FORWARD = "cost/forward_gflops_2mac"
PARAMS = "cost/params"
MS, MS_P95 = "infer/ms", "infer/ms_p95"
ENERGY, USD = "infer/energy_mj", "infer/usd_per_million"
TIMES = "\N{MULTIPLICATION SIGN}"
_per_model = lru_cache(maxsize=1024)  # of models whose costs were asked for last


class Cost(Family, ABC, default=TRAIN_FLOPS):
    """A cost, which one of its three methods gives, or every run reports under its `kind`.

    Attributes:
        unit, meaning: for the reference of metrics.
        title: of an axis, with the unit. FLOP are shown with the prefix that suits the values: MFLOP, GFLOP.
        drawn: whether a sweep's page has a plot over it, where all complete arms have it.
        constant: whether it is the same at every step: no curve then, but a parameter in trackers.
        peak: whether a counted cost is the highest value that `counter` reads on any worker, and not the sum
            of what it rises by.
    """

    unit: ClassVar[str] = "-"
    meaning: ClassVar[str] = ""
    title: ClassVar[str] = ""
    drawn: ClassVar[bool] = True
    constant: ClassVar[bool] = False
    peak: ClassVar[bool] = False

    def of_config(self, run: "RunConfig", step: int, own: int) -> float | None:
        """Returns the cost of a run up to a step, or None if it is not known before training. `own`: the
        steps up to there that the run trains itself, without those of its trunk.
        """
        return None

    def counter(self, device: "torch.device") -> Callable[[], float] | None:
        """Returns what reads a counter of this worker, or None for a cost that is not counted. It is read
        while the run trains, not while it evaluates or saves, and counts on when the run is resumed. Runs
        with the cost in `train.costs`, and sweeps whose cost it is, count it.

        Raises:
            UsageError: if it cannot be read on this machine.
        """
        return None

    def of_models(self, models: Sequence["ModelRef"]) -> Sequence[float] | None:
        """Returns the cost of each trained model of a sweep, measured when none trains, or None for a cost
        that is not measured so.
        """
        return None

    @property
    def known_before(self) -> bool:
        """Whether a run's config says it."""
        return type(self).of_config is not Cost.of_config

    @property
    def counted(self) -> bool:
        return type(self).counter is not Cost.counter

    @property
    def measured(self) -> bool:
        return type(self).of_models is not Cost.of_models


def known_costs() -> dict[str, Cost]:
    """Returns the costs by their metrics, those of plugins last."""
    kinds: Any = Cost.kinds
    return {metric: cls() for metric, cls in kinds.items()}


def cost_of(metric: str) -> Cost | None:
    return known_costs().get(metric)


def computed(run: "RunConfig", step: int, *, trunk: int = 0) -> dict[str, float]:
    """Returns the costs of a run up to a step that its config says. `trunk`: where it branches off."""
    found = ((metric, cost.of_config(run, step, step - trunk)) for metric, cost in known_costs().items())
    return {metric: value for metric, value in found if value is not None}


def counted(metrics: Iterable[str]) -> tuple[Cost, ...]:
    """Returns the costs that runs count under these metrics. Raises ValueError for others."""
    known = {metric: cost for metric, cost in known_costs().items() if cost.counted}
    for metric in metrics:
        if metric not in known:
            listed = ", ".join(known) or "none; a plugin may define some"
            raise ValueError(f"no cost {metric!r} is counted; known: {listed}{did_you_mean(metric, known)}")
    return tuple(known[metric] for metric in metrics)


@_per_model
def _flops_per_image(model: ModelConfig) -> float:
    return train_flops_6mac(model, images=1)


@_per_model
def _forward(model: ModelConfig) -> float:
    return forward_gflops_2mac(model)


@_per_model
def _params(model: ModelConfig) -> float:
    return float(num_params(model))


@dataclass(frozen=True, kw_only=True)
class TrainFlops(Cost):
    kind: Literal["cost/train_flops_6mac"] = "cost/train_flops_6mac"
    unit: ClassVar = "FLOPs"
    meaning: ClassVar = "training so far, 6 per multiply-add, computed from the config"
    title: ClassVar = f"Training (FLOP, 6 {TIMES} MAC)"

    def of_config(self, run: "RunConfig", step: int, own: int) -> float:
        return _flops_per_image(run.model) * (step * run.data.batch_size)


@dataclass(frozen=True, kw_only=True)
class MarginalTrainFlops(Cost):
    kind: Literal["cost/marginal_train_flops_6mac"] = "cost/marginal_train_flops_6mac"
    unit: ClassVar = "FLOPs"
    meaning: ClassVar = "of a cooldown run: its own steps alone"
    title: ClassVar = f"Training of a cooldown's own steps (FLOP, 6 {TIMES} MAC)"

    def of_config(self, run: "RunConfig", step: int, own: int) -> float | None:
        return _flops_per_image(run.model) * (own * run.data.batch_size) if run.train.trunk else None


@dataclass(frozen=True, kw_only=True)
class DeviceSeconds(Cost):
    kind: Literal["cost/device_s"] = "cost/device_s"
    unit: ClassVar = "s"
    meaning: ClassVar = "time of training without evaluation and checkpoints, times workers"
    title: ClassVar = "Device time (s)"
    drawn: ClassVar = False  # other trials may have run beside it


@dataclass(frozen=True, kw_only=True)
class MarginalDeviceSeconds(Cost):
    kind: Literal["cost/marginal_device_s"] = "cost/marginal_device_s"
    unit: ClassVar = "s"
    meaning: ClassVar = "of a cooldown run: its own steps alone"
    title: ClassVar = "Device time of a cooldown's own steps (s)"
    drawn: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class ForwardGflops(Cost):
    kind: Literal["cost/forward_gflops_2mac"] = "cost/forward_gflops_2mac"
    unit: ClassVar = "GFLOPs"
    meaning: ClassVar = "forward pass of one image, 2 per multiply-add, computed from the config"
    title: ClassVar = f"Forward pass (GFLOP, 2 {TIMES} MAC)"
    constant: ClassVar = True

    def of_config(self, run: "RunConfig", step: int, own: int) -> float:
        return _forward(run.model)


@dataclass(frozen=True, kw_only=True)
class Params(Cost):
    kind: Literal["cost/params"] = "cost/params"
    meaning: ClassVar = "number of parameters"
    title: ClassVar = "Parameters"
    drawn: ClassVar = False
    constant: ClassVar = True

    def of_config(self, run: "RunConfig", step: int, own: int) -> float:
        return _params(run.model)


@dataclass(frozen=True, kw_only=True)
class MsPerImage(Cost):
    kind: Literal["perf/ms_per_image"] = "perf/ms_per_image"
    unit: ClassVar = "ms"
    meaning: ClassVar = "median time of a forward pass of one worker, divided by its images"
    title: ClassVar = "Inference time per image (ms)"
    drawn: ClassVar = False  # other trials may have run beside it; `evaluate --grid` measures it alone


@dataclass(frozen=True, kw_only=True)
class InferenceMs(Cost):
    kind: Literal["infer/ms"] = "infer/ms"
    unit: ClassVar = "ms"
    meaning: ClassVar = (
        "median time of a call of the handed-over file, measured alone and in turns; quartiles"
    )
    title: ClassVar = "Time of one image (ms)"


@dataclass(frozen=True, kw_only=True)
class InferenceP95(Cost):
    kind: Literal["infer/ms_p95"] = "infer/ms_p95"
    unit: ClassVar = "ms"
    meaning: ClassVar = "95th percentile of that time, and the highest one of a fifth of the rounds"
    title: ClassVar = "Time of one image, 95th percentile (ms)"
    drawn: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class InferenceBatch(Cost):
    kind: Literal["infer/batch_ms_per_image"] = "infer/batch_ms_per_image"
    unit: ClassVar = "ms"
    meaning: ClassVar = "median time of a call on a batch, divided by its images"
    title: ClassVar = "Time per image of a batch (ms)"


@dataclass(frozen=True, kw_only=True)
class InferenceMemory(Cost):
    kind: Literal["infer/memory_mib"] = "infer/memory_mib"
    unit: ClassVar = "MiB"
    meaning: ClassVar = "peak memory of a process that loads the file and answers, with its runtime"
    title: ClassVar = "Peak memory of inference (MiB)"
    drawn: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class FileSize(Cost):
    kind: Literal["infer/file_mb"] = "infer/file_mb"
    unit: ClassVar = "MB"
    meaning: ClassVar = "size of the handed-over file"
    title: ClassVar = "Size of the file (MB)"
    drawn: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class InferenceEnergy(Cost):
    kind: Literal["infer/energy_mj"] = "infer/energy_mj"
    unit: ClassVar = "mJ"
    meaning: ClassVar = (
        "median energy of the processors per image, idle cores included, where the system shows it; quartiles"
    )
    title: ClassVar = "Energy of one image (mJ)"
    drawn: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class InferenceMoney(Cost):
    kind: Literal["infer/usd_per_million"] = "infer/usd_per_million"
    unit: ClassVar = "USD"
    meaning: ClassVar = (
        "price of a million images: the median time, each thread a CPU-core of jobs/prices.yaml"
    )
    title: ClassVar = "A million images (USD)"
    drawn: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class Memory(Cost):
    kind: Literal["perf/memory_gib"] = "perf/memory_gib"
    unit: ClassVar = "GiB"
    meaning: ClassVar = "memory of the workers' processes"
    title: ClassVar = "Memory of the workers' processes (GiB)"
    drawn: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class GpuMemory(Cost):
    kind: Literal["perf/gpu_memory_gib"] = "perf/gpu_memory_gib"
    unit: ClassVar = "GiB"
    meaning: ClassVar = "peak memory of tensors per GPU"
    title: ClassVar = "Peak memory of tensors per GPU (GiB)"
