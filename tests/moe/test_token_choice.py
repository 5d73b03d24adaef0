"""Token choice: seats by hand and by V-MoE's algorithms, the layer against its definition, noise, losses."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from moe.init import gaussian, mix, split
from moe.routers import TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, sinkhorn_plan
from moe.routers.token_choice import (
    fill_slots,
    gshard_loss,
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
        TokenChoiceConfig(k=2, capacity_factor=0.5, priority="sum"),
        TokenChoiceConfig(k=2, capacity_factor=0.5, priority="max", noise_std=20.0),
        TokenChoiceConfig(k=2, capacity_factor=0.5, affinity=SinkhornConfig(), priority="max"),
        TokenChoiceConfig(k=2, capacity_factor=0.5, affinity=SinkhornConfig(), combine="affinity"),
    ],
    ids=lambda c: f"{c.affinity.kind}-{c.k}-{c.capacity_factor}-{c.priority}-{c.combine}",
)
def test_layer_is_its_definition(config):
    """Sum of weight * expert(token) over a token's seated choices: softmax, then top-k, not renormalised.
    A Sinkhorn plan seats the tokens; the softmax weighs outputs, or the plan if combine='affinity'. The noise
    of the logits has standard deviation noise_std / E. Load counts demand, whatever the capacity."""
    G, S, E = 3, 10, 4
    layer, x, keys_B = build_layer(config), 2 * randn(G, S, 8), torch.arange(G)
    noise = gaussian(split(split(mix(keys_B, 0), S), E))
    logits = x @ layer.router.gate_DE + config.noise_std / E * noise
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
    got, routing = layer(x, torch.ones(G), keys_B)
    torch.testing.assert_close(got, expected)
    demand = torch.zeros(G, S, E).scatter(-1, affinity.argsort(descending=True)[..., : config.k], 1.0)
    assert torch.equal(routing.load_GE, demand.sum(1))
    assert routing.stats["dropped_frac"].item() == pytest.approx(dropped / (G * S))
    assert (dropped > 0) == (config.capacity_factor < 1), "the cases must cover dropping and not dropping"


def test_a_gate_that_underflows_is_chosen_weighs_nothing_and_takes_a_seat():
    """Logits 200, 0, 0: the second choice has gate 0 in float32, and is the lowest of the zeros."""
    router = gate_router(TokenChoiceConfig(k=2, capacity_factor=3.0), [[200.0, 0.0, 0.0]])
    routing = router(torch.ones(1, 2, 1), torch.ones(1, 2))
    assert routing.token_GEC[0, :, :2].tolist() == [[0, 1], [0, 1], [2, 2]]
    assert routing.weight_GEC[0, :, :2].tolist() == [[1, 1], [0, 0], [0, 0]]


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
    assert softmax.stats["load_cv"] == 1
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


@pytest.mark.parametrize("noise", [False, True])
def test_aux_is_the_weighted_sum_of_the_losses(noise):
    """Importance and z use clean logits, GShard's the noisy gates, load both."""
    weights = {"importance_weight": 0.3, "load_weight": 0.2, "gshard_balance_weight": 0.7, "z_weight": 0.11}
    x, valid = randn(3, 16, 8), torch.ones(3, 16)
    valid[1, 5:] = 0
    keys_GS = keys(3, 16)

    def routed(**fields):
        router = build_router(TokenChoiceConfig(k=2, noise_std=2.0, **fields))
        return router(x, valid, keys_GS if noise else None), x @ router.gate_DE

    routing, logits = routed(**weights)
    expected = 0.3 * importance_loss(logits.softmax(-1), valid)
    expected = expected + 0.7 * gshard_loss(routing.gates_GSE, valid) + 0.11 * z_loss(logits, valid)
    if noise:
        noisy = logits + 2.0 / 4 * gaussian(split(keys_GS, 4))
        expected = expected + 0.2 * load_loss(logits, noisy, valid, k=2, std=2.0 / 4)
        torch.testing.assert_close(noisy.softmax(-1), routing.gates_GSE)
    torch.testing.assert_close(routing.aux_G, expected)
    for name, weight in weights.items():
        alone = routed(**dict.fromkeys(weights, 0.0) | {name: weight})[0].aux_G
        assert alone.eq(0).all() == (name == "load_weight" and not noise), name
    assert routed(**dict.fromkeys(weights, 0.0))[0].aux_G.eq(0).all()


LOSSES = {
    "importance": lambda logits, valid: importance_loss(logits.softmax(-1), valid),
    "load": lambda logits, valid: load_loss(logits, logits, valid, k=2, std=0.3),
    "balance": lambda logits, valid: gshard_loss(logits.softmax(-1), valid),
    "z": z_loss,
}


def chance(z: float) -> float:
    """P(N(0, 1) > z)."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_losses_by_hand():
    """Importance: columns sum to 1.2 and 0.8, mean 1, deviation (of the population) 0.2. Balance: first
    choices 0, 0, 1 of three tokens, mean gates 0.6 and 0.4. z: the mean of the squared log-sum-exps."""
    gates = torch.tensor([[[0.9, 0.1], [0.3, 0.7]]])
    assert importance_loss(gates, torch.ones(1, 2)).tolist() == pytest.approx([0.04])
    gates = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]])
    assert gshard_loss(gates, torch.ones(1, 3)).tolist() == pytest.approx([2 * (2 / 3 * 0.6 + 1 / 3 * 0.4)])
    logits = torch.tensor([[[0.0, 0.0], [3.0, 3.0]]])
    expected = (math.log(2) ** 2 + (3 + math.log(2)) ** 2) / 2
    assert z_loss(logits, torch.ones(1, 2)).tolist() == pytest.approx([expected])


def test_load_by_hand():
    """Two tokens, two experts, k=1, std 1/2. Token 0 has clean logits (1, 0) and noisy logits (0.8, 0.5): the
    threshold is 0.8, the probabilities P(z > -0.4), P(z > 1.6). Token 1: (0, 0), (0.1, -0.3): P(z > 0.2)
    twice. With two choices the second largest logit, 0.2, is the threshold, for the winners too.
    """
    clean = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    noisy = torch.tensor([[[0.8, 0.5], [0.1, -0.3]]])
    chances = torch.tensor([[[chance(-0.4), chance(1.6)], [chance(0.2), chance(0.2)]]])
    got = load_loss(clean, noisy, torch.ones(1, 2), k=1, std=0.5)
    torch.testing.assert_close(got, importance_loss(chances, torch.ones(1, 2)))
    clean, noisy = torch.tensor([[[0.0, 0.3, 0.1]]]), torch.tensor([[[0.2, 0.4, -0.1]]])
    chances = torch.tensor([[[chance(0.2), chance(-0.1), chance(0.1)]]])
    got = load_loss(clean, noisy, torch.ones(1, 1), k=2, std=1.0)
    torch.testing.assert_close(got, importance_loss(chances, torch.ones(1, 1)))


def test_bounds_of_losses():
    """Perfect balance: importance 0, balance 1. All gates select one expert: E - 1 and E."""
    for first, importance, balance in ((torch.arange(8) % 4, 0, 1), (torch.full((8,), 3), 3, 4)):
        gates = F.one_hot(first, 4).float().unsqueeze(0)
        assert importance_loss(gates, torch.ones(1, 8)).tolist() == pytest.approx([importance])
        assert gshard_loss(gates, torch.ones(1, 8)).tolist() == pytest.approx([balance])


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_padding_and_other_groups_do_not_count(loss):
    """The mask may be bfloat16, as in a bfloat16 model, where 257 valid tokens could not be counted. A group
    of padding costs nothing. Equal logits have a finite gradient (a deviation's is 0 / 0)."""
    logits, valid = randn(3, 300, 4), torch.ones(3, 300)
    valid[:, 257:], valid[2], logits[1] = 0, 0, 0
    logits.requires_grad_()
    losses = loss(logits, valid.bfloat16())
    torch.testing.assert_close(losses[:2], loss(logits[:2, :257], torch.ones(2, 257)))
    torch.testing.assert_close(losses[1:], loss(logits[1:], valid[1:]))
    assert losses[2] == 0
    loss(logits, valid).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[valid == 0].eq(0).all()
    assert logits.grad[0, :257].abs().sum() > 0


def test_topk_before_the_softmax_is_a_softmax_over_the_chosen_logits():
    x, gate = torch.randn(2, 6, 5), torch.randn(5, 4)
    before, after = (
        gate_router(TokenChoiceConfig(k=2, capacity_factor=4.0, noise_std=0.0, topk=topk), gate.tolist())
        for topk in ("before", "after")
    )
    logits = x @ gate
    values, experts = logits.topk(2)
    expected = torch.zeros_like(logits).scatter(-1, experts, values.softmax(-1))
    routing, other = before(x, torch.ones(2, 6)), after(x, torch.ones(2, 6))
    assert torch.equal(routing.token_GEC, other.token_GEC)
    weights = torch.zeros(2, 4, 7).scatter(2, routing.token_GEC, routing.weight_GEC)[..., :6].transpose(1, 2)
    torch.testing.assert_close(weights, expected)


def test_padding_in_no_plan_makes_no_output_nan():
    """Its row of the plan is zero, and no sum to divide by; empty slots get their weight from it."""
    config = TokenChoiceConfig(
        k=2, topk="before", affinity=SinkhornConfig(), combine="affinity", capacity_factor=4.0
    )
    valid = torch.ones(2, 6)
    valid[:, 4:] = 0
    routing = build_router(config)(randn(2, 6, 8), valid)
    assert (routing.token_GEC == 6).any()
    torch.testing.assert_close(routing.weight_GEC.sum((1, 2)), torch.full((2,), 4.0))
