"""Balancing losses: by hand, at their bounds, and the load's chances against drawing them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.init import gaussian, split
from moe.routers.token_choice import balance_loss, importance_loss, load_loss, z_loss

LOSSES = {
    "importance": lambda logits, valid: importance_loss(logits.softmax(-1), valid),
    "load": lambda logits, valid: load_loss(logits, logits, valid, k=2, std=0.3),
    "balance": lambda logits, valid: balance_loss(logits.softmax(-1), valid),
    "z": z_loss,
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def some_logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def chance(z: float) -> float:
    """P(N(0, 1) > z)."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_importance_is_zero_at_balance_and_E_minus_1_at_collapse():
    E, valid = 4, torch.ones(2, 8)
    uniform = torch.full((2, 8, E), 1 / E)
    collapsed = F.one_hot(torch.tensor([[0] * 8, [3] * 8]), E).float()
    one_hot_balanced = F.one_hot(torch.arange(16).view(2, 8) % E, E).float()
    torch.testing.assert_close(importance_loss(uniform, valid), torch.zeros(2))
    torch.testing.assert_close(importance_loss(one_hot_balanced, valid), torch.zeros(2))
    torch.testing.assert_close(importance_loss(collapsed, valid), torch.full((2,), E - 1.0))


def test_importance_by_hand():
    """Columns sum to 1.2 and 0.8: mean 1, deviation (of the population) 0.2."""
    gates = torch.tensor([[[0.9, 0.1], [0.3, 0.7]]])
    assert importance_loss(gates, torch.ones(1, 2)).tolist() == pytest.approx([0.04])


def test_load_by_hand():
    """Two tokens, two experts, k=1, std 1/2. Token 0 has clean logits (1, 0) and noisy ones (0.8, 0.5): the
    threshold is 0.8, the chances P(z > -0.4), P(z > 1.6). Token 1: (0, 0), (0.1, -0.3): P(z > 0.2) twice.
    """
    clean = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    noisy = torch.tensor([[[0.8, 0.5], [0.1, -0.3]]])
    first, second = chance(-0.4) + chance(0.2), chance(1.6) + chance(0.2)
    mean = (first + second) / 2
    expected = ((first - mean) ** 2 + (second - mean) ** 2) / 2 / mean**2
    got = load_loss(clean, noisy, torch.ones(1, 2), k=1, std=0.5)
    assert got.tolist() == pytest.approx([expected], rel=1e-5)


def test_load_of_two_choices_has_the_second_largest_as_threshold():
    """One token, three experts, thresholds 0.2: its own winners count, too."""
    clean, noisy = torch.tensor([[[0.0, 0.3, 0.1]]]), torch.tensor([[[0.2, 0.4, -0.1]]])
    chances = torch.tensor([[[chance(0.2), chance(-0.1), chance(0.1)]]])
    got = load_loss(clean, noisy, torch.ones(1, 1), k=2, std=1.0)
    torch.testing.assert_close(got, importance_loss(chances, torch.ones(1, 1)))


def test_load_is_how_often_fresh_noise_would_win():
    """P(an expert's redrawn logit exceeds the token's k-th largest noisy one), drawn 20000 times per expert,
    within three deviations in the mean; the loss's own chances are read off a one-hot probe."""
    S, E, k, std, draws = 6, 4, 2, 1 / 4, 20000
    clean = 0.3 * some_logits(1, S, E)
    noisy = clean + std * gaussian(split(torch.arange(S).view(1, S), E))
    threshold = noisy.sort(-1, descending=True).values[..., k - 1 : k]
    fresh = clean.unsqueeze(-1) + std * gaussian(split(split(torch.arange(100, 100 + S), E), draws))
    won_SE = (fresh > threshold.unsqueeze(-1)).float().mean(-1)[0]
    p_SE = torch.tensor(
        [[chance((threshold[0, s, 0] - clean[0, s, e]).item() / std) for e in range(E)] for s in range(S)]
    )
    deviation = (p_SE * (1 - p_SE) / draws).sqrt()
    assert ((won_SE - p_SE).abs() < 4 * deviation + 1e-6).all()
    assert ((won_SE - p_SE) / deviation).square().mean() < 3
    torch.testing.assert_close(
        load_loss(clean, noisy, torch.ones(1, S), k=k, std=std),
        importance_loss(p_SE.unsqueeze(0), torch.ones(1, S)),
    )
    drawn = importance_loss(won_SE.unsqueeze(0), torch.ones(1, S))
    torch.testing.assert_close(
        load_loss(clean, noisy, torch.ones(1, S), k=k, std=std), drawn, rtol=0.1, atol=1e-4
    )


def test_load_threshold_carries_gradient():
    """As in the authors' code: where noise is a constant, moving all logits of a token changes nothing."""
    clean = (0.3 * some_logits(1, 5, 4)).double().requires_grad_()
    noise = 0.25 * gaussian(split(torch.arange(5).view(1, 5), 4)).double()

    def loss(clean: Tensor) -> Tensor:
        return load_loss(clean, clean + noise, torch.ones(1, 5).double(), k=2, std=0.25)

    assert torch.autograd.gradcheck(loss, clean)
    (gradient,) = torch.autograd.grad(loss(clean).sum(), clean)
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(1, 5).double(), atol=1e-12, rtol=0)
    assert gradient.abs().max() > 1e-3


def test_balance_by_hand():
    """First choices 0, 0, 1, of three tokens; mean gates (0.6, 0.4): 2 * (2/3 * 0.6 + 1/3 * 0.4)."""
    gates = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]])
    assert balance_loss(gates, torch.ones(1, 3)).tolist() == pytest.approx([2 * (2 / 3 * 0.6 + 1 / 3 * 0.4)])


def test_balance_is_1_at_balance_and_E_at_collapse():
    E, valid = 4, torch.ones(1, 8)
    balanced, collapsed = F.one_hot(torch.arange(8) % E, E), F.one_hot(torch.zeros(8).long(), E)
    assert balance_loss(balanced.float().unsqueeze(0), valid).tolist() == pytest.approx([1])
    assert balance_loss(collapsed.float().unsqueeze(0), valid).tolist() == pytest.approx([E])


def test_balance_counts_ties_for_the_lower_expert_and_differentiates_mean_gates_alone():
    """All tie: expert 0 is everybody's first choice, so its gates' gradient is E / S each, others' 0."""
    gates = torch.full((1, 5, 4), 0.25, requires_grad=True)
    balance_loss(gates, torch.ones(1, 5)).sum().backward()
    torch.testing.assert_close(gates.grad, torch.tensor([4 / 5, 0, 0, 0]).expand(1, 5, 4))


def test_z_by_hand():
    """Log-sum-exps ln 2 and 3 + ln 2: the mean of their squares."""
    logits = torch.tensor([[[0.0, 0.0], [3.0, 3.0]]])
    expected = (math.log(2) ** 2 + (3 + math.log(2)) ** 2) / 2
    assert z_loss(logits, torch.ones(1, 2)).tolist() == pytest.approx([expected])


@each_loss
def test_padding_is_left_out(loss):
    logits, valid = some_logits(2, 8, 4), torch.tensor([[1.0] * 5 + [0] * 3] * 2)
    torch.testing.assert_close(loss(logits, valid), loss(logits[:, :5], torch.ones(2, 5)))
    logits = logits.requires_grad_()
    loss(logits, valid).sum().backward()
    assert logits.grad[:, 5:].eq(0).all()
    assert logits.grad[:, :5].abs().sum() > 0


@each_loss
def test_groups_have_losses_of_their_own(loss):
    logits, valid = some_logits(3, 8, 4), torch.ones(3, 8)
    assert loss(logits, valid).shape == (3,)
    torch.testing.assert_close(loss(logits, valid)[1:2], loss(logits[1:2], valid[1:2]))


@each_loss
def test_a_group_of_padding_costs_nothing(loss):
    logits = some_logits(1, 8, 4).requires_grad_()
    value = loss(logits, torch.zeros(1, 8))
    assert value.tolist() == [0]
    value.sum().backward()
    assert logits.grad.eq(0).all()


@each_loss
def test_gradient_is_finite_at_zero_variance(loss):
    """Equal logits: the deviation's own gradient would be 0 / 0."""
    logits = torch.zeros(1, 8, 4, requires_grad=True)
    loss(logits, torch.ones(1, 8)).sum().backward()
    assert logits.grad.isfinite().all()


@each_loss
def test_a_bfloat16_mask_counts_exactly(loss):
    """A bfloat16 model hands over a bfloat16 mask; 257 is not a bfloat16."""
    logits, valid = some_logits(1, 300, 4), torch.ones(1, 300)
    valid[:, 257:] = 0
    torch.testing.assert_close(loss(logits, valid.bfloat16()), loss(logits, valid))
