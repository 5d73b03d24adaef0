"""Configs as TOML: what a run writes is read back equal, and what a user writes is checked by name."""

from pathlib import Path

import pytest

from moe.codec import dataclasses_of
from moe.config import Family
from moe.presets import PRESETS
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.config_file import check_written, merged, read_toml, to_toml
from orchestrator.errors import UsageError
from orchestrator.optimizers import OptimizerConfig
from orchestrator.schedules import ScheduleConfig
from tests.lanes import absent_guests


def again(run: RunConfig, folder: Path, base: RunConfig | None = None) -> RunConfig:
    (folder / "config.toml").write_text(to_toml(run))
    fields = read_toml(str(folder / "config.toml"), run.storage)
    base = override(base or RunConfig(), {"storage": run.storage})
    check_written("config.toml", fields, base, fields)
    return override(base, fields)


def kinds(family: type[Family], field: str) -> list[dict]:
    return [{f"{field}.kind": member.kind} for member in dataclasses_of(family)]


TASKS = {"two_towers": "contrastive"}
CHANGES = [
    {},
    *kinds(OptimizerConfig, "train.optimizer"),
    *kinds(ScheduleConfig, "train.schedule"),
    *([] if absent_guests() else [{"model.kind": "decoder", "task.kind": "next_token"}]),
    {"model.moe": {}, "train.fewshot": {}, "train.ema": {}, "train.clip_norm": None},
    {"train.init_from": 'a "quoted" \\ path\x7f/ü🦀', "task.class_weights": [1.0, 2.5e-7, 1e16] + [0.1] * 7},
    *(
        {"model": to_dict(model), "task.kind": TASKS.get(model.kind, "classification")}
        for model in PRESETS.values()
    ),
]


@pytest.mark.parametrize("part", range(4))
def test_what_is_written_is_read_back_equal(part: int, tmp_path: Path) -> None:
    """Every preset and every kind, also onto a base of which fields that may be None have values."""
    full = override(RunConfig(), {"model.moe": {}, "train.fewshot": {}, "train.ema": {}, "train.trunk": "/t"})
    for changes in CHANGES[part::4]:
        run = override(RunConfig(), {**changes, "storage": str(tmp_path), "data.path": f"{tmp_path}/x/y"})
        assert again(run, tmp_path) == run
        assert again(run, tmp_path, full) == run


def test_places_below_the_storage_move_along(tmp_path: Path) -> None:
    run = override(RunConfig(), {"storage": "/old", "data.path": "/old/data/digits"})
    (tmp_path / "c.toml").write_text(to_toml(run))
    assert read_toml(str(tmp_path / "c.toml"), "/new")["data.path"] == "/new/data/digits"
    assert "/old" not in to_toml(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = 2.5", "train: steps must be an integer, got 2.5 .with the fields of .*c.toml"),
        ("train.steps = '20'", "c.toml: train.steps = '20' is text: write 20"),
        ("[scale]\nuse_gpu = 'true'", "c.toml: scale.use_gpu = 'true' is text: write true"),
        ("train.stepz = 20", "unknown field train.stepz; .*did you mean 'steps'.*c.toml"),
        ("[model.moe.router]\nkind = 'soft'\nk = 2", "unknown field model.moe.router.k; .*c.toml"),
        ("train.lr = 2026-01-01", "lr must be a number, got datetime.*c.toml"),
        ("train = 3", "train is a group of fields.*c.toml"),
        ("train.steps = [1", "c.toml: Unclosed array"),
        (None, "no file of fields: .*c.toml: No such file"),
    ],
)
def test_a_bad_file_is_refused_by_name(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    if text:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        check_written(str(file), fields := read_toml(str(file), "/s"), RunConfig(), fields)


def test_what_is_explicit_wins() -> None:
    fields = {
        "train.lr": 1,
        "model.moe.router.kind": "token_choice",
        "model.moe.router.k": 2,
        "model.width": 8,
    }
    assert merged(fields, {"train.lr": 2})["train.lr"] == 2
    soft = merged(fields, {"model.moe.router.kind": "soft"})
    assert soft == {"train.lr": 1, "model.width": 8, "model.moe.router.kind": "soft"}
    assert merged(fields, {"model.moe.router.kind": "token_choice"}) == fields
    assert merged(fields, {"model.moe": None}) == {"train.lr": 1, "model.width": 8, "model.moe": None}
    assert merged(fields, {"model": "soft-S/16"}) == {"train.lr": 1, "model": "soft-S/16"}
