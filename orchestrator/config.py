"""One frozen tree describes a run; `codec.py` carries it over wires and files."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from moe.parallel import check_layout
from moe.presets import PRESETS
from moe.vit import ViTConfig


class UsageError(ValueError):
    """What the user can mend: jobs print its message alone, without a traceback."""


def _at_least_one(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def _within(config: Any, low: float, high: float, *names: str) -> None:
    for name in names:
        if not low <= getattr(config, name) <= high:
            raise ValueError(f"{name} must lie in {low} .. {high}, got {getattr(config, name)}")


def _tenth(given: int | None, steps: int) -> int:
    return steps // 10 if given is None else given


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Adam with decoupled weight decay. Source: the Soft MoE recipe (betas .9 / .999, kernels .03)."""

    kind: Literal["adamw"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.03
    weight_decay_head: float = 0.03  # 3.0 in the papers' long runs

    def __post_init__(self) -> None:
        _within(self, 0, 1, "beta1", "beta2")
        _within(self, 0, math.inf, "weight_decay", "weight_decay_head")


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """SGD with momentum. Source: the fine-tuning recipe of V-MoE."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    weight_decay_head: float = 0.0

    def __post_init__(self) -> None:
        _within(self, 0, math.inf, "momentum", "weight_decay", "weight_decay_head")


OptimizerConfig = AdamWConfig | SGDConfig


@dataclass(frozen=True, kw_only=True)
class RsqrtConfig:
    """Linear warm-up, peak / sqrt(1 + t / timescale), linear cooldown to 0 from the rate at its start.

    Source: Soft MoE section 3.3. None: a tenth of the run for warm-up, a fifth for cooldown.
    """

    kind: Literal["rsqrt"] = "rsqrt"
    warmup_steps: int | None = None
    cooldown_steps: int | None = None
    timescale: int = 10_000

    def __post_init__(self) -> None:
        _at_least_one(self, "timescale")

    def phases(self, steps: int) -> tuple[int, int]:
        """Steps of warm-up and of cooldown."""
        cooldown = steps // 5 if self.cooldown_steps is None else self.cooldown_steps
        return _tenth(self.warmup_steps, steps), cooldown


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """Linear warm-up (None: a tenth of the run), then half a cosine down to `end_frac` of the peak."""

    kind: Literal["cosine"] = "cosine"
    warmup_steps: int | None = None
    end_frac: float = 0.0

    def __post_init__(self) -> None:
        _within(self, 0, 1, "end_frac")

    def phases(self, steps: int) -> tuple[int, int]:
        return _tenth(self.warmup_steps, steps), 0


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """Linear warm-up (None: a tenth of the run), then linear decay to `end_frac` of the peak."""

    kind: Literal["linear"] = "linear"
    warmup_steps: int | None = None
    end_frac: float = 0.0

    def __post_init__(self) -> None:
        _within(self, 0, 1, "end_frac")

    def phases(self, steps: int) -> tuple[int, int]:
        return _tenth(self.warmup_steps, steps), 0


ScheduleConfig = RsqrtConfig | CosineConfig | LinearConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Attributes:
    path: directory or URI with `manifest.json`, as `jobs/pack_shards.py` writes it.
    batch_size: global: images per step over all workers.
    augment: ``none``, or ``inception`` (random crop of 5-100 % of the area, flip; the papers' pre-training).
    shuffle_shards: shards that are mixed with each other at a time; a reader holds about that many.
    """

    path: str = ""
    batch_size: int = 64
    augment: Literal["none", "inception"] = "none"
    shuffle_shards: int = 8

    def __post_init__(self) -> None:
        _at_least_one(self, "batch_size", "shuffle_shards")
        if self.shuffle_shards > 15:
            raise ValueError(
                f"shuffle_shards must be at most 15, got {self.shuffle_shards}: readers keep 16 shards"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Attributes:
    steps: optimiser updates.
    lr: the schedule's peak.
    microbatch: images per worker and forward pass, accumulated; None: the worker's whole share at once.
    clip_norm: largest gradient norm.
    eval_every, checkpoint_every: steps between; None: at the end only, and every tenth of the run.
    keep_checkpoints: newest checkpoints that stay on disk.
    """

    steps: int = 200
    lr: float = 1e-3
    seed: int = 0
    report_every: int = 10
    eval_every: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    microbatch: int | None = None
    clip_norm: float = 1.0
    optimizer: OptimizerConfig = AdamWConfig()
    schedule: ScheduleConfig = RsqrtConfig()

    def __post_init__(self) -> None:
        optional = (
            n for n in ("eval_every", "checkpoint_every", "microbatch") if getattr(self, n) is not None
        )
        _at_least_one(self, "steps", "report_every", "keep_checkpoints", *optional)
        _within(self, 0, math.inf, "lr", "seed")
        if self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm}")
        warmup, cooldown = self.schedule.phases(self.steps)
        if min(warmup, cooldown) < 0 or warmup + cooldown > self.steps:
            raise ValueError(
                f"warmup_steps={warmup} and cooldown_steps={cooldown} do not fit into steps={self.steps}"
            )


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """Attributes:
    workers: processes that train one model together, a GPU or half a CPU each.
    ep: workers that share one set of experts; dp = workers / ep.
    """

    workers: int = 1
    ep: int = 1
    use_gpu: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self, "workers", "ep")
        if self.workers % self.ep:
            raise ValueError(f"ep={self.ep} does not divide workers={self.workers}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = "train"
    storage: str = "runs"
    model: ViTConfig = PRESETS["debug"]
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    scale: ScaleConfig = ScaleConfig()

    def __post_init__(self) -> None:
        workers, batch = self.scale.workers, self.data.batch_size
        if batch % workers:
            raise ValueError(f"data.batch_size={batch} does not divide over workers={workers}")
        if batch // workers % self.images_per_pass():
            raise ValueError(
                f"train.microbatch={self.train.microbatch} does not divide a worker's {batch // workers}"
            )
        group = self.model.moe.images_per_group if self.model.moe else 1
        if self.images_per_pass() % group:
            raise ValueError(
                f"model.moe.images_per_group={group} does not divide the {self.images_per_pass()} images of"
                f" one forward pass (train.microbatch, else data.batch_size={batch} / workers={workers})"
            )
        check_layout(self.model, dp=workers // self.scale.ep, ep=self.scale.ep)

    def images_per_pass(self) -> int:
        """Images of one worker's forward pass."""
        return self.train.microbatch or self.data.batch_size // self.scale.workers
