"""The auxiliary losses of token choice: by hand, at their bounds, and laws over all of them."""

import math

import pytest
import torch
import torch.nn.functional as F

from moe.routers.token_choice import balance_loss, importance_loss, load_loss, z_loss
from tests.moe.parts import randn

LOSSES = {
    "importance": lambda logits, valid: importance_loss(logits.softmax(-1), valid),
    "load": lambda logits, valid: load_loss(logits, logits, valid, k=2, std=0.3),
    "balance": lambda logits, valid: balance_loss(logits.softmax(-1), valid),
    "z": z_loss,
}


def chance(z: float) -> float:
    """P(N(0, 1) > z)."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_importance_by_hand():
    """Columns sum to 1.2 and 0.8: mean 1, deviation (of the population) 0.2."""
    gates = torch.tensor([[[0.9, 0.1], [0.3, 0.7]]])
    assert importance_loss(gates, torch.ones(1, 2)).tolist() == pytest.approx([0.04])


def test_load_by_hand():
    """Two tokens, two experts, k=1, std 1/2. Token 0 has clean logits (1, 0) and noisy logits (0.8, 0.5): the
    threshold is 0.8, the probabilities P(z > -0.4), P(z > 1.6). Token 1: (0, 0), (0.1, -0.3): P(z > 0.2)
    twice.
    """
    clean = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    noisy = torch.tensor([[[0.8, 0.5], [0.1, -0.3]]])
    first, second = chance(-0.4) + chance(0.2), chance(1.6) + chance(0.2)
    mean = (first + second) / 2
    expected = ((first - mean) ** 2 + (second - mean) ** 2) / 2 / mean**2
    got = load_loss(clean, noisy, torch.ones(1, 2), k=1, std=0.5)
    assert got.tolist() == pytest.approx([expected], rel=1e-5)


def test_load_of_two_choices_has_the_second_largest_as_threshold():
    """One token, three experts, threshold 0.2; its own winners count too."""
    clean, noisy = torch.tensor([[[0.0, 0.3, 0.1]]]), torch.tensor([[[0.2, 0.4, -0.1]]])
    chances = torch.tensor([[[chance(0.2), chance(-0.1), chance(0.1)]]])
    got = load_loss(clean, noisy, torch.ones(1, 1), k=2, std=1.0)
    torch.testing.assert_close(got, importance_loss(chances, torch.ones(1, 1)))


def test_balance_by_hand():
    """First choices 0, 0, 1, of three tokens; mean gates (0.6, 0.4): 2 * (2/3 * 0.6 + 1/3 * 0.4)."""
    gates = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]])
    assert balance_loss(gates, torch.ones(1, 3)).tolist() == pytest.approx([2 * (2 / 3 * 0.6 + 1 / 3 * 0.4)])


def test_z_by_hand():
    """Log-sum-exps ln 2 and 3 + ln 2: the mean of their squares."""
    logits = torch.tensor([[[0.0, 0.0], [3.0, 3.0]]])
    expected = (math.log(2) ** 2 + (3 + math.log(2)) ** 2) / 2
    assert z_loss(logits, torch.ones(1, 2)).tolist() == pytest.approx([expected])


def test_bounds():
    """Perfect balance: importance 0, balance 1. All gates select one expert: E - 1 and E."""
    E, valid = 4, torch.ones(1, 8)
    balanced = F.one_hot(torch.arange(8) % E, E).float().unsqueeze(0)
    collapsed = F.one_hot(torch.full((8,), 3), E).float().unsqueeze(0)
    assert importance_loss(balanced, valid).tolist() == pytest.approx([0])
    assert importance_loss(collapsed, valid).tolist() == pytest.approx([E - 1])
    assert balance_loss(balanced, valid).tolist() == pytest.approx([1])
    assert balance_loss(collapsed, valid).tolist() == pytest.approx([E])


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_padding_and_other_groups_do_not_count(loss):
    """The mask may be bfloat16, as in a bfloat16 model, where 257 valid tokens could not be counted."""
    logits, valid = randn(2, 300, 4), torch.ones(2, 300)
    valid[:, 257:] = 0
    losses = loss(logits, valid.bfloat16())
    assert losses.shape == (2,)
    torch.testing.assert_close(losses, loss(logits[:, :257], torch.ones(2, 257)))
    torch.testing.assert_close(losses[1:], loss(logits[1:], valid[1:]))
    logits = logits.requires_grad_()
    loss(logits, valid).sum().backward()
    assert logits.grad[:, 257:].eq(0).all()
    assert logits.grad[:, :257].abs().sum() > 0


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_degenerate_groups(loss):
    """A group of padding costs nothing. Equal logits have a finite gradient (a deviation's is 0 / 0)."""
    logits = randn(1, 8, 4).requires_grad_()
    value = loss(logits, torch.zeros(1, 8))
    assert value.tolist() == [0]
    value.sum().backward()
    assert logits.grad.eq(0).all()
    equal = torch.zeros(1, 8, 4, requires_grad=True)
    loss(equal, torch.ones(1, 8)).sum().backward()
    assert equal.grad.isfinite().all()
