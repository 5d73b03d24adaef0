"""Balancing by itself: the loss of each level and the next bias, against their definitions, with padding."""

from typing import get_args

import numpy as np
import pytest
import torch

from moe.routers.balance import Level, QuantileConfig, SignConfig, frequency, frequency_loss, quantile_bin
from tests.moe.parts import randn

G, S, E, K = 3, 6, 4, 2
VALID = torch.tensor([[1.0] * 6, [1.0] * 2 + [0.0] * 4, [0.0] * 6])  # a group may be padding alone
SCORES = randn(G, S, E).sigmoid()


def chosen_by(scores_GSE: torch.Tensor) -> torch.Tensor:
    """The K best experts of each valid token."""
    best = scores_GSE.topk(K).indices
    return torch.zeros_like(scores_GSE).scatter(-1, best, 1.0) * VALID.unsqueeze(-1)


@pytest.mark.parametrize("level", get_args(Level))
def test_the_loss_is_its_definition(level: Level) -> None:
    """Shares of a group, or of all groups; the mean gate of a group, or with level ``pass`` of all."""
    gates, chosen = SCORES.clone().requires_grad_(), chosen_by(SCORES)
    losses = frequency_loss(gates, frequency(chosen, level), VALID, level)
    for group in range(G):

        def tokens(everywhere: bool, group: int = group) -> list[tuple[int, int]]:
            groups = range(G) if everywhere else [group]
            return [(g, s) for g in groups for s in range(S) if VALID[g, s]]

        counted, meant = tokens(level != "group"), tokens(level == "pass")
        expected = 0.0
        for e in range(E):
            share = sum(chosen[at][e].item() for at in counted) / max(1, K * len(counted))
            expected += E * share * sum(SCORES[at][e].item() for at in meant) / max(1, len(meant))
        assert losses[group].item() == pytest.approx(expected, rel=1e-5), group
    assert not frequency(chosen.requires_grad_(), level).requires_grad
    losses.sum().backward()
    assert gates.grad is not None
    assert gates.grad[0].any()
    assert not gates.grad[VALID == 0].any()


def test_the_sign_of_the_load_moves_the_bias_by_hand() -> None:
    """Loads of 7, 1, 4, 4 have the mean 4, and of 9, 3, 2, 2 too: there the mean change is half the rate."""
    bias, counts = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([[7, 1, 4, 4]])
    moved = SignConfig().next_bias(bias, counts, K) - bias  # by the rate of the paper
    assert moved.tolist() == pytest.approx([-0.001, 0.001, 0, 0], abs=1e-7)
    for centre, expected in ((True, [-0.015, 0.005, 0.005, 0.005]), (False, [-0.01, 0.01, 0.01, 0.01])):
        config = SignConfig(rate=0.01, centre=centre)
        moved = config.next_bias(bias, torch.tensor([[9, 3, 2, 2]]), K) - bias
        assert moved.tolist() == pytest.approx(expected, abs=1e-7)
    assert SignConfig().count(SCORES, bias, chosen_by(SCORES), VALID).tolist() == [
        chosen_by(SCORES).sum((0, 1)).int().tolist()
    ]


@pytest.mark.parametrize("ema", [0.0, 0.25])
def test_the_quantile_is_that_of_the_biases_that_valid_tokens_need(ema: float) -> None:
    """A token enters an expert whose bias exceeds the token's best other score, minus its own score."""
    bias, config = torch.tensor([0.3, -0.1, 0.0, -0.2]), QuantileConfig(ema=ema)
    biased = SCORES + bias
    chosen = chosen_by(biased)
    counts = config.count(SCORES, bias, chosen, VALID)
    assert counts.shape == (config.rows, E)
    assert counts.sum(0).tolist() == [VALID.sum()] * E
    unknown = SCORES.masked_fill(VALID.unsqueeze(-1) == 0, torch.nan)
    assert torch.equal(config.count(unknown, bias, chosen, VALID), counts), "padding may be anything"
    cutoff = biased.sort(-1, descending=True).values[..., K : K + 1]
    needs = np.sort((cutoff - SCORES)[VALID.bool()].numpy(), axis=0)  # (tokens, E)
    rank = len(needs) * K / E
    needed = torch.from_numpy(needs[int(rank)])
    assert rank == int(rank)
    mixed = ema * bias + (1 - ema) * needed
    width = (bias.max() - bias.min() + 2) / config.bins
    got = config.next_bias(bias, counts, K)
    torch.testing.assert_close(got, mixed - mixed.mean(), rtol=0, atol=1.5 * width.item())


@pytest.mark.parametrize("rank", [0.0, 0.25, 2.5, 5.0, 5.75, 6.0, 6.5])
def test_a_rank_between_two_numbers_is_between_their_bins(rank: float) -> None:
    """The last number is that of every higher rank."""
    numbers = torch.randint(10, (7, E), generator=torch.Generator().manual_seed(0)).sort(0).values
    counts = torch.stack([column.bincount(minlength=10) for column in numbers.T], 1)
    below, above = (numbers[min(int(rank) + n, 6)].double() for n in (0, 1))
    found = quantile_bin(counts, torch.tensor(rank, dtype=torch.float64))
    torch.testing.assert_close(found, below + (rank - int(rank)) * (above - below))


def test_a_bias_stays_where_nothing_can_be_balanced() -> None:
    """Without valid tokens, and where every token is in all experts."""
    bias, config = torch.tensor([0.3, -0.1, 0.0, -0.2]), QuantileConfig()
    nothing = config.count(SCORES, bias, chosen_by(SCORES) * 0, VALID * 0)
    assert not nothing.any()
    everything = config.count(SCORES, bias, torch.ones_like(SCORES), VALID)
    assert everything.sum() == VALID.sum() * E
    for counts, k in ((nothing, K), (everything, E)):
        assert torch.equal(config.next_bias(bias, counts, k), bias)


def test_only_scores_between_0_and_1_have_their_biases_in_bins() -> None:
    assert QuantileConfig.unit_scores
    assert not SignConfig.unit_scores
