"""Slots per expert: by hand, where the number is rounded, and what is refused."""

import pytest

from moe.routers import ExpertChoiceConfig, TokenChoiceConfig
from moe.routers.choice import CapacityConfig


@pytest.mark.parametrize(
    ("assignments", "experts", "factor", "rounding", "multiple_of", "slots"),
    [
        (100, 4, 1.05, "round", 1, 26),  # 26.25
        (10, 4, 1.0, "round", 1, 2),  # 2.5: half to even, down
        (14, 4, 1.0, "round", 1, 4),  # 3.5: half to even, up
        (3, 5, 1.0, "round", 1, 1),  # 0.6
        (10, 4, 1.0, "ceil", 1, 3),
        (8, 4, 1.0, "ceil", 1, 2),  # an integer stays
        (1, 32, 1.0, "ceil", 1, 1),  # never 0
        (50, 5, 1.1, "ceil", 1, 12),  # 50 * 1.1 / 5 = 11.000000000000002, from the left in float64
        (20, 3, 1.05, "ceil", 1, 7),  # 21.0 / 3; 20 * (1.05 / 3) would be 7.000000000000001
        (1576, 32, 2 * 1.05, "ceil", 4, 104),  # V-MoE's 8 images of 197 tokens: 103.4, and 104 is 26 fours
        (10, 4, 1.0, "round", 4, 4),  # 2, then up to the next four
        (18, 4, 1.0, "ceil", 4, 8),  # 5
        (20, 4, 1.0, "round", 3, 6),
    ],
)
def test_capacity_by_hand(assignments, experts, factor, rounding, multiple_of, slots):
    config = CapacityConfig(
        capacity_factor=factor, capacity_rounding=rounding, capacity_multiple_of=multiple_of
    )
    assert config.capacity(assignments, experts) == slots


def test_no_capacity_is_an_error_that_names_the_bound():
    """16 * 0.25 / 8 = 0.5 rounds to even, 0; slightly more is one slot. multiple_of does not raise 0."""
    for multiple_of in (1, 4):
        with pytest.raises(
            ValueError, match=r"capacity_factor=0.25 leaves no slot: 16 assignments.*use more than 0.25"
        ):
            CapacityConfig(capacity_factor=0.25, capacity_multiple_of=multiple_of).capacity(16, 8)
    assert CapacityConfig(capacity_factor=0.2501).capacity(16, 8) == 1


def test_config_errors():
    for factor in (0.0, -2.0):
        with pytest.raises(ValueError, match=f"capacity_factor must be positive and finite, got {factor}"):
            CapacityConfig(capacity_factor=factor)
    with pytest.raises(ValueError, match="capacity_multiple_of must be at least 1, got 0"):
        CapacityConfig(capacity_multiple_of=0)


def test_token_choice_counts_choices_and_expert_choice_tokens():
    fields = {"capacity_factor": 1.5, "capacity_rounding": "ceil", "capacity_multiple_of": 2}
    assert TokenChoiceConfig(k=2, **fields).slots(num_tokens=9, num_experts=4) == 8  # 6.75 -> 7 -> 8
    assert ExpertChoiceConfig(**fields).slots(num_tokens=9, num_experts=4) == 4  # 3.375 -> 4


def test_only_token_choice_may_have_more_slots_than_tokens():
    """An expert cannot pick more tokens than there are, even if rounding raised 3 slots to 4."""
    assert TokenChoiceConfig(capacity_factor=9.0).slots(num_tokens=4, num_experts=2) == 18
    assert ExpertChoiceConfig(capacity_factor=4.0).slots(num_tokens=16, num_experts=4) == 16
    with pytest.raises(
        ValueError, match=r"capacity_factor=5.0 asks .* for 20 of only 16 tokens; use at most 4"
    ):
        ExpertChoiceConfig(capacity_factor=5.0).slots(num_tokens=16, num_experts=4)
    with pytest.raises(ValueError, match="for 4 of only 3 tokens"):
        ExpertChoiceConfig(capacity_factor=2.0, capacity_multiple_of=4).slots(num_tokens=3, num_experts=2)
