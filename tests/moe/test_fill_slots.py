"""Who sits where: algorithms 1 and 2 of V-MoE, by hand and as loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.routers.token_choice import fill_slots, queue_priority, top_experts


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


def test_a_dropped_first_choice_promotes_nothing():
    """Expert 0 seats one. Token 1's first choice is lost; its second still queues behind all first ones:
    expert 1 seats token 2, who came first there, and not token 1."""
    expert_GSK = torch.tensor([[[0, 1], [0, 1], [1, 0]]])
    token_GEC = fill_slots(expert_GSK, torch.ones(1, 3), num_experts=2, capacity=1)
    assert token_GEC.tolist() == [[[0], [2]]]


def test_padding_queues_for_no_expert():
    """Token 0 is padding: the last comer finds a seat."""
    expert_GSK = torch.tensor([[[0], [0], [1], [0]]])
    token_GEC = fill_slots(expert_GSK, torch.tensor([[0.0, 1, 1, 1]]), num_experts=2, capacity=2)
    assert token_GEC.tolist() == [[[1, 3], [2, 4]]]


def test_padding_of_high_priority_queues_for_no_expert():
    expert_GSK, priority_GS = torch.tensor([[[0], [0], [0]]]), torch.tensor([[9.0, 1.0, 2.0]])
    valid_GS = torch.tensor([[0.0, 1, 1]])
    token_GEC = fill_slots(expert_GSK, valid_GS, priority_GS, num_experts=1, capacity=1)
    assert token_GEC.tolist() == [[[2]]]


@pytest.mark.parametrize(
    ("priority", "seats"),
    [
        ("none", [[0, 1], [0, 1]]),  # as they come
        ("max", [[2, 3], [2, 3]]),  # largest gates 0.45, 0.5, 0.6, 0.55: tokens 2, 3, 1, 0
        ("sum", [[0, 2], [0, 2]]),  # sums of two 0.9, 0.7, 0.8, 0.75: tokens 0, 2, 3, 1
    ],
)
def test_priority_by_hand(priority, seats):
    """All four want experts 0 and 1, in this order; both seat two."""
    gates_GSE = torch.tensor([[[0.45, 0.45, 0.1], [0.5, 0.2, 0.3], [0.6, 0.2, 0.2], [0.55, 0.2, 0.25]]])
    expert_GSK = torch.tensor([[[0, 1]] * 4])
    priority_GS = queue_priority(gates_GSE, expert_GSK, priority)
    token_GEC = fill_slots(expert_GSK, torch.ones(1, 4), priority_GS, num_experts=3, capacity=2)
    assert token_GEC.tolist() == [[*seats, [4, 4]]]


def test_equal_priority_leaves_the_order_of_tokens():
    expert_GSK, priority_GS = torch.zeros(1, 50, 1, dtype=torch.long), torch.tensor([[0.5] * 49 + [0.6]])
    token_GEC = fill_slots(expert_GSK, torch.ones(1, 50), priority_GS, num_experts=1, capacity=50)
    assert token_GEC.tolist() == [[[49, *range(49)]]]


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


@settings(max_examples=300)
@given(
    G=st.integers(1, 3),
    S=st.integers(1, 9),
    E=st.integers(1, 5),
    k=st.integers(1, 5),
    capacity=st.integers(1, 12),
    priority=st.sampled_from(["none", "max", "sum"]),
    levels=st.sampled_from([1, 2, 4, 1024]),
    seed=st.integers(0, 2**31),
)
def test_seats_are_those_of_algorithms_1_and_2(G, S, E, k, capacity, priority, levels, seed):
    """Affinities are multiples of 1/1024, so that sums are exact; of one level all tie. Capacity may exceed
    what queues, and a quarter of the tokens is padding."""
    g = torch.Generator().manual_seed(seed)
    affinity_GSE = torch.randint(0, levels, (G, S, E), generator=g) / 1024
    valid_GS = torch.randint(0, 4, (G, S), generator=g).clamp(max=1).float()
    k = min(k, E)
    expert_GSK = top_experts(affinity_GSE, k)
    priority_GS = queue_priority(affinity_GSE, expert_GSK, priority)
    got = fill_slots(expert_GSK, valid_GS, priority_GS, num_experts=E, capacity=capacity)
    expected = [
        algorithm(affinity, valid, k=k, capacity=capacity, priority=priority)
        for affinity, valid in zip(affinity_GSE.tolist(), valid_GS.tolist(), strict=True)
    ]
    assert got.tolist() == expected
