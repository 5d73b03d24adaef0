"""Which points are tried of which model."""

from dataclasses import replace

import pytest
import torch

from moe.layer import MoEConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.vit import ViT, ViTConfig
from orchestrator.evaluation.grid import default_grid, possible


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


def test_what_a_model_has_not_is_left_out():
    wanted = [RoutingOverrides(k=2), RoutingOverrides(experts=3), RoutingOverrides(random_blocks=(0,))]
    assert possible(config(SoftConfig()), wanted) == [AS_TRAINED, RoutingOverrides(experts=3)]
    assert possible(config(None), wanted) == [AS_TRAINED]
