"""Token choice: seats by hand and by V-MoE's algorithms, the layer against its definition, noise, losses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.init import gaussian, split
from moe.routers import TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, sinkhorn_plan
from moe.routers.token_choice import (
    balance_loss,
    fill_slots,
    importance_loss,
    load_loss,
    queue_priority,
    top_experts,
    z_loss,
)
from tests.moe.parts import build_layer, build_router, every_expert, gate_router, keys, randn


@pytest.mark.parametrize(
    ("expert_SK", "valid_S", "capacity", "seats"),
    [
        # Three tokens choose expert 0, which seats two; the last is dropped. 4 = S marks an empty slot.
        ([[0], [0], [1], [0]], [1, 1, 1, 1], 2, [[0, 1], [2, 4]]),
        # Token 0 is padding, so the last token finds a seat.
        ([[0], [0], [1], [0]], [0, 1, 1, 1], 2, [[1, 3], [2, 4]]),
        # Tokens 1 and 3 choose expert 0 first, so they sit before token 0, whose second choice it is.
        ([[1, 0], [0, 1], [1, 0], [0, 1]], [1, 1, 1, 1], 3, [[1, 3, 0], [0, 2, 1]]),
        # Expert 0 seats one. Token 1 loses its first choice, and its second still queues behind token 2's
        # first.
        ([[0, 1], [0, 1], [1, 0]], [1, 1, 1], 1, [[0], [2]]),
    ],
)
def test_seats_by_hand(expert_SK, valid_S, capacity, seats):
    token_GEC = fill_slots(
        torch.tensor([expert_SK]), torch.tensor([valid_S]), num_experts=2, capacity=capacity
    )
    assert token_GEC.tolist() == [seats]


@pytest.mark.parametrize(
    ("priority", "seats"),
    [
        ("none", [[0, 1], [0, 1]]),  # token order
        ("max", [[2, 3], [2, 3]]),  # largest gates 0.45, 0.5, 0.6, 0.55: tokens 2, 3, 1, 0
        ("sum", [[0, 2], [0, 2]]),  # sums of two 0.9, 0.7, 0.8, 0.75: tokens 0, 2, 3, 1
    ],
)
def test_priority_by_hand(priority, seats):
    """All four tokens choose experts 0 and 1, in this order; both seat two."""
    gates_GSE = torch.tensor([[[0.45, 0.45, 0.1], [0.5, 0.2, 0.3], [0.6, 0.2, 0.2], [0.55, 0.2, 0.25]]])
    expert_GSK = torch.tensor([[[0, 1]] * 4])
    priority_GS = queue_priority(gates_GSE, expert_GSK, priority)
    token_GEC = fill_slots(expert_GSK, torch.ones(1, 4), priority_GS, num_experts=3, capacity=2)
    assert token_GEC.tolist() == [[*seats, [4, 4]]]


def algorithm(
    affinity_SE: list[list[float]], valid_S: list[float], *, k: int, capacity: int, priority: str
) -> list[list[int]]:
    """V-MoE, algorithms 1 (vanilla) and 2 (batch prioritized), as printed: for every choice, for every token
    in the order of the queue, if there is room. Tokens prefer the larger affinity, then the lower expert."""
    S, E = len(affinity_SE), len(affinity_SE[0])
    choices = [sorted(range(E), key=lambda e, row=row: (-row[e], e))[:k] for row in affinity_SE]
    score = {
        "none": [0.0] * S,
        "max": [max(row) for row in affinity_SE],
        "sum": [sum(row[e] for e in chosen) for row, chosen in zip(affinity_SE, choices, strict=True)],
    }[priority]
    queue = sorted(range(S), key=lambda s: (-score[s], s))
    token_EC, taken = [[S] * capacity for _ in range(E)], [0] * E
    for choice in range(k):
        for s in queue:
            e = choices[s][choice]
            if valid_S[s] and taken[e] < capacity:
                token_EC[e][taken[e]] = s
                taken[e] += 1
    return token_EC


@settings(max_examples=100)
@given(
    G=st.integers(1, 3),
    S=st.integers(1, 9),
    E=st.integers(1, 6),
    k=st.integers(1, 6),
    capacity=st.integers(1, 12),
    priority=st.sampled_from(["none", "max", "sum"]),
    levels=st.sampled_from([1, 2, 4, 1024]),
    seed=st.integers(0, 2**31),
)
def test_seats_are_those_of_algorithms_1_and_2(G, S, E, k, capacity, priority, levels, seed):
    """Affinities are multiples of 1/1024, so that sums are exact; with one level all are equal. Capacity may
    exceed the queue, and a quarter of the tokens is padding."""
    g = torch.Generator().manual_seed(seed)
    affinity_GSE = torch.randint(0, levels, (G, S, E), generator=g) / 1024
    valid_GS = torch.randint(0, 4, (G, S), generator=g).clamp(max=1).float()
    k = min(k, E)
    expert_GSK = top_experts(affinity_GSE, k)
    assert torch.equal(expert_GSK, affinity_GSE.argsort(dim=-1, descending=True, stable=True)[..., :k])
    priority_GS = queue_priority(affinity_GSE, expert_GSK, priority)
    got = fill_slots(expert_GSK, valid_GS, priority_GS, num_experts=E, capacity=capacity)
    expected = [
        algorithm(affinity, valid, k=k, capacity=capacity, priority=priority)
        for affinity, valid in zip(affinity_GSE.tolist(), valid_GS.tolist(), strict=True)
    ]
    assert got.tolist() == expected


@pytest.mark.parametrize(
    "config",
    [
        TokenChoiceConfig(k=1, capacity_factor=0.5),
        TokenChoiceConfig(k=3, capacity_factor=1.0),
        TokenChoiceConfig(k=4, capacity_factor=9.0),
        TokenChoiceConfig(k=2, capacity_factor=0.5, priority="max"),
        TokenChoiceConfig(k=2, capacity_factor=0.5, priority="sum"),
        TokenChoiceConfig(k=2, capacity_factor=0.5, affinity=SinkhornConfig(), priority="max"),
        TokenChoiceConfig(k=2, capacity_factor=0.5, affinity=SinkhornConfig(), combine="affinity"),
    ],
    ids=lambda c: f"{c.affinity.kind}-{c.k}-{c.capacity_factor}-{c.priority}-{c.combine}",
)
def test_layer_is_its_definition(config):
    """Sum of weight * expert(token) over a token's seated choices: softmax, then top-k, not renormalised.
    A Sinkhorn plan seats the tokens; the softmax weighs outputs, or the plan if combine='affinity'."""
    G, S, E = 3, 10, 4
    layer, x = build_layer(config), 2 * randn(G, S, 8)
    logits = x @ layer.router.gate_DE
    gates = affinity = logits.softmax(-1)
    if config.affinity.kind == "sinkhorn":
        affinity, _ = sinkhorn_plan(logits, torch.ones(G, S), config.affinity.iterations)
    weights = affinity if config.combine == "affinity" else gates
    every, C = every_expert(layer, x), round(S * config.k * config.capacity_factor / E)
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


def test_a_gate_that_underflows_is_chosen_weighs_nothing_and_takes_a_seat():
    """Logits 200, 0, 0: the second choice has gate 0 in float32, and is the lowest of the zeros."""
    router = gate_router(TokenChoiceConfig(k=2, capacity_factor=3.0), [[200.0, 0.0, 0.0]])
    routing = router(torch.ones(1, 2, 1), torch.ones(1, 2))
    assert routing.token_GEC[0, :, :2].tolist() == [[0, 1], [0, 1], [2, 2]]
    assert routing.weight_GEC[0, :, :2].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_priority_sorts_by_the_noisy_gates_of_the_whole_group():
    """With noise, seats are those of algorithm 2 for the gates of the routing."""
    router = build_router(TokenChoiceConfig(k=2, capacity_factor=0.5, priority="max", noise_std=20.0))
    x, ones = randn(2, 12, 8), torch.ones(2, 12)
    routing, still = router(x, ones, keys(2, 12)), router(x, ones)
    expected = [
        algorithm(gates, [1.0] * 12, k=2, capacity=3, priority="max") for gates in routing.gates_GSE.tolist()
    ]
    assert routing.token_GEC.tolist() == expected
    assert not torch.equal(routing.token_GEC, still.token_GEC)


def test_load_counts_demand():
    """Six tokens choose expert 0 and two expert 1: mean 4, deviation 2, though each seats two."""
    router = gate_router(TokenChoiceConfig(capacity_factor=0.5), [[1.0, -1.0]])
    routing = router(torch.tensor([1.0, 1, 1, -1, 1, -1, 1, 1]).view(1, 8, 1), torch.ones(1, 8))
    assert routing.load_GE.tolist() == [[6, 2]]
    assert routing.stats["load_cv"].item() == pytest.approx(2 / 4)
    assert routing.stats["dropped_frac"].item() == pytest.approx(4 / 8)


def test_a_sinkhorn_plan_balances_what_the_softmax_does_not():
    """All tokens prefer expert 0, and the softmax sends all to it. The plan's rows still sum to 1, its
    columns to 8 / 2, so only the four with the largest preference stay."""
    x, ones = torch.linspace(1, 2, 8).view(1, 8, 1), torch.ones(1, 8)
    softmax, sinkhorn = (
        gate_router(TokenChoiceConfig(capacity_factor=1.0, **fields), [[3.0, -3.0]])(x, ones)
        for fields in ({}, {"affinity": SinkhornConfig(iterations=200)})
    )
    assert softmax.load_GE.tolist() == [[8, 0]]
    assert sinkhorn.load_GE.tolist() == [[4, 4]]
    assert sinkhorn.token_GEC.tolist() == [[[4, 5, 6, 7], [0, 1, 2, 3]]]
    torch.testing.assert_close(sinkhorn.weight_GEC[0, 0], softmax.gates_GSE[0, 4:, 0])
    assert sinkhorn.stats["transport_residual"] < 1e-4
    assert softmax.stats["transport_residual"] == 0


def test_no_gradient_goes_through_a_plan_that_only_chooses():
    """The gradient is that of the gates at the seated pairs."""
    router = build_router(TokenChoiceConfig(affinity=SinkhornConfig(), importance_weight=0.0))
    x = randn(2, 8, 8)
    routing = router(x, torch.ones(2, 8))
    routing.weight_GEC.sum().backward()
    seated = torch.zeros(2, 8 + 1, 4).scatter(1, routing.token_GEC.transpose(1, 2), 1.0)[:, :8]
    expected = torch.autograd.grad(((x @ router.gate_DE).softmax(-1) * seated).sum(), router.gate_DE)[0]
    torch.testing.assert_close(router.gate_DE.grad, expected)
    assert expected.abs().max() > 0.01


def test_config_errors():
    for name in ("noise_std", "importance_weight", "load_weight", "balance_weight", "z_weight"):
        with pytest.raises(ValueError, match=f"{name} must not be negative, got -0.5"):
            TokenChoiceConfig(**{name: -0.5})
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        TokenChoiceConfig(k=0)
    with pytest.raises(ValueError, match="capacity_multiple_of must be at least 1, got 0"):
        TokenChoiceConfig(capacity_multiple_of=0)
    with pytest.raises(ValueError, match="k=5 exceeds num_experts=4"):
        TokenChoiceConfig(k=5).slots(num_tokens=16, num_experts=4)


@pytest.mark.parametrize("noise", [False, True])
def test_aux_is_the_weighted_sum_of_the_losses(noise):
    """Importance and z use clean logits, balance the noisy gates, load both."""
    weights = {"importance_weight": 0.3, "load_weight": 0.2, "balance_weight": 0.7, "z_weight": 0.11}
    x, valid = randn(3, 16, 8), torch.ones(3, 16)
    valid[1, 5:] = 0
    keys_GS = keys(3, 16)

    def routed(**fields):
        router = build_router(TokenChoiceConfig(k=2, noise_std=2.0, **fields))
        return router(x, valid, keys_GS if noise else None), x @ router.gate_DE

    routing, logits = routed(**weights)
    expected = 0.3 * importance_loss(logits.softmax(-1), valid)
    expected = expected + 0.7 * balance_loss(routing.gates_GSE, valid) + 0.11 * z_loss(logits, valid)
    if noise:
        noisy = logits + 2.0 / 4 * gaussian(split(keys_GS, 4))
        expected = expected + 0.2 * load_loss(logits, noisy, valid, k=2, std=2.0 / 4)
        torch.testing.assert_close(noisy.softmax(-1), routing.gates_GSE)
    torch.testing.assert_close(routing.aux_G, expected)
    for name, weight in weights.items():
        alone = routed(**dict.fromkeys(weights, 0.0) | {name: weight})[0].aux_G
        assert alone.eq(0).all() == (name == "load_weight" and not noise), name
    assert routed(**dict.fromkeys(weights, 0.0))[0].aux_G.eq(0).all()


def test_flip_frac_is_the_share_of_choices_that_noise_changes_and_grows_with_it():
    """The mean over groups of each group's share; padding has no choices."""
    x, keys_GS, valid = randn(4, 64, 8), keys(4, 64), torch.ones(4, 64)
    valid[0, 20:] = 0
    seen = []
    for std in (0.0, 0.01, 1.0, 5.0, 100.0):
        router = build_router(TokenChoiceConfig(k=2, noise_std=std), num_experts=8)
        routing = router(x, valid, keys_GS)
        clean, noisy = (top_experts(a, 2).tolist() for a in (x @ router.gate_DE, routing.gates_GSE))
        shares = []
        for g, count in enumerate((20, 64, 64, 64)):
            lost = sum(len(set(clean[g][s]) - set(noisy[g][s])) for s in range(count))
            shares.append(lost / (2 * count))
        assert routing.stats["flip_frac"].item() == pytest.approx(sum(shares) / 4)
        assert router(x, valid).stats["flip_frac"] == 0
        seen.append(routing.stats["flip_frac"].item())
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1 - 2 / 8, abs=0.08)  # random choices


def test_flip_frac_of_a_plan_counts_the_plans_choices():
    config = TokenChoiceConfig(capacity_factor=8.0, noise_std=3.0, affinity=SinkhornConfig())
    router, x, ones = build_router(config, num_experts=8), 0.5 + randn(1, 64, 8), torch.ones(1, 64)
    noisy, clean = router(x, ones, keys(1, 64)), router(x, ones)
    seats = [
        {(e, s) for e, row in enumerate(routing.token_GEC[0].tolist()) for s in row if s < 64}
        for routing in (noisy, clean)
    ]
    assert noisy.stats["flip_frac"].item() == pytest.approx(1 - len(seats[0] & seats[1]) / 64)
