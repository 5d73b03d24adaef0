"""What routing does to a trained model: the rows of PAPERS.md 1.8 that are marked safe, with their margins.

On the digits of scikit-learn. Accuracies of routers are not compared: at this size they come out in another
order than in the papers.
"""

import math
from copy import deepcopy
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random
from statistics import mean

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.experts import Experts
from moe.init import init_weights
from moe.overrides import RoutingOverrides
from moe.patch_net import PatchNet, PatchNetConfig
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig, build_router
from moe.routers.affinity import SinkhornConfig
from moe.routers.soft import SoftRouter
from moe.routing import GatherRouting, Routing
from moe.vit import ViT
from tests.moe.digits import (
    EXPERTS,
    GREY,
    GROUP,
    LABELS,
    MOE_BLOCKS,
    TESTED,
    accuracy,
    answer,
    correct,
    descend,
    trained_vit,
)

SEEDS = (0, 1, 2)
TOKENS = 16 * GROUP  # of a group
CAPACITIES = (1.5, 0.5, 0.3, 0.15, 0.05)
SCARCE = (0.3, 0.15, 0.05)


@pytest.fixture(scope="module")
def choosers() -> list[ViT]:
    """Token choice, k=2, vanilla, C=1, one model per seed."""
    config = TokenChoiceConfig(k=2, capacity_factor=1.0)
    return [trained_vit(config, epochs=14, seed=seed) for seed in SEEDS]


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


def loss(model: ViT, overrides: RoutingOverrides) -> float:
    return F.cross_entropy(answer(model, overrides).logits, LABELS[TESTED]).item()


def test_dispatch_sharpens_as_the_scale_grows(soft):
    """Row 2; Soft MoE section 2.3: at scale 1 every slot is nearly the mean token, from then on less so."""
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
    """Row 2; Soft MoE section 3.6, table 2: it does if the scale starts at 8, far from uniform."""
    uniform = [trained_soft("uniform", seed) for seed in SEEDS]
    assert mean(map(accuracy, soft)) - mean(map(accuracy, uniform)) >= 0.01


@pytest.mark.parametrize("priority", ["max", "sum"])
def test_prioritized_routing_pays_where_room_is_scarce(choosers, priority):
    """Row 3; V-MoE section 4.1, figures 5-6, of models that were trained without it."""

    def gain(capacity: float) -> float:
        return mean(
            accuracy(model, RoutingOverrides(capacity_factor=capacity, priority=priority))
            - accuracy(model, RoutingOverrides(capacity_factor=capacity, priority="none"))
            for model in choosers
        )

    assert mean(map(gain, SCARCE)) >= 0.02
    assert min(map(gain, SCARCE[:2])) >= 0.02
    for plenty in (1.0, 1.5):
        assert abs(gain(plenty)) <= 0.01


@pytest.mark.parametrize("priority", ["none", "max"])
def test_dropping_follows_from_capacity(choosers, priority):
    """Row 4; V-MoE section 2.4: tokens beyond the number of seats are dropped, ever more as room shrinks."""
    for model in choosers:
        per_capacity = []
        for capacity in CAPACITIES:
            overrides = RoutingOverrides(capacity_factor=capacity, priority=priority)
            dropped = answer(model, overrides).stats["dropped_frac"]
            slots = round(2 * TOKENS * capacity / EXPERTS)
            assert (dropped >= 1 - EXPERTS * slots / TOKENS - 1e-6).all(), capacity
            per_capacity.append(dropped)
        assert (torch.stack(per_capacity).diff(dim=0) > 0).all()
        assert (per_capacity[0] <= 0.01).all()


def test_another_k_than_the_trained_one_costs_little(choosers):
    """Row 5; V-MoE section 5 and appendix E.4. Fewer cost .02, give or take .02 with the seed."""

    def with_k(k: int) -> float:
        return mean(accuracy(model, RoutingOverrides(k=k)) for model in choosers)

    assert max(with_k(2) - with_k(k) for k in (3, 4, 8)) <= 0.03
    assert with_k(2) - with_k(1) <= 0.05
    for k in (1, 3, 4, 8):
        stats = answer(choosers[0], RoutingOverrides(k=k)).stats
        assert stats["load_mean"].tolist() == pytest.approx([k * TOKENS / EXPERTS] * 2)  # it was another k


def test_a_random_router_hurts_in_any_layer(choosers):
    """Row 6; V-MoE section 5 and appendix E.1. Which layer hurts more depends on the size of the model."""
    as_trained = RoutingOverrides()
    for block in MOE_BLOCKS:
        random = RoutingOverrides(random_blocks=(block,))
        assert mean(accuracy(model, as_trained) - accuracy(model, random) for model in choosers) > 0
        assert mean(loss(model, random) - loss(model, as_trained) for model in choosers) > 0
    first = RoutingOverrides(random_blocks=MOE_BLOCKS[:1])
    assert all(accuracy(model, as_trained) - accuracy(model, first) >= 0.05 for model in choosers)


def test_tokens_by_sinkhorn_choice_are_dropped_less(choosers):
    """Row 7; Routers section 2.2: on the same logits, C=1, a transport plan fills the seats more evenly."""
    for model in choosers:
        for k in (1, 2):
            softmax = TokenChoiceConfig(k=k, capacity_factor=1.0)
            plain = same_logits(model, softmax)
            balanced = same_logits(model, replace(softmax, affinity=SinkhornConfig()))
            for one, other in zip(balanced, plain, strict=True):
                assert one.stats["dropped_frac"] < other.stats["dropped_frac"]


def test_experts_by_sinkhorn_choice_leave_fewer_tokens(chosen):
    """Row 7 for expert choice; Routers section 2.4."""
    plain = same_logits(chosen, ExpertChoiceConfig())
    balanced = same_logits(chosen, ExpertChoiceConfig(affinity=SinkhornConfig()))
    for one, other in zip(balanced, plain, strict=True):
        assert one.stats["unchosen_frac"] < other.stats["unchosen_frac"]


def same_logits(model: ViT, config: RouterConfig) -> list[Routing]:
    """What a router of this kind does with the tokens and the weights of each router of `model`."""
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


def test_expert_choice_picks_some_tokens_often_and_others_never(chosen):
    """Row 8; Soft MoE appendix B, figure 10: picks are c * T exactly, however they are spread."""
    for c in (0.5, 1.0, 2.0):
        output = answer(chosen, RoutingOverrides(capacity_factor=c))
        for layer, routing in enumerate(output.routings):
            picks_GS = torch.stack([times_picked(routing, token) for token in range(TOKENS)], 1)
            assert picks_GS.sum(1).tolist() == [c * TOKENS] * len(picks_GS)
            assert (picks_GS == 0).any()
            assert (picks_GS >= 2).any()
            dropped = (picks_GS == 0).float().mean().item()
            assert output.stats["dropped_frac"][layer].item() == pytest.approx(dropped)


def times_picked(routing, token: int) -> Tensor:
    assert isinstance(routing, GatherRouting)
    return (routing.token_GEC == token).sum((1, 2))


@pytest.fixture(scope="module")
def patch_nets() -> dict[int, list[PatchNet]]:
    return {n: [trained_patch_net(n, seed) for seed in SEEDS] for n in (4, 8, 16)}


def trained_patch_net(num_experts: int, seed: int) -> PatchNet:
    """One Soft MoE layer on four patches of 16 pixels."""
    sizes = PatchNetConfig(image_size=8, patch_size=4, channels=1, num_experts=num_experts, total_hidden=256)
    net = PatchNet(sizes, seed=seed)
    descend(
        net,
        lambda index_B, _: F.cross_entropy(net(GREY[index_B]), LABELS[index_B]),
        epochs=20,
        peak=5e-3,
        seed=seed,
    )
    return net


@torch.no_grad()
def solved(net: PatchNet, experts: int | tuple[int, ...]) -> Tensor:
    """Which test images get their label from these experts alone."""
    return correct(net(GREY[TESTED], RoutingOverrides(experts=experts)))


def solved_by_halves(net: PatchNet, most: int = 70) -> Tensor:
    """(subsets, images): all of half the experts, or a random `most` of them."""
    n = net.config.num_experts
    subsets = list(combinations(range(n), n // 2))
    if len(subsets) > most:
        subsets = Random(0).sample(subsets, most)
    return torch.stack([solved(net, subset) for subset in subsets])


@pytest.mark.parametrize("n", [8, 16])
def test_experts_of_most_weight_do_better_than_random_ones(patch_nets, n):
    """Row 9; Implicit Bias in Soft MoE section 4.3, algorithm 1, k = n/2; not so for few experts."""
    gains = [
        solved(net, n // 2).float().mean() - solved_by_halves(net).float().mean() for net in patch_nets[n]
    ]
    assert torch.stack(gains).mean() >= 0.15


@pytest.mark.parametrize("n", [4, 8, 16])
def test_some_half_of_the_experts_suffices(patch_nets, n):
    """Row 9; Implicit Bias in Soft MoE section 4.2: for nearly every image; for n=16 we try a sample."""
    assert mean(solved_by_halves(net).any(0).float().mean().item() for net in patch_nets[n]) >= 0.95


def test_one_expert_cannot_learn_the_norm():
    """Row 10; Implicit Bias in Soft MoE, theorem 1 and appendix B, figure 4: five as large together can."""
    assert norm_error(num_experts=1) >= 4 * norm_error(num_experts=5)


def norm_error(*, num_experts: int, steps: int = 1500) -> float:
    """Of a Soft MoE layer that learned the length of vectors of 10 numbers, cut into five tokens."""
    router = SoftRouter(SoftConfig(normalize="none"), dim=2, num_experts=num_experts)
    layer = nn.ModuleList([router, Experts(num_experts, 2, 80 // num_experts, activation="relu")])
    init_weights(layer, seed=0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)

    def squared_error(count: int) -> Tensor:
        x_BSD = torch.randn(count, 5, 2, generator=generator)
        routing = router(x_BSD, torch.ones(count, 5))
        y_BSD = routing.combine(layer[1](routing.dispatch(x_BSD)))
        return (y_BSD.sum((1, 2)) - torch.linalg.vector_norm(x_BSD, dim=(1, 2))).square().mean()

    for _ in range(steps):
        optimizer.zero_grad()
        squared_error(256).backward()
        optimizer.step()
    with torch.no_grad():
        return squared_error(10_000).item()
