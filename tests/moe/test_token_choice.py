"""Token choice: seats by hand and against algorithm 1, the layer against its definition, the losses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.init import init_weights
from moe.layer import MoEConfig, MoELayer
from moe.routers import TokenChoiceConfig, build_router
from moe.routers.capacity import slots_per_expert
from moe.routers.losses import importance_loss
from moe.routers.token_choice import fill_slots


def test_fill_slots_by_hand():
    """Three tokens want expert 0, which seats two; the last comer is dropped."""
    expert_GSK = torch.tensor([[[0], [0], [1], [0]]])
    token_GEC = fill_slots(expert_GSK, torch.ones(1, 4), num_experts=2, capacity=2)
    assert token_GEC.tolist() == [[[0, 1], [2, 4]]]  # 4 = S marks an empty slot


def test_first_choices_sit_before_second_ones():
    """Tokens 1 and 3 choose expert 0 first, so they sit before token 0, whose second choice it is."""
    expert_GSK = torch.tensor([[[1, 0], [0, 1], [1, 0], [0, 1]]])
    token_GEC = fill_slots(expert_GSK, torch.ones(1, 4), num_experts=2, capacity=3)
    assert token_GEC.tolist() == [[[1, 3, 0], [0, 2, 1]]]


def test_padding_queues_for_no_expert():
    """Token 0 is padding: the last comer finds a seat."""
    expert_GSK = torch.tensor([[[0], [0], [1], [0]]])
    token_GEC = fill_slots(expert_GSK, torch.tensor([[0.0, 1, 1, 1]]), num_experts=2, capacity=2)
    assert token_GEC.tolist() == [[[1, 3], [2, 4]]]


def algorithm_1(expert_GSK: Tensor, valid_GS: Tensor, num_experts: int, capacity: int) -> list:
    """V-MoE, algorithm 1, as printed: for every choice, for every token."""
    G, S, K = expert_GSK.shape
    token_GEC = [[[S] * capacity for _ in range(num_experts)] for _ in range(G)]
    for g in range(G):
        taken = [0] * num_experts
        for k in range(K):
            for s in range(S):
                e = int(expert_GSK[g, s, k])
                if valid_GS[g, s] and taken[e] < capacity:
                    token_GEC[g][e][taken[e]] = s
                    taken[e] += 1
    return token_GEC


@settings(deadline=None, max_examples=150)
@given(
    G=st.integers(1, 3),
    S=st.integers(1, 9),
    E=st.integers(1, 5),
    k=st.integers(1, 5),
    capacity=st.integers(1, 12),
    levels=st.sampled_from([1, 2, 1000]),
    seed=st.integers(0, 2**31),
)
def test_fill_slots_is_algorithm_1(G, S, E, k, capacity, levels, seed):
    g = torch.Generator().manual_seed(seed)
    affinity = torch.randint(0, levels, (G, S, E), generator=g)  # one level: all tie
    expert_GSK = affinity.argsort(dim=-1, descending=True, stable=True)[..., : min(k, E)]
    valid = torch.randint(0, 4, (G, S), generator=g).clamp(max=1).float()
    got = fill_slots(expert_GSK, valid, num_experts=E, capacity=capacity)
    assert got.tolist() == algorithm_1(expert_GSK, valid, E, capacity)


@pytest.mark.parametrize(("k", "factor"), [(1, 0.5), (1, 1.0), (2, 0.6), (3, 1.0), (4, 9.0)])
def test_layer_is_its_definition(k, factor):
    """Sum of gate * expert(token) over a token's seated choices: softmax, then top-k, not renormalised."""
    G, S, D, E = 3, 10, 6, 4
    config = TokenChoiceConfig(k=k, capacity_factor=factor)
    layer = MoELayer(MoEConfig(num_experts=E, router=config), dim=D, hidden=16)
    init_weights(layer, seed=0)
    x = 2 * torch.randn(G, S, D, generator=torch.Generator().manual_seed(0))
    gates = (x @ layer.router.gate_DE).softmax(-1)
    every = layer.experts(x.reshape(1, G * S, D).expand(E, -1, -1)).unflatten(1, (G, S))
    order = [[sorted(range(E), key=lambda e, p=p: -p[e]) for p in group] for group in gates.tolist()]
    expected, dropped = torch.zeros_like(x), 0
    for g in range(G):
        room = [round(S * k * factor / E)] * E
        seats = [0] * S
        for choice in range(k):
            for s in range(S):
                e = order[g][s][choice]
                if room[e] > 0:
                    room[e] -= 1
                    seats[s] += 1
                    expected[g, s] = expected[g, s] + gates[g, s, e] * every[e, g, s]
        dropped += seats.count(0)
    got, routing = layer(x, torch.ones(G))
    torch.testing.assert_close(got, expected)
    assert routing.stats["dropped_frac"].item() == pytest.approx(dropped / (G * S))
    assert (dropped > 0) == (k < 3), "the cases must cover dropping and not dropping"


def test_ties_go_to_the_lower_expert():
    router = build_router(TokenChoiceConfig(k=2, capacity_factor=9.0), dim=3, num_experts=20)
    torch.nn.init.zeros_(router.gate_DE)
    token_GEC = router(torch.randn(1, 5, 3), torch.ones(1, 5)).token_GEC
    assert [e for e in range(20) if (token_GEC[0, e] < 5).any()] == [0, 1]


def test_tokens_that_come_first_are_seated():
    """The vanilla order of V-MoE section 2.4; batch priority is another router's business."""
    router = build_router(TokenChoiceConfig(capacity_factor=0.5), dim=2, num_experts=2)
    with torch.no_grad():
        router.gate_DE.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    x = torch.tensor([[[1.0, 0], [2, 0], [3, 0], [4, 0], [5, 0], [6, 0], [7, 0], [8, 0]]])
    assert router(x, torch.ones(1, 8)).token_GEC.tolist() == [[[0, 1], [8, 8]]]


def test_empty_slots_weigh_nothing():
    router = build_router(TokenChoiceConfig(capacity_factor=2.0), dim=3, num_experts=4)
    init_weights(router, seed=0)
    routing = router(torch.randn(2, 8, 3), torch.ones(2, 8))
    assert torch.equal(routing.weight_GEC == 0, routing.token_GEC == 8)


def test_load_counts_demand():
    """Six tokens want expert 0 and two expert 1: mean 4, deviation 2, though two are seated at each."""
    router = build_router(TokenChoiceConfig(capacity_factor=0.5), dim=1, num_experts=2)
    with torch.no_grad():
        router.gate_DE.copy_(torch.tensor([[1.0, -1.0]]))
    x = torch.tensor([1.0, 1, 1, -1, 1, -1, 1, 1]).view(1, 8, 1)
    stats = router(x, torch.ones(1, 8)).stats
    assert stats["load_cv"].item() == pytest.approx(2 / 4)
    assert stats["dropped_frac"].item() == pytest.approx(4 / 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be positive, got 0.0"),
        ({"capacity_factor": -1.0}, "capacity_factor must be positive, got -1.0"),
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


def test_no_capacity_is_an_error_that_names_the_bound():
    with pytest.raises(ValueError, match=r"capacity_factor=0.25 leaves no slot.*use more than 0.25"):
        slots_per_expert(16, 8, 0.25)  # 0.5 rounds to even, 0
    assert slots_per_expert(16, 8, 0.2501) == 1


def test_importance_loss_is_zero_at_balance_and_E_minus_1_at_collapse():
    E, valid = 4, torch.ones(2, 8)
    uniform = torch.full((2, 8, E), 1 / E)
    collapsed = torch.nn.functional.one_hot(torch.tensor([[0] * 8, [3] * 8]), E).float()
    one_hot_balanced = torch.nn.functional.one_hot(torch.arange(16).view(2, 8) % E, E).float()
    torch.testing.assert_close(importance_loss(uniform, valid), torch.zeros(2))
    torch.testing.assert_close(importance_loss(one_hot_balanced, valid), torch.zeros(2))
    torch.testing.assert_close(importance_loss(collapsed, valid), torch.full((2,), E - 1.0))


def test_importance_loss_leaves_padding_out():
    gates = torch.rand(2, 8, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    valid = torch.tensor([[1.0] * 5 + [0] * 3] * 2)
    torch.testing.assert_close(importance_loss(gates, valid), importance_loss(gates[:, :5], torch.ones(2, 5)))


def test_importance_loss_has_a_gradient_at_zero_variance():
    gates = torch.full((1, 8, 4), 0.25, requires_grad=True)
    importance_loss(gates, torch.ones(1, 8)).sum().backward()
    torch.testing.assert_close(gates.grad, torch.zeros(1, 8, 4))


def test_aux_is_the_weighted_importance_loss():
    x, valid, aux = torch.randn(3, 16, 8), torch.ones(3, 16), {}
    valid[1, 5:] = 0
    for weight in (0.0, 0.005, 0.01):
        router = build_router(TokenChoiceConfig(importance_weight=weight), dim=8, num_experts=4)
        init_weights(router, seed=0)
        aux[weight] = router(x, valid).aux_G
        gates = (x @ router.gate_DE).softmax(-1)
        torch.testing.assert_close(aux[weight], weight * importance_loss(gates, valid))
    assert aux[0.0].eq(0).all()
    assert aux[0.005].gt(0).all()
