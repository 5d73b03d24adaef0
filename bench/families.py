"""Made-up sweeps: families of learning curves of many forms, for `bench/stopping.py`.

Constants of early stopping may be tuned on `TUNING`. `TEST` has other forms of curves and other dependencies
on cost, and is looked at once after a change.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TUNING = range(100)
TEST = range(2000, 2320)
STEPS = 320
AT = np.array([10, 20, 40, 80, 160, 320])  # 1/32 .. 1 of the steps

# Part of the training -> part of the final quality, by a speed that differs between arms.
TUNING_CURVES: tuple[Callable[[Floats, float], Floats], ...] = (
    lambda t, speed: (1 - (1 + t / speed) ** -0.7) / (1 - (1 + 1 / speed) ** -0.7),  # a power law
    lambda t, speed: np.log1p(t / speed) / math.log1p(1 / speed),
)
TEST_CURVES: tuple[Callable[[Floats, float], Floats], ...] = (
    lambda t, speed: (1 - np.exp(-t / speed)) / (1 - math.exp(-1 / speed)),
    lambda t, speed: 1 / (1 + (3 * speed / t) ** 2) * (1 + 9 * speed**2),  # late: a sigmoid over log steps
    lambda t, speed: 0.7 * t**speed + 0.3 * t**6,  # a jump when the learning rate falls
    lambda t, speed: np.minimum(1, (t / min(1, 4 * speed)) ** 0.5),  # nothing more is learned after a point
)
# Place between the lowest and the highest cost, 0..1 -> the part of the gain of large arms that is there.
TUNING_GAINS: tuple[Callable[[Floats], Floats], ...] = (
    lambda z: z,
    lambda z: 1 - np.exp(-4 * z),
)
TEST_GAINS: tuple[Callable[[Floats], Floats], ...] = (
    lambda z: z**3,  # only the dearest arms gain
    lambda z: np.floor(3 * z) / 3,  # in steps
    lambda z: 1 - (2 * z - 1) ** 2,  # arms of medium cost are best
    lambda z: 1 / (1 + np.exp(-12 * (z - 0.5))),
    lambda z: 0 * z,  # cost buys nothing
    lambda z: np.sin(3 * z),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Costs and qualities, (arms,) and (arms, seeds, `AT`), which may be NaN."""

    cost: Floats
    quality: Floats
    chance: float


def family(seed: int) -> Family:
    rng = np.random.default_rng(seed)
    test = seed >= TEST.start
    curves, gains = (TEST_CURVES, TEST_GAINS) if test else (TUNING_CURVES, TUNING_GAINS)
    curve, gain = curves[int(rng.integers(len(curves)))], gains[int(rng.integers(len(gains)))]
    num, seeds = int(rng.integers(4, 61)), int(rng.integers(1, 6))
    # A fifth of the families costs nearly the same; others have sizes, or arms anywhere.
    decades = rng.uniform(0, 0.3) if rng.random() < 0.2 else rng.uniform(0.3, 3)
    if rng.random() < 0.3:
        x = rng.uniform(0, decades, num)
    else:
        sizes = rng.uniform(0, decades, int(rng.integers(2, 7)))
        x = rng.choice(sizes, num) + rng.uniform(0, 0.1, num) * min(decades, 1)
    place = (x - x.min()) / max(np.ptp(x), 1e-9)
    chance, top = float(rng.choice([0.0, 0.1, 0.5])), rng.uniform(0.4, 0.95)
    arm_sd, seed_sd = 10 ** rng.uniform(-2.3, -0.9), 10 ** rng.uniform(-2.5, -1.5)
    effect = rng.normal(0, arm_sd, num)
    if rng.random() < 0.15:  # one arm is far better
        effect[rng.integers(num)] += 4 * arm_sd
    end = top * (1 + rng.uniform(0.05, 0.6) * (gain(place) - 1)) + effect
    slower = rng.normal(0, 0.3)  # or faster: the curves of large arms
    speeds = 0.1 * 10 ** (slower * (place - 0.5) + rng.normal(0, rng.choice([0.05, 0.2, 0.4]), num))
    rise = np.array([curve(AT / STEPS, float(np.clip(speed, 0.01, 0.9))) for speed in speeds])
    noise = rng.normal(0, seed_sd, (num, seeds, 1)) + rng.normal(0, 0.5 * seed_sd, (num, seeds, len(AT)))
    quality = end[:, None, None] * rise[:, None] + noise * np.sqrt(STEPS / AT) ** rng.uniform(0, 0.5)
    if rng.random() < 0.15:  # some runs diverge
        begins = rng.integers(0, len(AT), (num, seeds, 1))
        bad = (rng.random((num, seeds, 1)) < 0.1) & (np.arange(len(AT)) >= begins)
        quality = np.where(bad, math.nan if rng.random() < 0.5 else 0.0, quality)
    quality = chance + (1 - chance) * np.clip(quality, 0, 1)
    return Family(cost=10 ** (9 + x), quality=quality, chance=chance)
