"""Learning rate schedules. To add one, write its class here: it joins by its kind."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from moe.config import Family, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Family, ABC, default="rsqrt"):
    """Linear warm-up from 0 to the peak, as in the reference, and then the schedule's own course.

    Attributes:
        warmup_steps: steps of warm-up; None: a tenth of the run.
        knows_end: whether the rates before the last phase depend on where the run ends.
    """

    knows_end: ClassVar[bool]

    warmup_steps: NonNegativeInt | None = None

    def phases(self, steps: int) -> tuple[int, int]:
        """Returns the steps of warm-up and of cooldown in a run of `steps`. A run of one step has no warm-up,
        whose first rate is 0."""
        warmup = steps // 10 if self.warmup_steps is None else self.warmup_steps
        return 0 if steps == warmup == 1 else warmup, 0

    def rate(self, step: int, *, peak: float, total: int) -> float:
        """Returns the rate of update `step`, which counts from 0; beyond `total` the last rate."""
        warmup, _ = self.phases(total)
        step = min(step, total)
        return peak * step / warmup if step < warmup else self.after_warmup(step, peak=peak, total=total)

    @abstractmethod
    def after_warmup(self, step: int, *, peak: float, total: int) -> float:
        """Returns the rate of an update between the warm-up and `total`."""


@dataclass(frozen=True, kw_only=True)
class CooldownConfig(ScheduleConfig, ABC):
    """A schedule that ends with a linear cooldown to 0 from the rate at its start.

    Attributes:
        cooldown_steps: steps of cooldown; None: a fifth of the run.
    """

    knows_end: ClassVar[bool] = False

    cooldown_steps: NonNegativeInt | None = None

    @abstractmethod
    def level(self, peak: float, steps: int) -> float:
        """Returns the rate `steps` after the warm-up, and before the cooldown."""

    def phases(self, steps: int) -> tuple[int, int]:
        warmup, _ = super().phases(steps)
        return warmup, steps // 5 if self.cooldown_steps is None else self.cooldown_steps

    def after_warmup(self, step: int, *, peak: float, total: int) -> float:
        warmup, cooldown = self.phases(total)
        before = min(step, total - cooldown)
        rate = self.level(peak, before - warmup)
        return rate * (total - step) / cooldown if step > before else rate


@dataclass(frozen=True, kw_only=True)
class RsqrtConfig(CooldownConfig):
    """Linear warm-up, peak / sqrt(1 + t / timescale), linear cooldown. Source: Soft MoE section 3.3.

    Attributes:
        timescale: steps t after which the rate has fallen to 1 / sqrt(2) of its peak.
        begin: the first t. A run that starts from another run's weights goes on at its rate with the steps
            that the other took after its warm-up, and without one of its own.
    """

    kind: Literal["rsqrt"] = "rsqrt"
    timescale: PositiveInt = 10_000
    begin: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.begin and self.warmup_steps:
            raise ValueError(
                f"begin={self.begin} goes on at a rate that was reached before, which"
                f" warmup_steps={self.warmup_steps} would reach again: leave out one of them"
            )

    def phases(self, steps: int) -> tuple[int, int]:
        warmup, cooldown = super().phases(steps)
        return 0 if self.begin else warmup, cooldown

    def level(self, peak: float, steps: int) -> float:
        return peak / math.sqrt(1 + (self.begin + steps) / self.timescale)


@dataclass(frozen=True, kw_only=True)
class ConstantConfig(CooldownConfig):
    """Linear warm-up, the peak, linear cooldown."""

    kind: Literal["constant"] = "constant"

    def level(self, peak: float, steps: int) -> float:
        return peak


@dataclass(frozen=True, kw_only=True)
class DecayConfig(ScheduleConfig, ABC):
    """A schedule that falls from the warm-up to the end of the run.

    Attributes:
        end_frac: the last rate as a fraction of the peak.
    """

    knows_end: ClassVar[bool] = True

    end_frac: Fraction = 0.0

    @abstractmethod
    def left(self, done: float) -> float:
        """Returns the part of the way down that is left when a part of the steps is done."""

    def after_warmup(self, step: int, *, peak: float, total: int) -> float:
        warmup, _ = self.phases(total)
        left = self.left((step - warmup) / max(1, total - warmup))
        return peak * (self.end_frac + (1 - self.end_frac) * left)


@dataclass(frozen=True, kw_only=True)
class CosineConfig(DecayConfig):
    """Linear warm-up, then half a cosine."""

    kind: Literal["cosine"] = "cosine"

    def left(self, done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, kw_only=True)
class LinearConfig(DecayConfig):
    """Linear warm-up, then linear decay."""

    kind: Literal["linear"] = "linear"

    def left(self, done: float) -> float:
        return 1 - done


@dataclass(frozen=True, kw_only=True)
class DeitConfig(ScheduleConfig):
    """The schedule of DeiT III: a rate for each epoch, by a linear warm-up and then by half a cosine that
    begins with the run.

    Source: timm's scheduler as DeiT's code calls it, with the number of an epoch after that epoch. So the
    rate is one epoch late, and the first is taken twice.

    Attributes:
        epoch_steps: steps of an epoch; warm-up and run are counted in whole epochs.
        start, end: rates before the warm-up and where the cosine ends, whatever the peak is.
    """

    kind: Literal["deit"] = "deit"
    knows_end: ClassVar[bool] = True

    epoch_steps: PositiveInt = 625
    start: NonNegativeFloat = 1e-6
    end: NonNegativeFloat = 1e-5

    def rate(self, step: int, *, peak: float, total: int) -> float:
        warmup, epoch = self.phases(total)[0] // self.epoch_steps, min(step, total) // self.epoch_steps
        late = max(0, epoch - 1)
        if late < warmup:
            return self.start + (peak - self.start) * late / warmup
        return self.after_warmup(late, peak=peak, total=max(1, total // self.epoch_steps))

    def after_warmup(self, step: int, *, peak: float, total: int) -> float:
        return self.end + (peak - self.end) * (1 + math.cos(math.pi * step / total)) / 2
