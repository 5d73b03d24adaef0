"""What is logged about a routing, by hand."""

import pytest
import torch

from moe.routing import routing_stats


def test_stats_by_hand():
    """Two groups of two tokens, two experts; the last token is padding."""
    stats = routing_stats(
        gates_GSE=torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]]]),
        load_GE=torch.tensor([[2, 0], [1, 1]]),
        seats_GS=torch.tensor([[1, 0], [2, 0]]),
        valid_GS=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    )
    assert stats["dropped_frac"].item() == pytest.approx(1 / 3)
    assert stats["load_cv"].item() == pytest.approx((1 + 0) / 2)  # (2, 0): mean 1, deviation 1
    assert stats["gate_entropy_nats"].item() == pytest.approx(2 / 3 * torch.tensor(2.0).log().item())


def test_stats_leave_groups_of_padding_out():
    stats = routing_stats(
        gates_GSE=torch.full((2, 2, 2), 0.5),
        load_GE=torch.tensor([[2, 0], [0, 0]]),
        seats_GS=torch.tensor([[1, 1], [0, 0]]),
        valid_GS=torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
    )
    assert stats["load_cv"].item() == pytest.approx(1.0)


def test_stats_count_exactly_under_bfloat16():
    """A bfloat16 model hands over a bfloat16 mask; 257 is not a bfloat16."""
    stats = routing_stats(
        gates_GSE=torch.full((1, 257, 2), 0.5),
        load_GE=torch.ones(1, 2),
        seats_GS=torch.zeros(1, 257),
        valid_GS=torch.ones(1, 257, dtype=torch.bfloat16),
    )
    assert stats["dropped_frac"].item() == 1.0
