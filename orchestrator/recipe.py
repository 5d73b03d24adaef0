"""Configs of optimisers, learning rate schedules and few-shot evaluation."""

from dataclasses import dataclass
from typing import Literal

from moe.config import Config, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt

Loss = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class DecayConfig(Config):
    """Weight decay by groups of parameters, times the learning rate.

    Source: the released configs of Soft MoE (kernels .03, head 3, scale .03) and V-MoE (all parameters .1).

    Attributes:
        weight_decay: of kernels, the weights of matmuls and convolutions.
        weight_decay_head: of the head's kernel; None: that of the other kernels.
        weight_decay_scale: of the scales of Soft MoE's routers.
        decays: whether ``kernels`` decay, or ``all`` parameters as kernels do.
    """

    weight_decay: NonNegativeFloat = 0.0
    weight_decay_head: NonNegativeFloat | None = None
    weight_decay_scale: NonNegativeFloat = 0.0
    decays: Literal["kernels", "all"] = "kernels"


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
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: NonNegativeFloat = 0.03


@dataclass(frozen=True, kw_only=True)
class SGDConfig(DecayConfig):
    """SGD with momentum. Source: the fine-tuning recipe of V-MoE.

    Attributes:
        momentum: fraction of the last update that is added to the next.
    """

    kind: Literal["sgd"] = "sgd"
    momentum: NonNegativeFloat = 0.9


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
    beta1: Fraction = 0.9
    beta2_cap: Fraction = 0.999
    min_dim_to_factor: PositiveInt = 32
    weight_decay: NonNegativeFloat = 0.03


OptimizerConfig = AdamWConfig | SGDConfig | AdafactorConfig


@dataclass(frozen=True, kw_only=True)
class RsqrtConfig(Config):
    """Linear warm-up, peak / sqrt(1 + t / timescale), linear cooldown to 0 from the rate at its start.

    Source: Soft MoE section 3.3.

    Attributes:
        warmup_steps: steps of warm-up; None: a tenth of the run.
        cooldown_steps: steps of cooldown; None: a fifth of the run.
        timescale: steps t after which the rate has fallen to 1 / sqrt(2) of its peak.
    """

    kind: Literal["rsqrt"] = "rsqrt"
    warmup_steps: NonNegativeInt | None = None
    cooldown_steps: NonNegativeInt | None = None
    timescale: PositiveInt = 10_000


@dataclass(frozen=True, kw_only=True)
class ConstantConfig(Config):
    """Linear warm-up, the peak, linear cooldown to 0.

    Attributes:
        warmup_steps, cooldown_steps: as in `RsqrtConfig`.
    """

    kind: Literal["constant"] = "constant"
    warmup_steps: NonNegativeInt | None = None
    cooldown_steps: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True)
class CosineConfig(Config):
    """Linear warm-up, then half a cosine.

    Attributes:
        warmup_steps: steps of warm-up; None: a tenth of the run.
        end_frac: the last rate as a fraction of the peak.
    """

    kind: Literal["cosine"] = "cosine"
    warmup_steps: NonNegativeInt | None = None
    end_frac: Fraction = 0.0


@dataclass(frozen=True, kw_only=True)
class LinearConfig(Config):
    """Linear warm-up, then linear decay.

    Attributes:
        warmup_steps, end_frac: as in `CosineConfig`.
    """

    kind: Literal["linear"] = "linear"
    warmup_steps: NonNegativeInt | None = None
    end_frac: Fraction = 0.0


ScheduleConfig = RsqrtConfig | ConstantConfig | CosineConfig | LinearConfig


def phases(schedule: ScheduleConfig, steps: int) -> tuple[int, int]:
    """Returns the steps of warm-up and of cooldown in a run of `steps`."""
    warmup = steps // 10 if schedule.warmup_steps is None else schedule.warmup_steps
    if isinstance(schedule, CosineConfig | LinearConfig):
        return warmup, 0
    return warmup, steps // 5 if schedule.cooldown_steps is None else schedule.cooldown_steps


@dataclass(frozen=True, kw_only=True)
class FewShotConfig(Config):
    """Ridge regression on frozen features from a few images per class, reported as ``fewshot/acc_<n>shot``
    at every evaluation (`orchestrator.training.fewshot`).

    Attributes:
        paths: data sets whose train split gives the shots and whose val split is tested; default: the run's.
        shots: images per class.
        seeds: how often shots are drawn, with the seeds 0, 1, ..; figures are means.
    """

    paths: tuple[str, ...] = ()
    shots: tuple[int, ...] = (1, 5, 10, 25)
    seeds: PositiveInt = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots):
            raise ValueError(f"shots must be different numbers from 1, got {list(self.shots)}")

    def metrics(self) -> tuple[str, ...]:
        """Returns the names that each evaluation reports."""
        return tuple(f"fewshot/acc_{shots}shot" for shots in self.shots)
