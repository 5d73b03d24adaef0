"""Configs of optimisers, learning rate schedules and few-shot evaluation."""

import math
from dataclasses import dataclass
from typing import Any, Literal

Loss = Literal["softmax", "sigmoid"]


def at_least_one(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def within(config: Any, low: float, high: float, *names: str) -> None:
    """Raises ValueError for the first of these fields outside low .. high."""
    for name in names:
        if not low <= getattr(config, name) <= high:
            raise ValueError(f"{name} must lie in {low} .. {high}, got {getattr(config, name)}")


@dataclass(frozen=True, kw_only=True)
class DecayConfig:
    """Weight decay by groups of parameters, times the learning rate.

    Source: the released configs of Soft MoE (kernels .03, head 3, scale .03) and V-MoE (all parameters .1).

    Attributes:
        weight_decay: of kernels, the weights of matmuls and convolutions.
        weight_decay_head: of the head's kernel; None: that of the other kernels.
        weight_decay_scale: of the scales of Soft MoE's routers.
        decays: whether ``kernels`` decay, or ``all`` parameters as kernels do.
    """

    weight_decay: float = 0.0
    weight_decay_head: float | None = None
    weight_decay_scale: float = 0.0
    decays: Literal["kernels", "all"] = "kernels"

    def __post_init__(self) -> None:
        head = ["weight_decay_head"] if self.weight_decay_head is not None else []
        within(self, 0, math.inf, "weight_decay", "weight_decay_scale", *head)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(DecayConfig):
    """Adam with decoupled weight decay. Source: the Soft MoE recipe (betas .9 / .999, kernels .03).

    Attributes:
        beta1, beta2: decay of the first and of the second moment.
        state_dtype: data type in which the first moment is held, as `mu_dtype` of big_vision and optax. The
            second moment stays float32: in bfloat16 it could not fall, because an update lowers it by at most
            1 - beta2 = 1e-3 of itself, and rounding to 8 bits undoes that.
    """

    kind: Literal["adamw"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, 0, 1, "beta1", "beta2")


@dataclass(frozen=True, kw_only=True)
class SGDConfig(DecayConfig):
    """SGD with momentum. Source: the fine-tuning recipe of V-MoE.

    Attributes:
        momentum: fraction of the last update that is added to the next.
    """

    kind: Literal["sgd"] = "sgd"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, 0, math.inf, "momentum")


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(DecayConfig):
    """Adafactor with a first moment in bfloat16, for models whose state is too large in AdamW.

    Sources: Zhai et al. 2021, section 3.4, for beta1 and beta2_cap; big_vision, whose Adafactor trained
    V-MoE-15B, for min_dim_to_factor (optax has 128); `AdamWConfig` for weight decay. What none of them
    changes is constant in `orchestrator.training.adafactor`.

    Attributes:
        beta1: decay of the first moment.
        beta2_cap: the second moment decays by 1 - t^-0.8 at update t, and by at most this. big_vision takes
            0.95 where training is unstable.
        min_dim_to_factor: matrices with fewer rows or columns keep their whole second moment.
    """

    kind: Literal["adafactor"] = "adafactor"
    beta1: float = 0.9
    beta2_cap: float = 0.999
    min_dim_to_factor: int = 32
    weight_decay: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, 0, 1, "beta1", "beta2_cap")
        at_least_one(self, "min_dim_to_factor")


OptimizerConfig = AdamWConfig | SGDConfig | AdafactorConfig


@dataclass(frozen=True, kw_only=True)
class RsqrtConfig:
    """Linear warm-up, peak / sqrt(1 + t / timescale), linear cooldown to 0 from the rate at its start.

    Source: Soft MoE section 3.3.

    Attributes:
        warmup_steps: steps of warm-up; None: a tenth of the run.
        cooldown_steps: steps of cooldown; None: a fifth of the run.
        timescale: steps t after which the rate has fallen to 1 / sqrt(2) of its peak.
    """

    kind: Literal["rsqrt"] = "rsqrt"
    warmup_steps: int | None = None
    cooldown_steps: int | None = None
    timescale: int = 10_000

    def __post_init__(self) -> None:
        at_least_one(self, "timescale")


@dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """Linear warm-up, the peak, linear cooldown to 0.

    Attributes:
        warmup_steps, cooldown_steps: as in `RsqrtConfig`.
    """

    kind: Literal["constant"] = "constant"
    warmup_steps: int | None = None
    cooldown_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """Linear warm-up, then half a cosine.

    Attributes:
        warmup_steps: steps of warm-up; None: a tenth of the run.
        end_frac: the last rate as a fraction of the peak.
    """

    kind: Literal["cosine"] = "cosine"
    warmup_steps: int | None = None
    end_frac: float = 0.0

    def __post_init__(self) -> None:
        within(self, 0, 1, "end_frac")


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """Linear warm-up, then linear decay.

    Attributes:
        warmup_steps, end_frac: as in `CosineConfig`.
    """

    kind: Literal["linear"] = "linear"
    warmup_steps: int | None = None
    end_frac: float = 0.0

    def __post_init__(self) -> None:
        within(self, 0, 1, "end_frac")


ScheduleConfig = RsqrtConfig | ConstantConfig | CosineConfig | LinearConfig


def phases(schedule: ScheduleConfig, steps: int) -> tuple[int, int]:
    """Returns the steps of warm-up and of cooldown in a run of `steps`."""
    warmup = steps // 10 if schedule.warmup_steps is None else schedule.warmup_steps
    if isinstance(schedule, CosineConfig | LinearConfig):
        return warmup, 0
    return warmup, steps // 5 if schedule.cooldown_steps is None else schedule.cooldown_steps


@dataclass(frozen=True, kw_only=True)
class FewShotConfig:
    """Ridge regression on frozen features from a few images per class, reported as ``fewshot/acc_<n>shot``
    at every evaluation (`orchestrator.training.fewshot`).

    Attributes:
        paths: data sets whose train split gives the shots and whose val split is tested; default: the run's.
        shots: images per class.
        seeds: how often shots are drawn, with the seeds 0, 1, ..; figures are means.
    """

    paths: tuple[str, ...] = ()
    shots: tuple[int, ...] = (1, 5, 10, 25)
    seeds: int = 3

    def __post_init__(self) -> None:
        at_least_one(self, "seeds")
        if not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots):
            raise ValueError(f"shots must be different numbers from 1, got {list(self.shots)}")

    def metrics(self) -> tuple[str, ...]:
        """Returns the names that each evaluation reports."""
        return tuple(f"fewshot/acc_{shots}shot" for shots in self.shots)
