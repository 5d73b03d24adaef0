"""Theorem 1 of Implicit Bias in Soft MoE: whatever follows its slot, one expert cannot compute a norm."""

import math

import pytest
import torch

from tests.golden_routers import lone_slot, pair


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_one_expert_sees_the_same_slot_for_inputs_of_different_norm(sign: float) -> None:
    """With one expert and one slot every output is a function of that slot. A norm computed from it errs for
    one of the two inputs by a third, however long they are: no error that grows slower than they do.
    """
    phi, tokens = torch.tensor([sign, 0.5, -0.2], dtype=torch.float64), 4
    one, other = pair(sign, 40.0, tokens=tokens, width=3)
    slots = lone_slot(one, phi), lone_slot(other, phi)
    torch.testing.assert_close(*slots, rtol=0, atol=1e-9)
    long, short = one.norm().item(), other.norm().item()
    assert long == pytest.approx(math.sqrt(tokens) * short)
    guess = 2 * long * short / (long + short)  # errs by as much for both, in proportion
    assert abs(guess - long) / long == pytest.approx(abs(guess - short) / short) == pytest.approx(1 / 3)


def test_a_second_expert_tells_them_apart() -> None:
    one, other = pair(1.0, 40.0, tokens=4, width=3)
    phi = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64)
    assert (lone_slot(one, phi) - lone_slot(other, phi)).norm() > 1
