"""Values that a config refuses when it is made."""

from dataclasses import replace

import pytest

from moe.layer import MoEConfig
from moe.presets import PRESETS
from orchestrator.config import CheckpointConfig, DataConfig, RunConfig, ScaleConfig, TrainConfig
from orchestrator.optimizers import AdafactorConfig, AdamWConfig, SGDConfig
from orchestrator.schedules import CosineConfig, LinearConfig, RsqrtConfig

PAIRS = replace(PRESETS["debug"], moe=MoEConfig(num_experts=6, images_per_group=2))
NAN = float("nan")


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (AdamWConfig, {"beta1": 1.5}, "beta1 must be at most 1, got 1.5"),
        (AdamWConfig, {"weight_decay_head": NAN}, "weight_decay_head must be finite, got nan"),
        (AdafactorConfig, {"beta2_cap": 1.1}, "beta2_cap must be at most 1, got 1.1"),
        (AdafactorConfig, {"min_dim_to_factor": 0}, "min_dim_to_factor must be at least 1, got 0"),
        (SGDConfig, {"momentum": -0.9}, "momentum must not be negative, got -0.9"),
        (RsqrtConfig, {"timescale": 0}, "timescale must be at least 1, got 0"),
        (CosineConfig, {"end_frac": 1.1}, "end_frac must be at most 1, got 1.1"),
        (DataConfig, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (DataConfig, {"lanes": 0}, "lanes must be at least 1, got 0"),
        (DataConfig, {"lanes": 24}, "lanes=24 does not divide batch_size=64"),
        (DataConfig, {"eval_crop": 0.0}, "eval_crop must be positive, got 0.0"),
        (DataConfig, {"randaugment": 17}, "randaugment must be at most 16, got 17"),
        (DataConfig, {"mixup": -1.0}, "mixup must not be negative, got -1.0"),
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
        (DataConfig, {"augment": "flipp"}, r"got 'flipp'; did you mean 'flip'\?"),
        (TrainConfig, {"optimizer": "sgd"}, r"got 'sgd'; did you mean SGDConfig\(..\)\?"),
        (RunConfig, {"name": "../escaped/run"}, "name '../escaped/run': '..': begin with a letter or digit"),
        (
            RunConfig,
            {"name": "sweep/../../run"},
            "name 'sweep/../../run': '..' cannot be the name of a direc",
        ),
        (RunConfig, {"name": "/tmp/run"}, "name '/tmp/run': '': begin with a letter or digit"),
        (RunConfig, {"name": "data"}, "name 'data' is reserved"),
        (TrainConfig, {"steps": 0}, "steps must be at least 1, got 0"),
        (CheckpointConfig, {"keep_last": 0}, "keep_last must be at least 1, got 0"),
        (CheckpointConfig, {"keep_best": -1}, "keep_best must not be negative, got -1"),
        (ScaleConfig, {"dp_replicate": 0}, "dp_replicate must be at least 1, got 0"),
        (TrainConfig, {"eval_every": 0}, "eval_every must be at least 1, got 0"),
        (CheckpointConfig, {"every": -5}, "every must be at least 1, got -5"),
        (TrainConfig, {"stop_at": 95.0}, "stop_at must be at most 1, got 95.0"),
        (TrainConfig, {"stop_at": 0.9}, "stop_at=0.9 is checked every eval_every steps: set that too"),
        (TrainConfig, {"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
        (TrainConfig, {"lr": -1e-3}, "lr must not be negative, got -0.001"),
        (
            TrainConfig,
            {"steps": 10, "schedule": RsqrtConfig(warmup_steps=6, cooldown_steps=5)},
            "warmup_steps=6 and cooldown_steps=5 do not fit into steps=10",
        ),
        (CosineConfig, {"warmup_steps": -1}, "warmup_steps must not be negative, got -1"),
        (ScaleConfig, {"workers": 0}, "workers must be at least 1, got 0"),
        (ScaleConfig, {"workers": 4, "ep": 3}, "ep=3 does not divide workers=4"),
        (ScaleConfig, {"workers": 2, "min_workers": 3}, "min_workers=3 is more than workers=2"),
        (ScaleConfig, {"wait_s": 0}, "wait_s must be at least 1, got 0"),
        (RunConfig, {"scale": ScaleConfig(workers=3)}, "data.batch_size=64 does not divide over workers=3"),
        (RunConfig, {"train": TrainConfig(microbatch=7)}, "train.microbatch=7 does not divide .*64"),
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


def test_default_phases_fit_any_length() -> None:
    for steps in (1, 4, 9, 10, 200):
        for schedule in (RsqrtConfig(), CosineConfig(), LinearConfig()):
            TrainConfig(steps=steps, schedule=schedule)


def test_workers_that_divide_the_batch_divide_the_lanes() -> None:
    """Workers that divide the lanes of a single worker keep them, and so read the same batches."""
    for batch in (1, 36, 64, 96, 100, 256, 4096):
        alone = max(n for n in range(1, max(16, batch // 8) + 1) if batch % n == 0)
        for workers in (n for n in (1, 2, 3, 4, 6, 12, 100, 512) if batch % n == 0):
            run = RunConfig(data=DataConfig(batch_size=batch), scale=ScaleConfig(workers=workers))
            lanes = run.lane_count()
            assert batch % lanes == lanes % workers == 0, run
            assert lanes == alone or alone % workers, run


def test_images_per_pass() -> None:
    scale, data = ScaleConfig(workers=2), DataConfig(batch_size=32)
    assert RunConfig(scale=scale, data=data).images_per_pass() == 16
    assert RunConfig(scale=scale, data=data, train=TrainConfig(microbatch=4)).images_per_pass() == 4
