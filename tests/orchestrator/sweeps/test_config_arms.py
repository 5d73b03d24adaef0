"""Arms that are given as configs: they become the dotted changes that a sweep stores and compares."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from moe import (
    MoEConfig,
    SinkhornConfig,
    SoftConfig,
    TokenChoiceConfig,
    ViTConfig,
    preset,
)
from moe.config import Config
from orchestrator import CosineConfig, DataConfig, RunConfig, SGDConfig, Sweep, UsageError, override
from orchestrator.codec import places_of

MOE = replace(preset("debug"), moe=MoEConfig(num_experts=4, router=SoftConfig(slots_per_expert=2)))
BASES = (RunConfig(name="base"), RunConfig(name="base", model=MOE))
CONFIGS = (MoEConfig(), MoEConfig(router=SoftConfig()), replace(MOE, width=64), SGDConfig(), CosineConfig())


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("base", BASES, ids=["dense", "moe"])
def test_a_config_takes_the_place_of_its_field(config: Config, base: RunConfig) -> None:
    run = Sweep(base=base, arms={"a": config}).runs()["a"]
    assert config in (run.train.optimizer, run.train.schedule, run.model, run.model.moe)


def test_a_sweep_stores_dotted_changes() -> None:
    base, other = BASES
    run = replace(other, name="mine", storage="/elsewhere", train=replace(other.train, lr=0.5))
    arms = {
        "soft": MoEConfig(router=SoftConfig()),
        "experts": MoEConfig(),
        "choice": TokenChoiceConfig(k=2),
        "sinkhorn": SinkhornConfig(),
        "sgd": SGDConfig(momentum=0.5),
        "same": base.data,
        "run": run,
        "dotted": {"train.lr": 0.1},
    }
    sweep = Sweep(base=base, arms=arms)
    assert sweep.changes == {
        "soft": {"model.moe.router.kind": "soft"},
        "experts": {"model.moe": {}},
        "choice": {"model.moe.router.k": 2},
        "sinkhorn": {"model.moe.router.affinity.kind": "sinkhorn"},
        "sgd": {"train.optimizer.kind": "sgd", "train.optimizer.momentum": 0.5},
        "same": {},
        "run": {
            "model.moe.num_experts": 4,
            "model.moe.router.kind": "soft",
            "model.moe.router.slots_per_expert": 2,
            "train.lr": 0.5,
        },
        "dotted": {"train.lr": 0.1},
    }
    assert Sweep(base=base, arms=json.loads(json.dumps(sweep.changes))) == sweep
    # Differences from the base that the sweep was made with, whatever the base becomes.
    later = replace(sweep, base=override(base, {"train.lr": 0.2}))
    assert later.runs()["soft"].train.lr == 0.2
    assert later.runs()["run"].train.lr == 0.5


@dataclass(frozen=True, kw_only=True)
class Strange(Config):
    size: int = 1


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (
            Strange(),
            r"arm 'a' is Strange\(size=1\): give dotted changes, a RunConfig, or one of AdafactorConfig, ",
        ),
        ("soft", "arm 'a' is 'soft': give dotted changes, a RunConfig, or one of .*MoEConfig, "),
        (ViTConfig, "arm 'a' is <class .*ViTConfig'>: give dotted changes"),
        (DataConfig(batch_size=30, lanes=3), "arm 'a': train.microbatch=4 does not divide a worker's 30"),
    ],
)
def test_other_arms_are_refused(arm: Any, message: str) -> None:
    base = override(RunConfig(name="base"), {"train.microbatch": 4})
    with pytest.raises(UsageError, match=message):
        Sweep(base=base, arms={"a": arm})


def test_a_config_with_two_places_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {SGDConfig: {"train.optimizer", "train.second"}}
    monkeypatch.setattr("orchestrator.sweeps.sweep.places_of", lambda config: places)
    with pytest.raises(
        UsageError, match=r"SGDConfig\(.*\) may be train\.optimizer or train\.second: say which by dotted"
    ):
        Sweep(base=RunConfig(), arms={"a": SGDConfig()})


def test_every_config_of_a_run_has_one_place() -> None:
    assert all(len(names) == 1 for names in places_of(RunConfig()).values())
