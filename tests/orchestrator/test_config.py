"""What a config refuses when it is made, of several fields together; `test_config_laws` tests single ones."""

from dataclasses import replace

import pytest

from moe.config import members
from moe.layer import MoEConfig
from moe.presets import PRESETS
from orchestrator.config import DataConfig, RunConfig, ScaleConfig, TrainConfig
from orchestrator.data.augment import CutMixConfig
from orchestrator.schedules import CooldownConfig, CosineConfig, LinearConfig, RsqrtConfig, ScheduleConfig

PAIRS = replace(PRESETS["debug"], moe=MoEConfig(num_experts=6, images_per_group=2))


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (DataConfig, {"lanes": 24}, "lanes=24 does not divide batch_size=64"),
        (
            RunConfig,
            {"data": DataConfig(lanes=2), "scale": ScaleConfig(workers=4)},
            "data.lanes=2 does not divide over workers=4",
        ),
        (
            RunConfig,
            {"data": DataConfig(augment=(CutMixConfig(),)), "train": TrainConfig(microbatch=1)},
            "cutmix mixes pairs of images: the 1 images of one forward pass must be even",
        ),
        (RunConfig, {"name": "../escaped/run"}, "name '../escaped/run': '..': begin with a letter or digit"),
        (
            RunConfig,
            {"name": "sweep/../../run"},
            "name 'sweep/../../run': '..' cannot be the name of a direc",
        ),
        (RunConfig, {"name": "/tmp/run"}, "name '/tmp/run': '': begin with a letter or digit"),
        (RunConfig, {"name": "data"}, "name 'data' is reserved"),
        (TrainConfig, {"stop_at": 0.9}, "stop_at=0.9 is checked every eval_every steps: set that too"),
        (
            TrainConfig,
            {"steps": 10, "schedule": RsqrtConfig(warmup_steps=6, cooldown_steps=5)},
            "schedule.warmup_steps=6 and schedule.cooldown_steps=5 do not fit into steps=10",
        ),
        (ScaleConfig, {"workers": 4, "ep": 3}, "ep=3 does not divide workers=4"),
        (ScaleConfig, {"workers": 2, "min_workers": 3}, "min_workers=3 is more than workers=2"),
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
        (RunConfig, {"train": TrainConfig(freeze=("",))}, r"train.freeze=\[''\] freezes all tensors"),
    ],
)
def test_refusals(cls: type, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**fields)


def test_default_phases_fit_any_length() -> None:
    for steps in (1, 4, 9, 10, 200):
        for schedule in (RsqrtConfig(), CosineConfig(), LinearConfig()):
            TrainConfig(steps=steps, schedule=schedule)


@pytest.mark.parametrize("schedule", members(ScheduleConfig))
@pytest.mark.parametrize("warmup", [None, 1])
def test_a_run_of_one_step_trains(schedule: type[ScheduleConfig], warmup: int | None) -> None:
    """The first rate of a warm-up is 0."""
    fields = {"cooldown_steps": 0} if issubclass(schedule, CooldownConfig) else {}
    assert schedule(warmup_steps=warmup, **fields).rate(0, peak=1.0, total=1) > 0


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
