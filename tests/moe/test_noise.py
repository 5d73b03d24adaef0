"""Keyed randomness: SplitMix64 to the bit, moments, and independence of how the work is split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.init import dropout, gaussian, mix, split, uniform

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """The finaliser of SplitMix64, on Python's integers."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z


def test_split_is_the_published_sequence():
    """The first five outputs of SplitMix64 from seed 1234567, as implementations are checked against."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert split(torch.tensor(1234567), 5).tolist() == [signed(z) for z in published]


@settings(max_examples=200)
@given(key=st.integers(-(2**63), 2**63 - 1), salt=st.integers(-(2**20), 2**62))
def test_mix_is_splitmix64(key, salt):
    """State update by (salt + 1) gammas and finaliser, modulo 2^64; a salt as a tensor is the same."""
    expected = signed(splitmix64((key + (salt + 1) * GAMMA) & MASK))
    assert mix(torch.tensor([key]), salt).tolist() == [expected]
    assert mix(torch.tensor([key]), torch.tensor(salt)).tolist() == [expected]


def test_split_does_not_depend_on_how_many_are_drawn():
    keys = mix(torch.arange(6).view(2, 3), 5)
    many = split(keys, 100)
    assert many.shape == (2, 3, 100)
    for count in (1, 2, 99):
        assert torch.equal(split(keys, count), many[..., :count])
    assert split(keys, 4).dtype == torch.int64


def test_keys_of_a_slice_are_the_slice_of_the_keys():
    """A microbatch, or a rank, draws what the whole batch would."""
    keys = mix(torch.arange(12), 5)
    for part in (slice(0, 4), slice(4, 12), slice(11, 12)):
        assert torch.equal(gaussian(split(keys[part], 9)), gaussian(split(keys, 9))[part])
        assert torch.equal(mix(keys[part], 3), mix(keys, 3)[part])
    x = torch.randn(12, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dropout(x[4:8], 0.3, keys[4:8]), dropout(x, 0.3, keys)[4:8])


def test_numbers_do_not_depend_on_the_default_dtype():
    keys, before = split(torch.tensor(1), 1000), torch.get_default_dtype()
    expected = uniform(keys), gaussian(keys)
    try:
        torch.set_default_dtype(torch.float64)
        got = uniform(keys), gaussian(keys)
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("key", [-1, -(1 << 39), 0, (1 << 39), 2**63 - 1, -(2**63)])
def test_uniform_never_reaches_0_or_1(key):
    """All ones in the upper bits must not round up to 1: its normal would be infinite, once in 2^24 draws."""
    value = uniform(torch.tensor([key]))
    assert 0 < value < 1
    assert gaussian(torch.tensor([key])).isfinite()
    assert gaussian(torch.tensor([key])).abs() < 5.5


def test_uniform_is_uniform():
    """A million draws: moments within five of their deviations, every hundredth equally full."""
    n = 10**6
    values = uniform(split(torch.tensor(11), n)).double()
    assert abs(values.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(values.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    counts = values.histc(100, 0, 1)
    assert ((counts - n / 100).square() / (n / 100)).sum() < 99 + 5 * math.sqrt(2 * 99)


def test_normal_is_normal():
    n = 10**6
    values = gaussian(split(torch.tensor(12), n)).double()
    assert abs(values.mean()) < 5 / math.sqrt(n)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(values.pow(3).mean()) < 5 * math.sqrt(15 / n)
    assert abs(values.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((values > 3).double().mean() - 0.0013499) < 5 * math.sqrt(0.00135 / n)


def test_neighbouring_keys_and_salts_are_unrelated():
    """Keys that count, as pictures do, salts that count, as blocks do, and splits of either."""
    n = 10**5
    streams = [mix(torch.arange(n), salt) for salt in (-3, -2, -1, 0, 1, 2, 40)]
    streams += [mix(torch.arange(1, n + 1), 0), split(torch.tensor(5), n), split(torch.tensor(6), n)]
    values = torch.stack([gaussian(keys) for keys in streams]).double()
    correlation = values.corrcoef() - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / math.sqrt(n)
    shifted = values[:, 1:] * values[:, :-1]
    assert shifted.mean(1).abs().max() < 5 / math.sqrt(n)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_its_share(p):
    keys, n = split(torch.tensor(3), 1000), 1000 * 200
    y = dropout(torch.ones(1000, 200), p, keys)
    assert abs(y.eq(0).float().mean() - p) < 5 * math.sqrt(p * (1 - p) / n)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))
    assert abs(y.mean() - 1) < 5 * math.sqrt(p / (1 - p) / n)
    rows = y.eq(0).float()
    assert not torch.equal(rows[0], rows[1]), "a row's key is its own"


def test_dropout_is_the_same_for_gradients_and_in_any_dtype():
    keys = split(torch.tensor(3), 4)
    for dtype in (torch.bfloat16, torch.float64):
        x = torch.ones(4, 50, dtype=dtype, requires_grad=True)
        y = dropout(x, 0.4, keys)
        assert y.dtype == dtype
        assert torch.equal(y == 0, dropout(torch.ones(4, 50), 0.4, keys) == 0)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y)
