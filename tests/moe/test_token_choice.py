"""Token choice: the layer against its definition, its noise and its losses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moe.init import gaussian, init_weights, split
from moe.layer import MoEConfig, MoELayer
from moe.routers import TokenChoiceConfig, build_router
from moe.routers.affinity import SinkhornConfig, sinkhorn_plan
from moe.routers.token_choice import balance_loss, importance_loss, load_loss, top_experts, z_loss
from tests.moe.test_fill_slots import algorithm


def router_with(gate_DE: list[list[float]], **fields) -> nn.Module:
    router = build_router(TokenChoiceConfig(**fields), dim=len(gate_DE), num_experts=len(gate_DE[0]))
    with torch.no_grad():
        router.gate_DE.copy_(torch.tensor(gate_DE))
    return router


@pytest.mark.parametrize(
    "config",
    [
        TokenChoiceConfig(k=1, capacity_factor=0.5),
        TokenChoiceConfig(k=2, capacity_factor=0.6),
        TokenChoiceConfig(k=3, capacity_factor=1.0),
        TokenChoiceConfig(k=4, capacity_factor=9.0),
        TokenChoiceConfig(k=1, capacity_factor=0.5, priority="max"),
        TokenChoiceConfig(k=2, capacity_factor=0.5, priority="max"),
        TokenChoiceConfig(k=2, capacity_factor=0.5, priority="sum"),
        TokenChoiceConfig(k=1, capacity_factor=0.6, affinity=SinkhornConfig()),
        TokenChoiceConfig(k=2, capacity_factor=0.5, affinity=SinkhornConfig(), priority="max"),
        TokenChoiceConfig(k=2, capacity_factor=0.5, affinity=SinkhornConfig(), combine="affinity"),
    ],
    ids=lambda c: f"{c.affinity.kind}-{c.k}-{c.capacity_factor}-{c.priority}-{c.combine}",
)
def test_layer_is_its_definition(config):
    """Sum of weight * expert(token) over a token's seated choices: softmax, then top-k, not renormalised.
    A Sinkhorn plan decides who sits where; the softmax weighs, unless the plan is to."""
    G, S, D, E = 3, 10, 6, 4
    layer = MoELayer(MoEConfig(num_experts=E, router=config), dim=D, hidden=16)
    init_weights(layer, seed=0)
    x = 2 * torch.randn(G, S, D, generator=torch.Generator().manual_seed(0))
    logits = x @ layer.router.gate_DE
    gates = affinity = logits.softmax(-1)
    if config.affinity.kind == "sinkhorn":
        affinity, _ = sinkhorn_plan(logits, torch.ones(G, S), config.affinity.iterations)
    weights = affinity if config.combine == "affinity" else gates
    every = layer.experts(x.reshape(1, G * S, D).expand(E, -1, -1)).unflatten(1, (G, S))
    C = round(S * config.k * config.capacity_factor / E)
    expected, dropped = torch.zeros_like(x), 0
    for g in range(G):
        seats = algorithm(affinity[g].tolist(), [1.0] * S, k=config.k, capacity=C, priority=config.priority)
        dropped += S - len({s for tokens in seats for s in tokens} - {S})
        for e in range(E):
            for s in set(seats[e]) - {S}:
                expected[g, s] = expected[g, s] + weights[g, s, e] * every[e, g, s]
    got, routing = layer(x, torch.ones(G))
    torch.testing.assert_close(got, expected)
    assert routing.stats["dropped_frac"].item() == pytest.approx(dropped / (G * S))
    assert (dropped > 0) == (config.capacity_factor < 1), "the cases must cover dropping and not dropping"


def test_ties_go_to_the_lower_expert():
    router = router_with([[0.0] * 20], k=2, capacity_factor=9.0)
    token_GEC = router(torch.randn(1, 5, 1), torch.ones(1, 5)).token_GEC
    assert [e for e in range(20) if (token_GEC[0, e] < 5).any()] == [0, 1]


@given(k=st.integers(1, 6), levels=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_top_experts_are_those_of_a_stable_sort(k, levels, seed):
    affinity = torch.randint(0, levels, (2, 5, 6), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(
        top_experts(affinity, k), affinity.argsort(dim=-1, descending=True, stable=True)[..., :k]
    )


def test_a_gate_that_underflows_is_chosen_weighs_nothing_and_takes_a_seat():
    """Logits 200, 0, 0: the second choice has gate 0 in float32, and is the lowest of the zeros."""
    router = router_with([[200.0, 0.0, 0.0]], k=2, capacity_factor=3.0)
    routing = router(torch.ones(1, 2, 1), torch.ones(1, 2))
    assert routing.token_GEC[0, :, :2].tolist() == [[0, 1], [0, 1], [2, 2]]
    assert routing.weight_GEC[0, :, :2].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_tokens_that_come_first_are_seated():
    """The vanilla order of V-MoE section 2.4, though the later tokens are surer of their choice."""
    router = router_with([[1.0, -1.0]], capacity_factor=0.5)
    x = torch.arange(1.0, 9).view(1, 8, 1)
    assert router(x, torch.ones(1, 8)).token_GEC.tolist() == [[[0, 1], [8, 8]]]


@pytest.mark.parametrize("priority", ["max", "sum"])
def test_the_surest_tokens_are_seated_under_priority(priority):
    """Of one choice both say the same: the last two, the surest first. V-MoE section 4.1."""
    router = router_with([[1.0, -1.0]], capacity_factor=0.5, priority=priority)
    x = torch.arange(1.0, 9).view(1, 8, 1)
    assert router(x, torch.ones(1, 8)).token_GEC.tolist() == [[[7, 6], [8, 8]]]


def test_priority_sorts_by_the_noisy_gates_of_the_whole_group():
    """With noise, seats are those of algorithm 2 for the gates that the routing shows."""
    router = build_router(
        TokenChoiceConfig(k=2, capacity_factor=0.5, priority="max", noise_std=20.0), dim=3, num_experts=4
    )
    init_weights(router, seed=0)
    x, keys_GS = (
        torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(0)),
        torch.arange(24).view(2, 12),
    )
    routing, still = router(x, torch.ones(2, 12), keys_GS), router(x, torch.ones(2, 12))
    expected = [
        algorithm(gates, [1.0] * 12, k=2, capacity=3, priority="max") for gates in routing.gates_GSE.tolist()
    ]
    assert routing.token_GEC.tolist() == expected
    assert not torch.equal(routing.token_GEC, still.token_GEC)


def test_empty_slots_weigh_nothing():
    router = build_router(TokenChoiceConfig(capacity_factor=2.0), dim=3, num_experts=4)
    init_weights(router, seed=0)
    routing = router(torch.randn(2, 8, 3), torch.ones(2, 8))
    assert torch.equal(routing.weight_GEC == 0, routing.token_GEC == 8)


def test_load_counts_demand():
    """Six tokens want expert 0 and two expert 1: mean 4, deviation 2, though two are seated at each."""
    router = router_with([[1.0, -1.0]], capacity_factor=0.5)
    x = torch.tensor([1.0, 1, 1, -1, 1, -1, 1, 1]).view(1, 8, 1)
    routing = router(x, torch.ones(1, 8))
    assert routing.load_GE.tolist() == [[6, 2]]
    assert routing.stats["load_cv"].item() == pytest.approx(2 / 4)
    assert routing.stats["dropped_frac"].item() == pytest.approx(4 / 8)


def test_a_sinkhorn_plan_balances_what_the_softmax_does_not():
    """All tokens like expert 0 best. The softmax sends all there; the plan's rows still sum to 1, its columns
    to 8 / 2, so only the four that like it most stay."""
    x = torch.linspace(1, 2, 8).view(1, 8, 1)
    softmax = router_with([[3.0, -3.0]], capacity_factor=1.0)(x, torch.ones(1, 8))
    sinkhorn = router_with([[3.0, -3.0]], capacity_factor=1.0, affinity=SinkhornConfig(iterations=200))(
        x, torch.ones(1, 8)
    )
    assert softmax.load_GE.tolist() == [[8, 0]]
    assert sinkhorn.load_GE.tolist() == [[4, 4]]
    assert sinkhorn.token_GEC.tolist() == [[[4, 5, 6, 7], [0, 1, 2, 3]]]
    torch.testing.assert_close(sinkhorn.weight_GEC[0, 0], softmax.gates_GSE[0, 4:, 0])
    assert sinkhorn.stats["transport_residual"] < 1e-4
    assert softmax.stats["transport_residual"] == 0


def test_no_gradient_goes_through_a_plan_that_only_chooses():
    """The gradient is that of the gates at the seated pairs."""
    router = build_router(
        TokenChoiceConfig(affinity=SinkhornConfig(), importance_weight=0.0), dim=3, num_experts=4
    )
    init_weights(router, seed=0)
    x = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    routing = router(x, torch.ones(2, 8))
    routing.weight_GEC.sum().backward()
    seated = torch.zeros(2, 8 + 1, 4).scatter(1, routing.token_GEC.transpose(1, 2), 1.0)[:, :8]
    expected = torch.autograd.grad(((x @ router.gate_DE).softmax(-1) * seated).sum(), router.gate_DE)[0]
    torch.testing.assert_close(router.gate_DE.grad, expected)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be positive and finite, got 0.0"),
        ({"capacity_factor": -1.0}, "capacity_factor must be positive and finite, got -1.0"),
        ({"capacity_multiple_of": 0}, "capacity_multiple_of must be at least 1, got 0"),
        ({"noise_std": -0.5}, "noise_std must not be negative, got -0.5"),
        ({"importance_weight": -1.0}, "importance_weight must not be negative, got -1.0"),
        ({"load_weight": -1.0}, "load_weight must not be negative, got -1.0"),
        ({"balance_weight": -1.0}, "balance_weight must not be negative, got -1.0"),
        ({"z_weight": -1.0}, "z_weight must not be negative, got -1.0"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        TokenChoiceConfig(**fields)


def test_more_choices_than_experts():
    with pytest.raises(ValueError, match="k=5 exceeds num_experts=4"):
        TokenChoiceConfig(k=5).slots(num_tokens=16, num_experts=4)
    assert TokenChoiceConfig(k=4, capacity_factor=1.0).slots(num_tokens=16, num_experts=4) == 16


def test_capacity_is_k_times_tokens_over_experts():
    assert TokenChoiceConfig(k=2, capacity_factor=1.05).slots(num_tokens=100, num_experts=4) == 52  # 52.5
    assert TokenChoiceConfig(k=1, capacity_factor=1.5).slots(num_tokens=10, num_experts=4) == 4  # 3.75


@pytest.mark.parametrize("noise", [False, True])
def test_aux_is_the_weighted_sum_of_the_losses(noise):
    """Importance and z of the clean logits, balance of the gates as they route, load with noise alone: its
    threshold is noisy, the rest of it clean."""
    weights = {"importance_weight": 0.3, "load_weight": 0.2, "balance_weight": 0.7, "z_weight": 0.11}
    x, valid = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0)), torch.ones(3, 16)
    valid[1, 5:] = 0
    keys_GS = torch.arange(48).view(3, 16) if noise else None

    def routed(**fields):
        router = build_router(TokenChoiceConfig(k=2, noise_std=2.0, **fields), dim=8, num_experts=4)
        init_weights(router, seed=0)
        return router(x, valid, keys_GS), x @ router.gate_DE

    routing, logits = routed(**weights)
    noisy = routing.gates_GSE.log()  # up to a constant of each token, which the losses' softmax ignores
    noisy = noisy - noisy.logsumexp(-1, keepdim=True)
    expected = 0.3 * importance_loss(logits.softmax(-1), valid)
    expected = expected + 0.7 * balance_loss(routing.gates_GSE, valid) + 0.11 * z_loss(logits, valid)
    if noise:
        shift = 2.0 / 4 * gaussian(split(keys_GS, 4))
        expected = expected + 0.2 * load_loss(logits, logits + shift, valid, k=2, std=2.0 / 4)
        torch.testing.assert_close((logits + shift).log_softmax(-1), noisy)
    torch.testing.assert_close(routing.aux_G, expected)
    for name, weight in weights.items():
        alone = routed(**dict.fromkeys(weights, 0.0) | {name: weight})[0].aux_G
        assert alone.eq(0).all() == (name == "load_weight" and not noise), name
    assert routed(**dict.fromkeys(weights, 0.0))[0].aux_G.eq(0).all()


def test_noise_has_the_standard_deviation_of_the_config_over_E():
    """V-MoE section 2.3: N(0, 1 / E^2). Two experts' logits differ by a normal of variance 2 (std / E)^2."""
    for std, E in ((1.0, 4), (3.0, 4), (1.0, 8)):
        router = router_with([[0.0] * E], noise_std=std)
        gates = router(torch.zeros(40, 50, 1), torch.ones(40, 50), torch.arange(2000).view(40, 50)).gates_GSE
        difference = (gates[..., 0] / gates[..., 1]).log()
        assert difference.std().item() == pytest.approx(2**0.5 * std / E, rel=0.08)  # 5 sigma: 0.079
        assert abs(difference.mean()) < 5 * 2**0.5 * std / E / 2000**0.5


def test_flip_frac_is_the_share_of_choices_that_noise_changes_and_grows_with_it():
    x, keys_GS = (
        torch.randn(4, 64, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(256).view(4, 64),
    )
    seen = []
    for std in (0.0, 0.01, 1.0, 5.0, 100.0):
        router = build_router(TokenChoiceConfig(k=2, noise_std=std), dim=8, num_experts=8)
        init_weights(router, seed=0)
        routing = router(x, torch.ones(4, 64), keys_GS)
        clean = top_experts(x @ router.gate_DE, 2).tolist()
        noisy = top_experts(routing.gates_GSE, 2).tolist()
        lost = sum(
            len(set(a) - set(b)) for A, B in zip(clean, noisy, strict=True) for a, b in zip(A, B, strict=True)
        )
        assert routing.stats["flip_frac"].item() == pytest.approx(lost / (4 * 64 * 2))
        assert router(x, torch.ones(4, 64)).stats["flip_frac"] == 0
        seen.append(routing.stats["flip_frac"].item())
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1 - 2 / 8, abs=0.08)  # as if at random


def test_flip_frac_leaves_padding_out():
    router = build_router(TokenChoiceConfig(noise_std=5.0), dim=8, num_experts=8)
    init_weights(router, seed=0)
    x = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0))
    keys_GS, valid = torch.arange(64).view(1, 64), torch.tensor([[1.0] * 20 + [0.0] * 44])
    some, few = router(x, valid, keys_GS), router(x[:, :20], torch.ones(1, 20), keys_GS[:, :20])
    torch.testing.assert_close(some.stats["flip_frac"], few.stats["flip_frac"])
    assert 0 < few.stats["flip_frac"] < 1


def test_flip_frac_is_of_the_choices_that_a_plan_makes():
    x = 0.5 + torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0))
    config = TokenChoiceConfig(capacity_factor=8.0, noise_std=3.0, affinity=SinkhornConfig())
    router, keys_GS = build_router(config, dim=8, num_experts=8), split(torch.tensor([4]), 64)
    init_weights(router, seed=0)
    noisy, clean = router(x, torch.ones(1, 64), keys_GS), router(x, torch.ones(1, 64))
    seats = [
        {(e, s) for e, row in enumerate(routing.token_GEC[0].tolist()) for s in row if s < 64}
        for routing in (noisy, clean)
    ]
    assert noisy.stats["flip_frac"].item() == pytest.approx(1 - len(seats[0] & seats[1]) / 64)
