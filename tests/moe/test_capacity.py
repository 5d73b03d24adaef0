"""Slots per expert: by hand, where it rounds, and what it refuses."""

import pytest

from moe.routers import ExpertChoiceConfig, TokenChoiceConfig
from moe.routers.choice import CapacityConfig


@pytest.mark.parametrize(
    ("assignments", "experts", "factor", "rounding", "multiple_of", "slots"),
    [
        (8, 4, 1.0, "round", 1, 2),
        (100, 4, 1.05, "round", 1, 26),  # 26.25
        (10, 4, 1.0, "round", 1, 2),  # 2.5: half to even, down
        (14, 4, 1.0, "round", 1, 4),  # 3.5: half to even, up
        (6, 4, 1.0, "round", 1, 2),  # 1.5
        (3, 5, 1.0, "round", 1, 1),  # 0.6
        (10, 4, 1.0, "ceil", 1, 3),
        (8, 4, 1.0, "ceil", 1, 2),  # already whole
        (1, 32, 1.0, "ceil", 1, 1),  # never none
        (50, 5, 1.1, "ceil", 1, 12),  # 50 * 1.1 / 5 = 11.000000000000002, from the left in float64
        (50, 5, 1.1, "round", 1, 11),
        (20, 3, 1.05, "ceil", 1, 7),  # 21.0 / 3; 20 * (1.05 / 3) would be 7.000000000000001
        (1576, 32, 2 * 1.05, "ceil", 4, 104),  # 103.4; V-MoE's 8 images of 197 tokens: 104 is 26 fours
        (10, 4, 1.0, "round", 4, 4),  # 2, then up to the next four
        (16, 4, 1.0, "round", 4, 4),
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
    """16 * 0.25 / 8 = 0.5 rounds to even, 0; a hair more is one slot. It is not lifted to multiple_of."""
    for multiple_of in (1, 4):
        with pytest.raises(
            ValueError, match=r"capacity_factor=0.25 leaves no slot: 16 assignments.*use more than 0.25"
        ):
            CapacityConfig(capacity_factor=0.25, capacity_multiple_of=multiple_of).capacity(16, 8)
    assert CapacityConfig(capacity_factor=0.2501).capacity(16, 8) == 1
    assert CapacityConfig(capacity_factor=0.25, capacity_rounding="ceil").capacity(16, 8) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor must be positive and finite, got 0.0"),
        ({"capacity_factor": -2.0}, "capacity_factor must be positive and finite, got -2.0"),
        ({"capacity_multiple_of": 0}, "capacity_multiple_of must be at least 1, got 0"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        CapacityConfig(**fields)


def test_token_choice_counts_choices_and_expert_choice_tokens():
    fields = {"capacity_factor": 1.5, "capacity_rounding": "ceil", "capacity_multiple_of": 2}
    assert TokenChoiceConfig(k=2, **fields).slots(num_tokens=9, num_experts=4) == 8  # 6.75 -> 7 -> 8
    assert ExpertChoiceConfig(**fields).slots(num_tokens=9, num_experts=4) == 4  # 3.375 -> 4


def test_only_token_choice_may_have_more_room_than_tokens():
    """A buffer that is never full is just that; an expert cannot pick more tokens than there are, also not
    because 3 slots were lifted to 4."""
    assert TokenChoiceConfig(capacity_factor=9.0).slots(num_tokens=4, num_experts=2) == 18
    with pytest.raises(ValueError, match="for 4 of only 3 tokens"):
        ExpertChoiceConfig(capacity_factor=2.0, capacity_multiple_of=4).slots(num_tokens=3, num_experts=2)
