"""What is logged about a routing, each number by hand."""

import math

import pytest
import torch
from torch import Tensor

from moe.routers.soft import mean_cosine
from moe.routing import routing_stats


def example(**fields) -> dict[str, float]:
    """Two groups of two tokens, two experts; the last token is padding."""
    case = {
        "gates_GSE": torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.9, 0.1]]]),
        "load_GE": torch.tensor([[2, 0], [1, 1]]),
        "chosen_GS": torch.tensor([[1, 1], [0, 0]]),
        "seats_GS": torch.tensor([[1, 0], [2, 5]]),
        "valid_GS": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    }
    return {name: value.item() for name, value in routing_stats(**case | fields).items()}


def test_tokens_by_hand():
    """Of three real tokens one is chosen by nobody, one sits nowhere; seats are 1, 0, 2."""
    stats = example()
    assert stats["unchosen_frac"] == pytest.approx(1 / 3)
    assert stats["dropped_frac"] == pytest.approx(1 / 3)
    assert stats["seats_mean"] == pytest.approx(1)
    assert stats["seats_max"] == pytest.approx((1 + 2) / 2)  # the mean over groups


def test_load_by_hand():
    """Group 0 has loads (2, 0): mean 1, deviation 1; group 1 (1, 1)."""
    stats = example()
    assert stats["load_mean"] == 1
    assert stats["load_cv"] == pytest.approx((1 + 0) / 2)
    assert stats["load_min"] == pytest.approx((0 + 1) / 2)
    assert stats["load_max"] == pytest.approx((2 + 1) / 2)


def test_entropy_by_hand():
    """Two tokens are undecided between two experts, ln 2 each; one has decided: 0, not NaN."""
    assert example()["gate_entropy_nats"] == pytest.approx(2 / 3 * math.log(2))


def test_what_a_router_has_not_is_zero():
    stats = example()
    assert stats["flip_frac"] == stats["transport_residual"] == stats["slot_similarity"] == 0


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("flip_G", "flip_frac"),
        ("residual_G", "transport_residual"),
        ("slot_similarity_G", "slot_similarity"),
    ],
)
def test_group_values_are_averaged_over_groups(argument, name):
    assert example(**{argument: torch.tensor([0.2, 0.6])})[name] == pytest.approx(0.4)


def test_groups_of_padding_are_left_out():
    """Group 1 is padding alone: its loads, seats and values do not count."""
    stats = example(
        valid_GS=torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
        flip_G=torch.tensor([0.2, 0.9]),
        residual_G=torch.tensor([0.3, 0.9]),
        slot_similarity_G=torch.tensor([0.4, 0.9]),
    )
    assert stats["load_cv"] == pytest.approx(1)
    assert stats["load_max"] == 2
    assert stats["seats_max"] == 1
    assert stats["dropped_frac"] == pytest.approx(1 / 2)
    assert [stats[name] for name in ("flip_frac", "transport_residual", "slot_similarity")] == pytest.approx(
        [0.2, 0.3, 0.4]
    )


def test_padding_alone_is_zero_everywhere():
    stats = example(valid_GS=torch.zeros(2, 2), flip_G=torch.ones(2))
    assert set(stats.values()) == {0.0}


def test_stats_are_detached_float32_scalars():
    gates = torch.rand(2, 2, 2, dtype=torch.float64).softmax(-1).requires_grad_()
    stats = routing_stats(
        gates_GSE=gates,
        load_GE=gates.sum(1),
        chosen_GS=gates.sum(-1),
        seats_GS=torch.ones(2, 2),
        valid_GS=torch.ones(2, 2, dtype=torch.bfloat16),
        slot_similarity_G=gates.sum((1, 2)),
    )
    for name, value in stats.items():
        assert value.shape == (), name
        assert value.dtype == torch.float32, name
        assert not value.requires_grad, name


def test_counts_are_exact_under_bfloat16():
    """A bfloat16 model hands over a bfloat16 mask; 257 is not a bfloat16."""
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


def cosine_matrix(columns_SN: Tensor) -> Tensor:
    """(N, N), one pair at a time."""
    N = columns_SN.shape[1]
    return torch.tensor(
        [
            [
                (
                    columns_SN[:, i] @ columns_SN[:, j] / (columns_SN[:, i].norm() * columns_SN[:, j].norm())
                ).item()
                for j in range(N)
            ]
            for i in range(N)
        ]
    )


def test_slot_similarity_is_0_for_orthogonal_slots_and_1_for_equal_ones():
    orthogonal, equal = torch.eye(6)[:, :4], torch.rand(6, 1).expand(6, 4)
    torch.testing.assert_close(mean_cosine(torch.stack([orthogonal, equal])), torch.tensor([0.0, 1.0]))
    assert mean_cosine(torch.rand(2, 6, 1)).tolist() == pytest.approx([0, 0], abs=1e-6)  # one slot: no pair


def test_slot_similarity_is_the_mean_of_the_cosines_off_the_diagonal():
    columns = torch.rand(3, 7, 5, generator=torch.Generator().manual_seed(0))
    expected = [
        (cosine_matrix(group).sum() - cosine_matrix(group).trace()).item() / (5 * 4) for group in columns
    ]
    assert mean_cosine(columns).tolist() == pytest.approx(expected, rel=1e-5)


def test_slot_similarity_of_an_empty_slot_is_0_with_every_other():
    """As a slot of ``identity`` whose token is padding; no pair then has a cosine below 0."""
    columns = torch.eye(4)[None, :, :].clone()
    columns[:, :, 3] = 0
    assert mean_cosine(columns).tolist() == pytest.approx([0], abs=1e-6)
