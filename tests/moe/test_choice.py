"""Slots per expert: by hand, where the number is rounded, and what is refused."""

import pytest
import torch

from moe.init import init_weights
from moe.overrides import RoutingOverrides
from moe.routers import ExpertChoiceConfig, TokenChoiceConfig
from moe.routers.affinity import SparseTransportConfig
from tests.moe.parts import vit_config


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
    config = ExpertChoiceConfig(
        capacity_factor=factor, capacity_rounding=rounding, capacity_multiple_of=multiple_of
    )
    assert config.capacity(assignments, experts) == slots


def test_slots_of_a_group():
    """Token choice counts choices, and may have more slots than tokens; expert choice counts tokens."""
    fields = {"capacity_factor": 1.5, "capacity_rounding": "ceil", "capacity_multiple_of": 2}
    assert TokenChoiceConfig(k=2, **fields).slots(num_tokens=9, num_experts=4) == 8  # 6.75 -> 7 -> 8
    assert ExpertChoiceConfig(**fields).slots(num_tokens=9, num_experts=4) == 4  # 3.375 -> 4
    assert TokenChoiceConfig(capacity_factor=9.0).slots(num_tokens=4, num_experts=2) == 18
    assert ExpertChoiceConfig(capacity_factor=4.0).slots(num_tokens=16, num_experts=4) == 16
    assert ExpertChoiceConfig(capacity_factor=0.2501).capacity(16, 8) == 1


@pytest.mark.parametrize("config", [TokenChoiceConfig, ExpertChoiceConfig])
def test_evaluation_may_have_another_capacity(config):
    """In evaluation mode alone; an override goes first."""
    router = config(capacity_factor=1.0, eval_capacity_factor=2.0).build(dim=32, num_experts=4)
    init_weights(router, 0)
    x, valid = torch.randn(2, 16, 32), torch.ones(2, 16)

    def slots(**overrides: float) -> int:
        return router(x, valid, overrides=RoutingOverrides(**overrides)).token_GEC.shape[2]

    assert (slots(), slots(capacity_factor=0.5)) == (4, 2)
    router.eval()
    assert (slots(), slots(capacity_factor=0.5)) == (8, 2)


def test_a_plan_without_gradients_cannot_weigh_outputs():
    with pytest.raises(ValueError, match=r"combine='affinity' would train no router.*sparse_transport"):
        ExpertChoiceConfig(affinity=SparseTransportConfig(), combine="affinity")


@pytest.mark.parametrize(
    ("config", "num_tokens", "num_experts", "message"),
    [
        (TokenChoiceConfig(k=5), 16, 4, "k=5 exceeds num_experts=4"),
        # 16 * 0.25 / 8 = 0.5 rounds to even, 0, which multiple_of does not raise
        (
            ExpertChoiceConfig(capacity_factor=0.25, capacity_multiple_of=4),
            16,
            8,
            "capacity_factor=0.25 leaves no slot: 16 assignments.*use more than 0.25",
        ),
        # An expert cannot pick more tokens than there are, even if rounding raised 3 slots to 4.
        (
            ExpertChoiceConfig(capacity_factor=5.0),
            16,
            4,
            "=5.0 asks .* for 20 of only 16 tokens; .* at most 4",
        ),
        (ExpertChoiceConfig(capacity_factor=2.0, capacity_multiple_of=4), 3, 2, "for 4 of only 3 tokens"),
    ],
)
def test_slots_that_there_cannot_be(config, num_tokens, num_experts, message):
    with pytest.raises(ValueError, match=message):
        config.slots(num_tokens=num_tokens, num_experts=num_experts)


def test_a_capacity_of_evaluation_without_slots_is_refused_with_the_model():
    with pytest.raises(ValueError, match=r"capacity_factor=0\.01 leaves no slot"):
        vit_config(TokenChoiceConfig(eval_capacity_factor=0.01))
