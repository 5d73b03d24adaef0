"""What a config refuses at birth."""

from dataclasses import replace

import pytest

from moe.layer import MoEConfig
from moe.presets import PRESETS
from orchestrator.config import CheckpointConfig, DataConfig, RunConfig, ScaleConfig, TrainConfig
from orchestrator.recipe import AdamWConfig, CosineConfig, LinearConfig, RsqrtConfig, SGDConfig

PAIRS = replace(PRESETS["debug"], moe=MoEConfig(num_experts=6, images_per_group=2))
NAN = float("nan")


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (AdamWConfig, {"beta1": 1.5}, "beta1 must lie in 0 .. 1, got 1.5"),
        (AdamWConfig, {"beta2": -0.1}, "beta2 must lie in 0 .. 1, got -0.1"),
        (AdamWConfig, {"weight_decay": -1.0}, "weight_decay must lie in 0 .. inf, got -1.0"),
        (AdamWConfig, {"weight_decay_head": NAN}, "weight_decay_head must lie in 0 .. inf, got nan"),
        (SGDConfig, {"momentum": -0.9}, "momentum must lie in 0 .. inf, got -0.9"),
        (RsqrtConfig, {"timescale": 0}, "timescale must be at least 1, got 0"),
        (CosineConfig, {"end_frac": 1.1}, "end_frac must lie in 0 .. 1, got 1.1"),
        (LinearConfig, {"end_frac": -0.1}, "end_frac must lie in 0 .. 1, got -0.1"),
        (DataConfig, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (DataConfig, {"shuffle_window": 0}, "shuffle_window must be at least 1, got 0"),
        (DataConfig, {"lanes": 0}, "lanes must be at least 1, got 0"),
        (DataConfig, {"lanes": 24}, "lanes=24 does not divide batch_size=64"),
        (DataConfig, {"eval_crop": 0.0}, "eval_crop must be more than 0"),
        (DataConfig, {"eval_crop": 1.1}, "eval_crop must lie in 0 .. 1, got 1.1"),
        (DataConfig, {"randaugment": 15}, "randaugment must lie in 0 .. 14, got 15"),
        (DataConfig, {"randaugment_magnitude": 31}, "randaugment_magnitude must lie in 0 .. 30, got 31"),
        (DataConfig, {"mixup": -1.0}, "mixup must lie in 0 .. inf, got -1.0"),
        (DataConfig, {"max_bad_frac": 2.0}, "max_bad_frac must lie in 0 .. 1, got 2.0"),
        (
            RunConfig,
            {"data": DataConfig(lanes=2), "scale": ScaleConfig(workers=4)},
            "data.lanes=2 does not divide over workers=4",
        ),
        (
            RunConfig,
            {"data": DataConfig(cutmix=1.0), "train": TrainConfig(microbatch=1)},
            "mixup and cutmix mix pairs of images: the 1 images of one forward pass must be even",
        ),
        (TrainConfig, {"steps": 0}, "steps must be at least 1, got 0"),
        (TrainConfig, {"report_every": 0}, "report_every must be at least 1, got 0"),
        (CheckpointConfig, {"keep_last": 0}, "keep_last must be at least 1, got 0"),
        (CheckpointConfig, {"keep_best": -1}, "keep_best must lie in 0 .. inf, got -1"),
        (ScaleConfig, {"dp_replicate": 0}, "dp_replicate must be at least 1, got 0"),
        (TrainConfig, {"eval_every": 0}, "eval_every must be at least 1, got 0"),
        (CheckpointConfig, {"every": -5}, "every must be at least 1, got -5"),
        (TrainConfig, {"microbatch": 0}, "microbatch must be at least 1, got 0"),
        (TrainConfig, {"stop_at": 95.0}, "stop_at must lie in 0 .. 1, got 95.0"),
        (TrainConfig, {"stop_at": 0.9}, "stop_at=0.9 is looked at every eval_every steps: set that too"),
        (TrainConfig, {"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
        (TrainConfig, {"lr": -1e-3}, "lr must lie in 0 .. inf, got -0.001"),
        (TrainConfig, {"seed": -1}, "seed must lie in 0 .. inf, got -1"),
        (
            TrainConfig,
            {"steps": 10, "schedule": RsqrtConfig(warmup_steps=6, cooldown_steps=5)},
            "warmup_steps=6 and cooldown_steps=5 do not fit into steps=10",
        ),
        (
            TrainConfig,
            {"schedule": CosineConfig(warmup_steps=-1)},
            "warmup_steps=-1 and cooldown_steps=0 do not fit into steps=200",
        ),
        (
            TrainConfig,
            {"steps": 10, "schedule": LinearConfig(warmup_steps=11)},
            "warmup_steps=11 and cooldown_steps=0 do not fit into steps=10",
        ),
        (ScaleConfig, {"workers": 0}, "workers must be at least 1, got 0"),
        (ScaleConfig, {"ep": 0}, "ep must be at least 1, got 0"),
        (ScaleConfig, {"workers": 4, "ep": 3}, "ep=3 does not divide workers=4"),
        (RunConfig, {"scale": ScaleConfig(workers=3)}, "data.batch_size=64 does not divide over workers=3"),
        (RunConfig, {"train": TrainConfig(microbatch=7)}, "train.microbatch=7 does not divide .*64"),
        (
            RunConfig,
            {"train": TrainConfig(microbatch=32), "scale": ScaleConfig(workers=4)},
            "train.microbatch=32 does not divide .*16",
        ),
        (
            RunConfig,
            {"model": PAIRS, "train": TrainConfig(microbatch=1)},
            "model.moe.images_per_group=2 does not divide",
        ),
        (
            RunConfig,
            {"model": PAIRS, "data": DataConfig(batch_size=4), "scale": ScaleConfig(workers=4)},
            "model.moe.images_per_group=2 does not divide",
        ),
        (
            RunConfig,
            {"model": PAIRS, "scale": ScaleConfig(workers=4, ep=4)},
            r"num_experts=6 does not divide over ep=4; use one of \[1, 2, 3, 6\]",
        ),
    ],
)
def test_refusals(cls: type, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**fields)


@pytest.mark.parametrize("steps", [1, 4, 9, 10, 200])
@pytest.mark.parametrize("schedule", [RsqrtConfig(), CosineConfig(), LinearConfig()])
def test_default_phases_fit_any_length(
    steps: int, schedule: RsqrtConfig | CosineConfig | LinearConfig
) -> None:
    TrainConfig(steps=steps, schedule=schedule)


def test_images_per_pass() -> None:
    scale, data = ScaleConfig(workers=2), DataConfig(batch_size=32)
    assert RunConfig(scale=scale, data=data).images_per_pass() == 16
    assert RunConfig(scale=scale, data=data, train=TrainConfig(microbatch=4)).images_per_pass() == 4
