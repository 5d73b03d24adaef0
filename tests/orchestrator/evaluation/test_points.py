"""What `--set routing.*` and `--grid` mean, what points are called, and which are tried of which model."""

from dataclasses import replace

import pytest
import torch

from moe.layer import MoEConfig
from moe.models.vit import ViT, ViTConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from orchestrator.errors import UsageError
from orchestrator.evaluation.points import (
    default_grid,
    parse_grid,
    parse_point,
    point_key,
    point_name,
    possible,
)

BPR = RoutingOverrides(k=1, capacity_factor=0.3, priority="max")


def test_a_point_by_its_settings():
    assert parse_point([]) == AS_TRAINED
    assert parse_point(["routing.k=1", "routing.capacity=0.3", "routing.priority=max"]) == BPR
    assert parse_point(["routing.experts=[0,5]"]) == RoutingOverrides(experts=(0, 5))
    assert parse_point(["routing.random_blocks=[1]"]) == RoutingOverrides(random_blocks=(1,))


def test_names_for_tables_and_for_metrics():
    assert point_name(AS_TRAINED) == "as trained"
    assert point_name(BPR) == "k=1 capacity=0.3 priority=max"
    assert point_name(parse_point(["routing.capacity=1"])) == "capacity=1"
    assert point_key(BPR) == "k-1_capacity-0.3_priority-max"
    assert point_key(RoutingOverrides(experts=(0, 5))) == "experts-0.5"
    assert point_key(AS_TRAINED) == "as_trained"


def test_a_grid_is_a_product():
    for values in (["routing.k=1,2"], ["routing.k=1", "routing.k=2"]):
        grid = parse_grid([*values, "routing.experts=[0,1],3", "routing.priority=none,max"])
        names = [point_name(point) for point in grid]
        assert names[:3] == [
            "k=1 priority=none experts=0,1",
            "k=1 priority=max experts=0,1",
            "k=1 priority=none experts=3",
        ]
        assert len(names) == len(set(names)) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=1", "an operating point has routing.k, "),
        ("train.lr=1", "an operating point has routing.k, "),
        ("routing.k", "an operating point has routing.k, "),
        ("routing.k=many", "routing.k=many: k must be an integer or None, got 'many'"),
        ("routing.k=1.5", "k must be an integer or None, got 1.5"),
        ("routing.k=1,2", "give one value each; a list is written"),
        ("routing.priority=best", "priority must be 'none', 'max', 'sum', 'weight' or None, got 'best'"),
        ("routing.experts=[1,1]", "experts must be distinct indices"),
    ],
)
def test_what_is_not_a_point(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        parse_point([text])


def config(router: RouterConfig | None) -> ViTConfig:
    moe = MoEConfig(num_experts=8, router=router) if router else None
    return replace(PRESETS["debug"], moe=moe)


@pytest.mark.parametrize(
    ("router", "others"),
    [
        (None, 0),
        (TokenChoiceConfig(k=2), 3 * 6 * 2 - 2),  # k in 1, 2, 4; six capacities; two priorities
        (TokenChoiceConfig(k=3), 4 * 6 * 2 - 2),
        (ExpertChoiceConfig(), 7 + 3 - 1),  # seven capacities; 2, 4 and 6 experts
        (SoftConfig(), 4),  # 1, 2, 4 and 6 experts
        (MixtureConfig(), 4),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_default_grids(router: RouterConfig | None, others: int):
    """16 tokens on 8 experts: a capacity of 0.15 with one choice is round(16 * 0.15 / 8) = 0 slots."""
    grid = default_grid(config(router))
    assert grid[0] == AS_TRAINED
    assert len(grid) == len(set(grid)) == 1 + others


def test_every_point_of_a_grid_runs():
    for router in (TokenChoiceConfig(), ExpertChoiceConfig(), SoftConfig(), MixtureConfig()):
        model = ViT(config(router)).eval()
        for point in default_grid(model.config):
            with torch.no_grad():
                assert model(torch.zeros(1, 3, 8, 8), routing_overrides=point).logits.shape == (1, 10)


def test_points_that_a_model_cannot_run_are_left_out():
    wanted = [RoutingOverrides(k=2), RoutingOverrides(experts=3), RoutingOverrides(random_blocks=(0,))]
    assert possible(config(SoftConfig()), wanted) == [AS_TRAINED, RoutingOverrides(experts=3)]
    assert possible(config(None), wanted) == [AS_TRAINED]
