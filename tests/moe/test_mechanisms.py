"""Effects of routing in trained models that the papers report, with their margins.

On the digits of scikit-learn; the others are in `tests/experiments/test_studies.py`.
Accuracies of routers are not compared: at this size they come out in another order than in the papers.
"""

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest
import torch
from torch import Tensor

from experiments.studies._digits import (
    EXPERTS,
    GROUP,
    MOE_BLOCKS,
    accuracy,
    answer,
    trained_vit,
)
from moe.overrides import RoutingOverrides
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig, build_router
from moe.routers.affinity import SinkhornConfig
from moe.routing import Routing
from moe.vit import ViT

SEEDS = (0, 1, 2)
TOKENS = 16 * GROUP  # of a group
CAPACITIES = (1.5, 0.5, 0.3, 0.15, 0.05)

pytestmark = pytest.mark.slow  # it trains a dozen models


@pytest.fixture(scope="module")
def chooser() -> ViT:
    """Token choice, k=2, vanilla, C=1."""
    return trained_vit(TokenChoiceConfig(k=2, capacity_factor=1.0), epochs=14, seed=0)


@pytest.fixture(scope="module")
def chosen() -> ViT:
    """Expert choice, c=1."""
    return trained_vit(ExpertChoiceConfig(), epochs=6, seed=0)


@pytest.fixture(scope="module")
def soft() -> list[ViT]:
    return [trained_soft("soft", seed) for seed in SEEDS]


def trained_soft(dispatch, seed: int) -> ViT:
    config = SoftConfig(dispatch=dispatch, scale_init=8.0)
    return trained_vit(config, epochs=12, seed=seed, images_per_group=1)


def test_dispatch_sharpens_as_the_scale_grows(soft):
    """Soft MoE section 2.3: at scale 1 every slot is nearly the mean token; larger scales sharpen it."""
    model, per_scale = deepcopy(soft[0]), []
    for scale in (1.0, 2.0, 4.0, 8.0, 16.0):
        with torch.no_grad():
            for block in MOE_BLOCKS:
                model.blocks[block].mlp.router.scale.fill_(scale)
        per_scale.append([dispatch_entropy(routing) for routing in answer(model).routings])
    for layer in zip(*per_scale, strict=True):
        assert layer[0] > 0.9 * math.log(16)
        assert all(smaller < larger for larger, smaller in pairwise(layer)), layer
        assert layer[-1] < 0.75 * math.log(16)


def dispatch_entropy(routing) -> float:
    D_GSEC = routing.dispatch_GSEC
    return -torch.xlogy(D_GSEC, D_GSEC).sum(1).mean().item()


def test_learned_dispatch_beats_uniform_dispatch(soft):
    """Soft MoE section 3.6, table 2, with a scale that starts at 8, far from uniform."""
    uniform = [trained_soft("uniform", seed) for seed in SEEDS]
    assert mean(map(accuracy, soft)) - mean(map(accuracy, uniform)) >= 0.01


@pytest.mark.parametrize("priority", ["none", "max"])
def test_dropping_follows_from_capacity(chooser, priority):
    """V-MoE section 2.4: tokens beyond the number of seats are dropped, more of them as capacity shrinks."""
    per_capacity = []
    for capacity in CAPACITIES:
        overrides = RoutingOverrides(capacity_factor=capacity, priority=priority)
        dropped = answer(chooser, overrides).stats["dropped_frac"]
        slots = round(2 * TOKENS * capacity / EXPERTS)
        assert (dropped >= 1 - EXPERTS * slots / TOKENS - 1e-6).all(), capacity
        per_capacity.append(dropped)
    assert (torch.stack(per_capacity).diff(dim=0) > 0).all()
    assert (per_capacity[0] <= 0.01).all()


def test_tokens_by_sinkhorn_choice_are_dropped_less(chooser):
    """Routers section 2.2: on the same logits, C=1, a transport plan fills the seats more evenly."""
    for k in (1, 2):
        softmax = TokenChoiceConfig(k=k, capacity_factor=1.0)
        plain = same_logits(chooser, softmax)
        balanced = same_logits(chooser, replace(softmax, affinity=SinkhornConfig()))
        for one, other in zip(balanced, plain, strict=True):
            assert one.stats["dropped_frac"] < other.stats["dropped_frac"]


def test_experts_by_sinkhorn_choice_leave_fewer_tokens(chosen):
    """Routers section 2.4."""
    plain = same_logits(chosen, ExpertChoiceConfig())
    balanced = same_logits(chosen, ExpertChoiceConfig(affinity=SinkhornConfig()))
    for one, other in zip(balanced, plain, strict=True):
        assert one.stats["unchosen_frac"] < other.stats["unchosen_frac"]


def same_logits(model: ViT, config: RouterConfig) -> list[Routing]:
    """Routings by another router with the tokens and weights of each router of `model`."""
    tokens: dict[int, tuple[Tensor, ...]] = {}
    routers = {block: model.blocks[block].mlp.router for block in MOE_BLOCKS}
    hooks = [
        router.register_forward_pre_hook(lambda _, args, block=block: tokens.update({block: args[:2]}))
        for block, router in routers.items()
    ]
    answer(model)
    for hook in hooks:
        hook.remove()
    routings = []
    for block, router in routers.items():
        other = build_router(config, dim=router.gate_DE.shape[0], num_experts=EXPERTS)
        other.load_state_dict(router.state_dict())
        with torch.no_grad():
            routings.append(other(*tokens[block]))
    return routings
