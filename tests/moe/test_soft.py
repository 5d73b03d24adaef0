"""Soft MoE: the layer against the paper's sums, both l2 norms, the ablations, limits of the learned scale."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe.init import gaussian, split
from moe.routers import SoftConfig
from moe.routers.soft import l2_normalize, l2_normalize_as_printed, mean_cosine
from tests.moe import parts
from tests.moe.parts import keys, randn

G, S, D, E = 2, 6, 5, 3
X, ONES = randn(G, S, D), torch.ones(G, S)


def build(**fields):
    return parts.build_router(SoftConfig(**fields), dim=D, num_experts=E)


def build_layer(config: SoftConfig):
    return parts.build_layer(config, dim=D, hidden=8, num_experts=E)


def unit(vector: list[float], normalize: str) -> list[float]:
    """The authors' code: v * rsqrt(sum v^2 + 1e-6); the paper: v / (|v| + 1e-6)."""
    squares = sum(v * v for v in vector)
    norm = {"vmoe": math.sqrt(squares + 1e-6), "paper": math.sqrt(squares) + 1e-6, "none": 1.0}[normalize]
    return [v / norm for v in vector]


@pytest.mark.parametrize(
    ("dispatch", "combine", "slots", "normalize"),
    [
        ("soft", "soft", 1, "vmoe"),
        ("soft", "soft", 2, "vmoe"),
        ("soft", "soft", 2, "paper"),
        ("soft", "soft", 2, "none"),
        ("uniform", "soft", 2, "vmoe"),
        ("soft", "uniform", 1, "paper"),
        ("identity", "soft", 2, "vmoe"),
        ("identity", "identity", 2, "vmoe"),
    ],
)
def test_layer_is_its_definition(dispatch, combine, slots, normalize):
    """Soft MoE, equations 1 and 2, in loops over tokens, experts and slots; the ablations of section 3.6."""
    scale = 1.0 if normalize == "none" else 3.0
    config = SoftConfig(
        slots_per_expert=slots, normalize=normalize, scale_init=3.0, dispatch=dispatch, combine=combine
    )
    layer, x = build_layer(config).double(), X.double()
    x[0, 0] *= 1e-6  # where the two epsilons differ
    phi = layer.router.phi_DEC if config.learned() else torch.zeros(D, E, slots)
    expected = torch.zeros_like(x)
    places = list(product(range(E), range(slots)))
    for g in range(G):
        score = {}
        for s, (e, c) in product(range(S), places):
            token, slot = unit(x[g, s].tolist(), normalize), unit(phi[:, e, c].tolist(), normalize)
            score[s, e, c] = math.exp(sum(scale * a * b for a, b in zip(token, slot, strict=True)))
        for e, c in places:
            column = sum(score[s, e, c] for s in range(S))
            share = {  # weight of each token in the slot
                "soft": [score[s, e, c] / column for s in range(S)],
                "uniform": [1 / S] * S,
                "identity": [float(s == e * slots + c) for s in range(S)],
            }[dispatch]
            mixed = sum(share[s] * x[g, s] for s in range(S))  # tokens are not normalised here
            output = layer.experts(mixed.expand(E, 1, D))[e, 0]
            for s in range(S):
                row = sum(score[s, i, j] for i, j in places)
                weight = {
                    "soft": score[s, e, c] / row,
                    "uniform": 1 / (E * slots),
                    "identity": float(s == e * slots + c),
                }[combine]
                expected[g, s] = expected[g, s] + weight * output
    torch.testing.assert_close(layer(x, torch.ones(G).double())[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("normalized", "slope"), [(l2_normalize, 1e3), (l2_normalize_as_printed, 0.0)])
def test_l2_norms_by_hand(normalized, slope):
    """At lengths near their epsilons, and at 0, where the slope is 1 / sqrt(1e-6), or 0 by torch's convention
    for a norm."""
    v = torch.tensor([3e-4, 4e-4], dtype=torch.float64)  # length 5e-4, half of sqrt(1e-6)
    torch.testing.assert_close(l2_normalize(v, dim=0), v / math.sqrt(25e-8 + 1e-6))
    torch.testing.assert_close(l2_normalize_as_printed(v / 1000, dim=0), v / 1000 / 1.5e-6)
    zero = torch.zeros(3, requires_grad=True)
    y = normalized(zero, dim=0)
    assert y.eq(0).all()
    y.sum().backward()
    assert zero.grad.isfinite().all()
    if slope:
        torch.testing.assert_close(zero.grad, torch.full((3,), slope))


def test_limits_of_the_scale():
    """Scale 0 mixes uniformly; logits are bounded by the scale, whatever the length of the tokens."""
    routing = build(slots_per_expert=2, scale_init=0.0)(X, ONES)
    torch.testing.assert_close(routing.dispatch_GSEC, torch.full((G, S, E, 2), 1 / S))
    torch.testing.assert_close(routing.combine_GSEC, torch.full((G, S, E, 2), 1 / (E * 2)))
    assert routing.stats["gate_entropy_nats"].item() == pytest.approx(math.log(E), rel=1e-6)
    assert routing.stats["load_cv"].item() == pytest.approx(0, abs=1e-5)
    for normalize in ("vmoe", "paper"):
        ratio = build(scale_init=2.0, normalize=normalize)(1e4 * X, ONES).dispatch_GSEC.log()
        assert (ratio.amax(1) - ratio.amin(1)).max() <= 2 * 2.0 + 1e-5


def test_noise_is_not_divided_by_the_experts_and_differs_by_slot():
    """Without normalisation and at phi = 0 the logits are the noise."""
    router = build(slots_per_expert=2, normalize="none", noise_std=0.7)
    nn.init.zeros_(router.phi_DEC)
    routing = router(X, ONES, keys(G, S))
    noise = 0.7 * gaussian(split(keys(G, S), 2 * E)).view(G, S, E, 2)
    torch.testing.assert_close(routing.combine_GSEC, noise.flatten(2).softmax(-1).view_as(noise))
    torch.testing.assert_close(routing.dispatch_GSEC, noise.softmax(1))


def test_padding_is_in_no_mean_and_no_load():
    """Uniform dispatch is the mean of the valid tokens; load is the mass that they give to each expert. Seats
    are counted under a bfloat16 mask, although 257 is not a bfloat16."""
    valid = torch.ones(G, S)
    valid[0, 4:] = 0
    routing = build(slots_per_expert=2, dispatch="uniform", scale_init=20.0)(X, valid)
    means = torch.stack([X[0, :4].mean(0), X[1].mean(0)])
    torch.testing.assert_close(routing.dispatch(X), means.repeat_interleave(2, 0).expand(E, 2 * G, D))
    assert routing.stats["slot_similarity"].item() == pytest.approx(1, rel=1e-5)
    mass_GSE = routing.combine_GSEC.sum(-1)
    torch.testing.assert_close(mass_GSE.sum(-1), torch.ones(G, S))
    torch.testing.assert_close(routing.load_GE, torch.stack([mass_GSE[0, :4].sum(0), mass_GSE[1].sum(0)]))
    torch.testing.assert_close(build(scale_init=20.0)(X, valid).dispatch_GSEC.sum(1), torch.ones(G, E, 1))
    router = parts.build_router(SoftConfig(), dim=D, num_experts=257)
    stats = router(X.bfloat16(), ONES.bfloat16()).stats
    assert stats["seats_mean"].item() == stats["seats_max"].item() == 257


def test_only_parameters_that_are_used_exist():
    def names(**fields) -> set[str]:
        return {name for name, _ in build(**fields).named_parameters()}

    assert names() == names(normalize="paper") == names(combine="uniform") == {"phi_DEC", "scale"}
    assert names(normalize="none") == {"phi_DEC"}
    assert names(dispatch="uniform", combine="uniform") == set()
    assert names(slots_per_expert=2, dispatch="identity", combine="identity") == set()


def test_slots_and_config_errors():
    assert SoftConfig(slots_per_expert=3).slots(num_tokens=1, num_experts=64) == 3
    assert SoftConfig(total_slots=64, slots_per_expert=5).slots(num_tokens=1, num_experts=64) == 1
    with pytest.raises(ValueError, match="total_slots=10 does not divide over 4 experts"):
        SoftConfig(total_slots=10).slots(num_tokens=8, num_experts=4)
    for name in ("dispatch", "combine"):
        with pytest.raises(ValueError, match=r"4 experts x 2 slots .* 9 tokens"):
            SoftConfig(slots_per_expert=2, **{name: "identity"}).slots(num_tokens=9, num_experts=4)
        with pytest.raises(ValueError, match="3 experts x 2 slots are not 7 tokens"):
            build(slots_per_expert=2, **{name: "identity"})(randn(G, 7, D), torch.ones(G, 7))


def test_slot_similarity_is_the_mean_cosine_of_pairs():
    """1 for equal slots, 0 for orthogonal slots and for one slot; an empty slot has cosine 0 with all."""
    columns = torch.rand(3, 7, 5, generator=torch.Generator().manual_seed(0))
    columns[0, :, 3] = 0
    cosine = F.cosine_similarity(columns.unsqueeze(-1), columns.unsqueeze(-2), dim=1)
    expected = (cosine.sum((1, 2)) - cosine.diagonal(dim1=1, dim2=2).sum(-1)) / (5 * 4)
    torch.testing.assert_close(mean_cosine(columns), expected)
    orthogonal, equal = torch.eye(6)[:, :4], torch.rand(6, 1).expand(6, 4)
    torch.testing.assert_close(mean_cosine(torch.stack([orthogonal, equal])), torch.tensor([0.0, 1.0]))
    assert mean_cosine(torch.rand(2, 6, 1)).tolist() == pytest.approx([0, 0], abs=1e-6)
