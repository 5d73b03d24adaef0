"""Fine-tuning as a sweep, with an arm for each data set and a trial for each seed; and the linear probe.

Source: V-MoE section 3.5 and the configs of the authors' code (`vmoe_paper/*_ft_ilsvrc2012.py`): SGD with
momentum 0.9, a rate of 3e-3 that falls by a cosine to 1e-5 after a warm-up, gradients clipped at 10, experts
with dropout 0.1 (section 3.5; the released configs have none), tokens that choose experts with capacity 1.5,
a new head, often a higher resolution with the position embedding resized; evaluation sees whole images,
resized to squares. Soft MoE keeps its slots (Soft MoE, table 8), and experts that choose keep their capacity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch

from moe.model import Model, ModelConfig
from moe.overrides import RoutingOverrides
from orchestrator.checkpoint.models import ModelRef
from orchestrator.config import CheckpointConfig, DataConfig, RunConfig, TrainConfig
from orchestrator.data.augment import AugmentationConfig, InceptionConfig
from orchestrator.data.stream import in_order
from orchestrator.errors import UsageError
from orchestrator.frontier.paired import Interval, interval
from orchestrator.optimizers import SGDConfig
from orchestrator.runs.run_directory import Result
from orchestrator.schedules import CosineConfig
from orchestrator.sweeps.queue import Outcome
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.fewshot import STRENGTHS, accuracies, best_strength, frozen_features
from wings.transfer.suite import SuiteRow

EXPERT_DROPOUT, CAPACITY = 0.1, 1.5
LR, LAST_LR = 3e-3, 1e-5
NEW = "head"


@dataclass(frozen=True, kw_only=True)
class RecipeSize:
    """How long and at which resolution a recipe trains.

    Attributes:
        warmup_steps: None: a tenth of the steps.
        image_size: pixels; None: those of the model.
    """

    steps: int
    batch_size: int
    warmup_steps: int | None = None
    image_size: int | None = None
    augment: tuple[AugmentationConfig, ...] = ()


SIZES = {
    "short": RecipeSize(steps=500, batch_size=64),  # ours, for data sets of some thousand images
    "published": RecipeSize(
        steps=10_000, batch_size=1024, warmup_steps=500, image_size=384, augment=(InceptionConfig(),)
    ),  # the released configs for ImageNet
}


def finetune_run(
    model: ModelRef, *, size: RecipeSize = SIZES["short"], image_size: int | None = None
) -> RunConfig:
    """The recipe for a trained model.

    Raises:
        UsageError: if the patches of the model do not divide the image size.
    """
    was = model.run
    return RunConfig(
        model=_finetune_model(was.model, image_size or size.image_size or was.model.image_side()),
        data=DataConfig(
            batch_size=size.batch_size,
            augment=size.augment,
            eval_resize="square",
            eval_crop=1,
            cache_gb=was.data.cache_gb,
        ),
        train=TrainConfig(
            steps=size.steps,
            lr=LR,
            init_from=model.location,
            init_without=NEW,
            report_every=50,
            compute_dtype=was.train.compute_dtype,
            clip_norm=10.0,
            optimizer=SGDConfig(),
            schedule=CosineConfig(warmup_steps=size.warmup_steps, end_frac=LAST_LR / LR),
        ),
        checkpoint=CheckpointConfig(keep_last=1, keep_best=0),
    )


def _finetune_model(config: ModelConfig, image_size: int) -> ModelConfig:
    """Sets the image size, dropout on the experts, and more capacity if tokens choose."""
    moe = config.moe
    if moe:
        router = moe.router
        if router.can_overflow:
            router = RoutingOverrides(capacity_factor=CAPACITY).apply(router)
        moe = replace(moe, router=router, expert_dropout=EXPERT_DROPOUT)
    try:
        return replace(config, image_size=image_size, moe=moe)
    except ValueError as error:
        raise UsageError(f"`image_size` {image_size}: {error}") from None


def finetune_sweep(base: RunConfig, rows: Sequence[SuiteRow], *, seeds: int) -> Sweep:
    """An arm for each data set. Raises UsageError if one is missing or the batch does not fit the model."""
    return Sweep(base=base, arms={row.name: row.changes() for row in rows}, seeds=tuple(range(seeds)))


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    """The accuracies of the runs that finished."""

    accuracy: Mapping[str, Mapping[int, float]]  # by data set and seed

    def of(self, name: str) -> Interval:
        return interval(list(self.accuracy[name].values()))

    def overall(self, names: Sequence[str]) -> Interval | None:
        """The mean over data sets of the seeds that finished on all of them; None without such a seed."""
        found = [self.accuracy.get(name, {}) for name in names]
        done = set.intersection(*map(set, found))
        if not done:
            return None
        return interval([fmean(seeds[seed] for seeds in found) for seed in sorted(done)])


def fine_tuned(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> FineTuned:
    """The accuracies of the trials that finished."""
    accuracy: dict[str, dict[int, float]] = {}
    for name, trial in sweep.trials().items():
        outcome = outcomes.get(name)
        if isinstance(outcome, Result) and outcome.status == "finished":
            accuracy.setdefault(trial.arm, {})[trial.run.train.seed] = outcome.metrics[sweep.quality]
    return FineTuned(accuracy=accuracy)


def failures(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Maps each trial without an accuracy to the reason."""
    reasons = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            reasons[name] = outcome
        elif outcome.status == "diverged":
            reasons[name] = f"diverged at step {outcome.step}: try a lower train.lr"
    return reasons


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Linear classifiers on frozen features."""

    strength: float  # of the regularisation, chosen for all data sets together
    accuracy: Mapping[str, float]  # by data set


def probe(
    trained: Model, model: ModelRef, rows: Sequence[SuiteRow], *, batch_size: int, device: torch.device
) -> Probe:
    """Fits ridge regression to frozen features of all training images, at the resolution of the model, with
    the strength that few-shot evaluation would choose.
    """
    by_data = {}
    for row in rows:
        run = model.run_on(row.path, batch_size=batch_size)
        train, test = (frozen_features(trained, in_order(run, split), device) for split in ("train", "val"))
        by_data[row.name] = accuracies(train, test)
    best = best_strength(np.stack(list(by_data.values())))
    accuracy = {name: float(by_strength[best]) for name, by_strength in by_data.items()}
    return Probe(strength=STRENGTHS[best], accuracy=accuracy)
