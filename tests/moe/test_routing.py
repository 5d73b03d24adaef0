"""Dispatch and combine of seats by hand, and each logged statistic by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe.routing import GatherRouting, SoftRouting, routing_stats

X = torch.tensor([[[1.0], [2.0], [3.0]], [[10.0], [20.0], [30.0]]])  # two groups of three tokens, D = 1
TOKENS = torch.tensor([[[2, 0], [0, 3]], [[1, 3], [3, 3]]])  # two experts, two slots per group; 3 is empty


# Fields that dispatch and combine ignore, except for the shape of the gates.
REST = {"gates_GSE": torch.zeros(2, 3, 2), "load_GE": torch.zeros(2, 2), "aux_G": torch.zeros(2), "stats": {}}


def test_gather_dispatches_expert_major_and_empty_slots_are_zero():
    """Slots of a group are adjacent. A token that sits twice gets two gradients, an unseated token none."""
    x = X.clone().requires_grad_()
    routing = GatherRouting(token_GEC=TOKENS, weight_GEC=torch.zeros(2, 2, 2), **REST)
    x_END = routing.dispatch(x)
    assert x_END.squeeze(-1).tolist() == [[3, 1, 20, 0], [1, 0, 0, 0]]
    x_END.sum().backward()
    assert x.grad.squeeze(-1).tolist() == [[2, 0, 1], [0, 1, 0]]


def test_gather_combines_by_weight_and_adds_up():
    """Token 0 of group 0 sits with both experts: 0.5 * 2 + 0.25 * 100. Outputs of empty slots are ignored."""
    weight_GEC = torch.tensor([[[1.0, 0.5], [0.25, 0.0]], [[2.0, 0.0], [0.0, 0.0]]])
    routing = GatherRouting(token_GEC=TOKENS, weight_GEC=weight_GEC, **REST)
    y_END = torch.tensor([[[1.0], [2.0], [3.0], [7.0]], [[100.0], [7.0], [7.0], [7.0]]])
    assert routing.combine(y_END).squeeze(-1).tolist() == [[26, 0, 1], [0, 6, 0]]


def example(**fields) -> dict[str, float]:
    """Statistics of two groups of two tokens with two experts; the last token is padding."""
    case = {
        "gates_GSE": torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.9, 0.1]]]),
        "load_GE": torch.tensor([[2, 0], [1, 1]]),
        "chosen_GS": torch.tensor([[1, 1], [0, 0]]),
        "seats_GS": torch.tensor([[1, 0], [2, 5]]),
        "valid_GS": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    }
    return {name: value.item() for name, value in routing_stats(**case | fields).items()}


def test_stats_by_hand():
    """No expert chooses the third of three real tokens, and the second has no seat; seats are 1, 0, 2. Loads
    are (2, 0), with mean 1 and deviation 1, and (1, 1). Two tokens have entropy ln 2, the
    other 0."""
    assert example() == pytest.approx(
        {
            "unchosen_frac": 1 / 3,
            "dropped_frac": 1 / 3,
            "load_mean": 1,
            "load_cv": (1 + 0) / 2,
            "load_min": (0 + 1) / 2,
            "load_max": (2 + 1) / 2,
            "max_violation": ((2 / 1 - 1) + (1 / 1 - 1)) / 2,
            "seats_mean": 1,
            "seats_max": (1 + 2) / 2,
            "gate_entropy_nats": 2 / 3 * math.log(2),
            "flip_frac": 0,
            "transport_residual": 0,
            "slot_similarity": 0,
            "bias_range": 0,
            "open_frac": (1 + 1 + 0) / 3 / 2,
        }
    )


OF_GROUPS = {
    "flip_G": "flip_frac",
    "residual_G": "transport_residual",
    "slot_similarity_G": "slot_similarity",
}


def test_groups_of_padding_are_left_out():
    """Values of groups are averaged; if group 1 consists of padding, its loads, seats and values do not
    count."""
    for argument, name in OF_GROUPS.items():
        assert example(**{argument: torch.tensor([0.2, 0.6])})[name] == pytest.approx(0.4)
    values = {argument: torch.tensor([0.3, 0.9]) for argument in OF_GROUPS}
    stats = example(valid_GS=torch.tensor([[1.0, 1.0], [0.0, 0.0]]), **values)
    assert stats["load_cv"] == pytest.approx(1)
    assert stats["load_max"] == 2
    assert stats["max_violation"] == 1
    assert stats["seats_max"] == 1
    assert stats["dropped_frac"] == pytest.approx(1 / 2)
    assert [stats[name] for name in OF_GROUPS.values()] == pytest.approx([0.3] * 3)
    assert set(example(valid_GS=torch.zeros(2, 2), flip_G=torch.ones(2)).values()) == {0.0}


def test_stats_count_exactly_under_a_bfloat16_mask():
    """A bfloat16 model has a bfloat16 mask; 257 is not a bfloat16."""
    valid = torch.ones(1, 300, dtype=torch.bfloat16)
    valid[:, 257:] = 0
    seats = torch.zeros(1, 300, dtype=torch.long)
    seats[:, :1] = 257
    stats = routing_stats(
        gates_GSE=torch.full((1, 300, 2), 0.5),
        load_GE=torch.tensor([[257, 259]]),
        chosen_GS=seats,
        seats_GS=seats,
        valid_GS=valid,
    )
    assert stats["dropped_frac"].item() == pytest.approx(256 / 257)
    assert stats["seats_mean"].item() == pytest.approx(1)
    assert stats["seats_max"].item() == 257
    assert stats["load_mean"].item() == 258


def copies_of(function: Callable[[], torch.Tensor]) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors that a call copies."""
    shapes = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
                shapes.append(tuple(output.shape))
            return output

    with Copies():
        function()
    return shapes


@pytest.mark.parametrize("slots", [1, 2])
def test_soft_routing_copies_slots_only_where_an_expert_has_several(slots):
    """Slots of a group are not adjacent in the buffer of an expert; the weights are never copied."""
    G, S, E, D = 4, 9, 3, 8
    weight = torch.rand(G, S, E, slots)
    routing = SoftRouting(
        gates_GSE=weight[..., 0], aux_G=torch.zeros(G), dispatch_GSEC=weight, combine_GSEC=weight
    )
    x_GSD, y_END = torch.rand(G, S, D), torch.rand(E, G * slots, D)
    expected = [] if slots == 1 else [(E, G, slots, D)]
    assert [sorted(shape) for shape in copies_of(lambda: routing.dispatch(x_GSD))] == [*map(sorted, expected)]
    assert [sorted(shape) for shape in copies_of(lambda: routing.combine(y_END))] == [*map(sorted, expected)]
