"""Fine-tuning as a sweep: an arm for each data set, a trial for each seed of it.

Source: V-MoE section 3.5 and the configs of the authors' code: SGD with momentum 0.9, a rate of 3e-3 that
falls by a cosine to 1e-5 after a warm-up, gradients clipped at 10, experts with dropout 0.1 and capacity 1.5,
a new head, often a higher resolution with the position embedding resized. They take 10,000 steps (1,000 for
small data sets) of 1024 images; here the defaults are for data sets of some thousand images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from moe.routers.choice import CapacityConfig
from moe.vit import ViTConfig
from orchestrator.config import CheckpointConfig, DataConfig, RunConfig, TrainConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.evaluation.interval import Interval, interval
from orchestrator.evaluation.trained import Trained
from orchestrator.recipe import CosineConfig, SGDConfig
from orchestrator.sweeps.agenda import Outcome
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.fewshot import short_names
from orchestrator.training.worker import Result

EXPERT_DROPOUT, CAPACITY = 0.1, 1.5
LR, LAST_LR, STEPS, BATCH = 3e-3, 1e-5, 500, 64
NEW = "head"


def finetune_run(trained: Trained, *, image_size: int | None = None) -> RunConfig:
    """The recipe for a trained model; None: at the resolution that it was trained with.

    Raises:
        UsageError: for an image size that its patches do not fill.
    """
    was = trained.run
    return RunConfig(
        model=finetune_model(was.model, image_size or was.model.image_size),
        data=DataConfig(batch_size=BATCH, eval_crop=was.data.eval_crop, cache_gb=was.data.cache_gb),
        train=TrainConfig(
            steps=STEPS,
            lr=LR,
            init_from=trained.location,
            init_without=NEW,
            report_every=50,
            compute_dtype=was.train.compute_dtype,
            clip_norm=10.0,
            optimizer=SGDConfig(),
            schedule=CosineConfig(end_frac=LAST_LR / LR),
        ),
        checkpoint=CheckpointConfig(keep_last=1, keep_best=0),
    )


def finetune_model(config: ViTConfig, image_size: int) -> ViTConfig:
    """Larger images; dropout on the experts, and more capacity where the router has one."""
    moe = config.moe
    if moe:
        router = moe.router
        if isinstance(router, CapacityConfig):
            router = replace(router, capacity_factor=CAPACITY)
        moe = replace(moe, router=router, expert_dropout=EXPERT_DROPOUT)
    try:
        return replace(config, image_size=image_size, moe=moe)
    except ValueError as error:
        raise UsageError(f"--image-size {image_size}: {error}") from None


def finetune_sweep(base: RunConfig, paths: Sequence[str], *, seeds: int) -> Sweep:
    """Raises UsageError for data that is not there, or a batch that does not fit the model."""
    arms = {
        name: {"data.path": path, "model.num_classes": len(open_manifest(path).classes)}
        for name, path in short_names(paths).items()
    }
    return Sweep(base=base, arms=arms, seeds=tuple(range(seeds)))


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    """Attributes:
    accuracy: data set -> of each seed that finished, by seed.
    """

    accuracy: Mapping[str, Mapping[int, float]]

    def of(self, name: str) -> Interval:
        return interval(list(self.accuracy[name].values()))

    def overall(self) -> Interval | None:
        """Of the mean over data sets, seed by seed: those that finished on all of them; None if none did."""
        done = set.intersection(*(set(seeds) for seeds in self.accuracy.values()))
        if not done:
            return None
        return interval([fmean(seeds[seed] for seeds in self.accuracy.values()) for seed in sorted(done)])


def fine_tuned(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> FineTuned:
    """What the trials that finished have reached."""
    accuracy: dict[str, dict[int, float]] = {}
    for name, trial in sweep.trials().items():
        outcome = outcomes.get(name)
        if isinstance(outcome, Result) and outcome.status == "finished":
            accuracy.setdefault(trial.arm, {})[trial.run.train.seed] = outcome.metrics[sweep.quality]
    return FineTuned(accuracy=accuracy)


def failures(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """trial -> why it has no figure."""
    found = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    for name, outcome in outcomes.items():
        if isinstance(outcome, Result) and outcome.status == "diverged":
            found[name] = f"diverged at step {outcome.step}: try a lower --set train.lr"
    return found
