"""Configs over wires: round trips, overrides from strings, and what each mistake says."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st

from moe.codec import from_dict
from moe.config import Config
from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, SoftConfig, TokenChoiceConfig
from orchestrator.codec import changed_fields, describe, differences, flat, override, read_config, to_dict
from orchestrator.config import DataConfig, RunConfig, ScaleConfig, TrainConfig
from orchestrator.data.augment import InceptionConfig, MixupConfig
from orchestrator.errors import UsageError
from orchestrator.optimizers import SGDConfig
from orchestrator.schedules import CosineConfig, LinearConfig, RsqrtConfig


def with_moe(**fields: Any) -> RunConfig:
    return RunConfig(model=replace(PRESETS["debug"], moe=MoEConfig(**fields)))


CONFIGS = [
    RunConfig(),
    with_moe(router=SoftConfig(slots_per_expert=3, normalize="none"), layers="last_1"),
    with_moe(router=TokenChoiceConfig(k=2, capacity_factor=1.5), layers=(0, 1), images_per_group=2),
    with_moe(router=ExpertChoiceConfig(), num_experts=4),
    RunConfig(
        name="sweep/arm",
        storage="/elsewhere",
        data=DataConfig(
            path="s3://bucket/x", batch_size=32, augment=(InceptionConfig(), MixupConfig(alpha=0.8))
        ),
        train=TrainConfig(
            lr=3e-4, eval_every=7, microbatch=8, optimizer=SGDConfig(), schedule=LinearConfig()
        ),
        scale=ScaleConfig(workers=2, ep=2, use_gpu=True),
    ),
    RunConfig(train=TrainConfig(schedule=CosineConfig(warmup_steps=3, end_frac=0.5))),
]
ANY = st.sampled_from(CONFIGS)


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip_through_json(config: RunConfig) -> None:
    assert read_config(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


@given(old=ANY, new=ANY, order=st.randoms(use_true_random=False))
def test_flat_fields_in_any_order_turn_any_config_into_any_other(
    old: RunConfig, new: RunConfig, order: Any
) -> None:
    changes = list(flat(new).items())
    order.shuffle(changes)
    assert override(old, dict(changes)) == new


@given(old=ANY, new=ANY)
def test_differences_turn_any_config_into_any_other(old: RunConfig, new: RunConfig) -> None:
    """Through JSON too, and none can be left out: the others make another config or none."""
    changes = differences(old, new)
    assert override(old, json.loads(json.dumps(changes))) == new
    for field in changes:
        with suppress(UsageError):
            assert override(old, {name: value for name, value in changes.items() if name != field}) != new


@given(old=ANY, new=ANY)
def test_strings_are_parsed_as_their_fields(old: RunConfig, new: RunConfig) -> None:
    """Values are given as on the command line, where null and lists arrive as JSON."""
    spelled = {k: v if v is None or isinstance(v, list) else str(v) for k, v in flat(new).items()}
    assert override(old, spelled) == new


@pytest.mark.parametrize("config", CONFIGS)
def test_override_leaves_its_argument_alone(config: RunConfig) -> None:
    before = to_dict(config)
    override(config, {"name": "new", "train.optimizer.kind": "sgd", "model.moe.num_experts": 2})
    assert to_dict(config) == before


def test_a_new_kind_starts_from_its_defaults() -> None:
    run = with_moe(router=TokenChoiceConfig(k=2))
    soft = override(run, {"model.moe.router.slots_per_expert": 2, "model.moe.router.kind": "soft"})
    assert soft.model.moe == MoEConfig(router=SoftConfig(slots_per_expert=2))
    same = override(run, {"model.moe.router.kind": "token_choice"})
    assert same == run


def test_a_field_below_none_starts_that_group() -> None:
    run = override(RunConfig(), {"model.moe.router.kind": "soft"})
    assert run.model.moe == MoEConfig(router=SoftConfig())
    assert override(RunConfig(), {"model.moe.num_experts": "4"}).model.moe == MoEConfig(num_experts=4)
    assert override(run, {"model.moe": None}).model.moe is None


@dataclass(frozen=True, kw_only=True)
class Part(Config):
    kind: Literal["part"] = "part"
    size: int = 1
    rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Other(Config):
    kind: Literal["other"] = "other"
    part: Part = Part(size=7)


@dataclass(frozen=True, kw_only=True)
class Whole(Config):
    part: Part | None = Part(size=7)
    member: Part | Other = Other(part=Part(size=9))


def test_a_group_starts_from_the_default_of_its_field() -> None:
    """An override of one leaf changes one leaf, not the others to the defaults of the group's class."""
    assert override(Whole(part=None), {"part.rate": "1"}).part == Part(size=7, rate=1.0)
    changed = override(Whole(member=Part()), {"member.kind": "other", "member.part.rate": 1})
    assert changed.member == Other(part=Part(size=7, rate=1.0))
    assert override(Whole(), {"member.part.rate": 1}).member == Other(part=Part(size=9, rate=1.0))
    assert differences(Whole(part=None), Whole()) == {"part.kind": "part"}
    for old, new in ((Whole(part=None), Whole(part=Part())), (Whole(member=Part()), Whole())):
        assert override(old, differences(old, new)) == new


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trian.lr": 1},
            "unknown field trian; there is: name, storage, model, task, data, train, checkpoint, scale,"
            " plugins; did you mean 'train'?",
        ),
        (
            {"nmae": 1},
            "unknown field nmae; the config has: name, storage, model, task, data, train, checkpoint, scale,"
            " plugins; did you mean 'name'?",
        ),
        ({"data.paht": 1}, "unknown field data.paht; data has: path, batch_size, lanes, shuffle_window,"),
        ({"train.lr.x": 1}, "train.lr is a value, not a group: train.lr.x does not exist"),
        ({"model": "5"}, "model is a group of fields, not a value; got '5'"),
        ({"train": None}, "train is a group of fields, not a value; got None"),
        (
            {"train.optimizer.kind": "adam"},
            "unknown train.optimizer.kind 'adam'; known: adafactor, adamw, lamb, sgd; did you mean 'adamw'?",
        ),
        (
            {"model.moe.router.kind": "magic", "model.moe.router.k": 1},
            "unknown model.moe.router.kind 'magic'; known: expert_choice, hash, mixture, relu, soft,"
            " token_choice, top_k",
        ),
        (
            {"train.schedule.kind": ["rsqrt"]},
            "unknown train.schedule.kind ['rsqrt']; known: constant, cosine, deit, linear, rsqrt",
        ),
        (
            {"train.schedule.end_frac": 0.1},
            "unknown field train.schedule.end_frac; train.schedule has: kind, warmup_steps, cooldown_steps,",
        ),
        ({"train.steps": "1.5"}, "train: steps must be an integer, got '1.5'"),
        ({"train.lr": "fast"}, "train: lr must be a number, got 'fast'"),
        ({"train.lr": "nan"}, "train: lr must be finite, got nan"),
        ({"train.clip_norm": "inf"}, "train: clip_norm must be finite, got inf"),
        ({"data.path": None}, "data: path must be a string, got None"),
        (
            {"data.augment": "mixpu"},
            "unknown data.augment.kind 'mixpu'; known: color_jitter, crop, crop_flip, cutmix, flip,",
        ),
        (
            {"data.augment.randaug.operations": 2},
            "unknown field data.augment.randaug; there is: flip, randaugment, three_augment, color_jitter,",
        ),
        (
            {"data.augment.mixup": "true"},
            "data.augment.mixup is a group of fields, not a value; got 'true'; {}",
        ),
        (
            {"data.augment": "crop,inception"},
            "data: augment has crop and inception, which both crop: use one",
        ),
        ({"data.augment": ["flip", "flip"]}, "data.augment has flip more than once"),
        (
            {"data.augment": [3]},
            "data.augment has 3: write a name, or fields with a kind; known: color_jitter,",
        ),
        (
            {"data.augment.randaugment.operations": 17},
            "data.augment.randaugment: operations must be at most 16, got 17",
        ),
        ({"scale.use_gpu": "maybe"}, "scale: use_gpu must be true or false, got 'maybe'"),
        (
            {"scale.ep": "all"},
            "scale: ep must be an integer or 'auto', got 'all'",
        ),
        ({"model.moe.router.k": 0}, "model.moe.router: k must be at least 1, got 0"),
        (
            {"model.moe.layers": "last"},
            "model.moe: layers must be every_2, last_<n>, last_<n>_odd or block indices, got 'last'",
        ),
        ({"train.steps": 0}, "train: steps must be at least 1, got 0"),
        ({"scale.workers": 3}, "data.batch_size=64 does not divide over workers=3"),
    ],
)
def test_mistakes_name_the_value_and_what_there_is(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        override(RunConfig(), changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("config", CONFIGS)
def test_describe_lists_every_field(config: RunConfig) -> None:
    lines, groups = describe(config), ("model.moe", "train.fewshot", "train.ema")  # that may be null
    assert {
        f"{name} = {json.dumps(value)}" for name, value in flat(config).items() if name not in groups
    } <= {*lines}
    names = {line.split(" = ")[0] for line in lines}
    assert names >= {name for other in CONFIGS for name in flat(other) if name not in groups}
    for kind in ("adamw", "sgd", "rsqrt", "cosine", "linear", "soft", "token_choice", "expert_choice"):
        assert any(line.endswith(f'.kind = "{kind}"') for line in lines), kind
    # Models that other tests define come after the ViT.
    first, *others = (i for i, line in enumerate(lines) if line.startswith("model.kind = "))
    of_vit = lines[first : others[0] if others else None]
    assert ("model.moe = null, or with:" in of_vit) == (config.model.moe is None)


def test_what_may_change_when_a_run_is_resumed() -> None:
    ignored = set()
    for config in CONFIGS:
        old = flat(config)
        for name, value in old.items():
            changes = changed_fields(old, {**old, name: "another"})
            assert changes in ({}, {name: (value, "another")})
            if not changes:
                ignored.add(name)
    split = {name for name in flat(RunConfig()) if name.startswith(("scale.", "checkpoint."))}
    assert {"scale.workers", "scale.ep", "checkpoint.keep_last"} < split
    assert ignored == {"storage", "train.microbatch", "data.cache_gb", "data.max_bad_frac", *split}


def test_fields_of_one_side_only_are_changes() -> None:
    dense, moe = flat(RunConfig()), flat(with_moe(router=SoftConfig()))
    assert changed_fields(dense, moe)["model.moe.router.kind"] == (None, "soft")
    assert changed_fields(moe, dense)["model.moe.router.kind"] == ("soft", None)
    assert changed_fields(dense, dense) == {}


def test_defaults_of_rsqrt_are_none_and_stay_none() -> None:
    assert flat(RunConfig())["train.schedule.warmup_steps"] is None
    run = override(RunConfig(), {"train.schedule.warmup_steps": "12"})
    assert run.train.schedule == RsqrtConfig(warmup_steps=12)


def test_a_whole_group_and_its_fields_in_any_order():
    """The group first, then the kind below it, then the kind's own fields."""
    changes = {
        "model.moe.router.slots_per_expert": "2",
        "model.moe.router.kind": "soft",
        "model.moe": {"num_experts": 4},
    }
    moe = override(RunConfig(), changes).model.moe
    assert moe is not None
    assert (moe.num_experts, moe.router) == (4, SoftConfig(slots_per_expert=2))


def test_a_kind_that_is_none_is_left_out() -> None:
    run = from_dict(RunConfig, {"data": {"augment": {"flip": "none", "shift": {}}}})
    assert [member.kind for member in run.data.augment] == ["shift"]
