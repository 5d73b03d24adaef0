"""Soft MoE: the layer against the paper's sums, both l2 norms, the ablations, limits of the learned scale."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from moe.init import gaussian, init_weights, split
from moe.layer import MoEConfig, MoELayer
from moe.routers import SoftConfig, build_router
from moe.routers.soft import l2_normalize, l2_normalize_as_printed
from moe.routing import SoftRouting

G, S, D, E = 2, 6, 5, 3


def build_layer(config: SoftConfig) -> MoELayer:
    layer = MoELayer(MoEConfig(num_experts=E, router=config), dim=D, hidden=8)
    init_weights(layer, seed=0)
    return layer


def build(config: SoftConfig) -> nn.Module:
    router = build_router(config, dim=D, num_experts=E)
    init_weights(router, seed=0)
    return router


def some_tokens(seed: int = 0) -> Tensor:
    return torch.randn(G, S, D, generator=torch.Generator().manual_seed(seed))


def unit(vector: list[float], normalize: str) -> list[float]:
    """The authors' code: v * rsqrt(sum v^2 + 1e-6); the paper: v / (|v| + 1e-6)."""
    squares = sum(v * v for v in vector)
    norm = {"vmoe": math.sqrt(squares + 1e-6), "paper": math.sqrt(squares) + 1e-6, "none": 1.0}[normalize]
    return [v / norm for v in vector]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("normalize", ["vmoe", "paper", "none"])
@pytest.mark.parametrize(
    ("dispatch", "combine"),
    [
        ("soft", "soft"),
        ("uniform", "soft"),
        ("soft", "uniform"),
        ("identity", "soft"),
        ("identity", "identity"),
    ],
)
def test_layer_is_its_definition(slots, normalize, dispatch, combine):
    """Soft MoE, equations 1 and 2, in loops over tokens, experts and slots; the ablations of section 3.6."""
    if "identity" in (dispatch, combine):
        slots = S // E
    scale = 1.0 if normalize == "none" else 3.0
    config = SoftConfig(
        slots_per_expert=slots, normalize=normalize, scale_init=3.0, dispatch=dispatch, combine=combine
    )
    layer = build_layer(config).double()
    x = some_tokens().double()
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
            share = {  # how much of a token enters the slot
                "soft": [score[s, e, c] / column for s in range(S)],
                "uniform": [1 / S] * S,
                "identity": [float(s == e * slots + c) for s in range(S)],
            }[dispatch]
            mixed = sum(share[s] * x[g, s] for s in range(S))  # of the tokens as they came
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


def test_identity_with_two_slots_sends_token_i_to_expert_i_div_2():
    """Slots in a row belong to one expert, not in turn: tokens 0 and 1 meet expert 0, 4 and 5 expert 2."""
    layer = build_layer(SoftConfig(slots_per_expert=2, dispatch="identity", combine="identity"))
    assert not list(layer.router.parameters())
    x = some_tokens()
    y, routing = layer(x, torch.ones(G))
    for i in range(S):
        alone = layer.experts(x[:, i].expand(E, G, D))[i // 2]
        torch.testing.assert_close(y[:, i], alone)
    assert routing.gates_GSE.argmax(-1).tolist() == [[0, 0, 1, 1, 2, 2]] * G
    assert routing.stats["dropped_frac"] == 0
    assert routing.stats["seats_mean"] == 1
    assert routing.stats["slot_similarity"].item() == pytest.approx(0, abs=1e-6)


def test_uniform_dispatch_is_the_mean_of_the_valid_tokens():
    x, valid = some_tokens(), torch.ones(G, S)
    valid[0, 4:] = 0
    routing = build(SoftConfig(slots_per_expert=2, dispatch="uniform"))(x, valid)
    means = torch.stack([x[0, :4].mean(0), x[1].mean(0)])
    expected = means.repeat_interleave(2, 0).expand(E, 2 * G, D)
    torch.testing.assert_close(routing.dispatch(x), expected)
    assert routing.stats["slot_similarity"].item() == pytest.approx(1, rel=1e-5)


def test_uniform_combine_updates_all_tokens_alike():
    """By the mean over all slots."""
    routing = build(SoftConfig(slots_per_expert=2, combine="uniform"))(some_tokens(), torch.ones(G, S))
    y_END = torch.randn(E, 2 * G, D)
    out = routing.combine(y_END)
    for g in range(G):
        expected = y_END.unflatten(1, (G, 2))[:, g].mean((0, 1))
        torch.testing.assert_close(out[g], expected.expand(S, D))


def test_l2_normalize_has_its_epsilon_under_the_root():
    v = torch.tensor([3e-4, 4e-4], dtype=torch.float64)  # length 5e-4, half of sqrt(1e-6)
    torch.testing.assert_close(l2_normalize(v, dim=0), v / math.sqrt(25e-8 + 1e-6))


def test_l2_normalize_as_printed_adds_its_epsilon_to_the_length():
    v = torch.tensor([3e-7, 4e-7], dtype=torch.float64)  # length 5e-7, half of 1e-6
    torch.testing.assert_close(l2_normalize_as_printed(v, dim=0), v / 1.5e-6)


@pytest.mark.parametrize(("normalized", "slope"), [(l2_normalize, 1e3), (l2_normalize_as_printed, 0.0)])
def test_normalisation_is_finite_at_zero(normalized, slope):
    """1 / sqrt(1e-6) as written; the printed form has a kink there, where torch gives a norm no slope."""
    v = torch.zeros(3, requires_grad=True)
    y = normalized(v, dim=0)
    assert y.eq(0).all()
    y.sum().backward()
    assert v.grad.isfinite().all()
    if slope:
        torch.testing.assert_close(v.grad, torch.full((3,), slope))


def test_scale_zero_mixes_uniformly():
    routing = build(SoftConfig(slots_per_expert=2, scale_init=0.0))(some_tokens(), torch.ones(G, S))
    torch.testing.assert_close(routing.dispatch_GSEC, torch.full((G, S, E, 2), 1 / S))
    torch.testing.assert_close(routing.combine_GSEC, torch.full((G, S, E, 2), 1 / (E * 2)))
    assert routing.stats["gate_entropy_nats"].item() == pytest.approx(math.log(E), rel=1e-6)
    assert routing.stats["load_cv"].item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("normalize", ["vmoe", "paper"])
def test_logits_are_bounded_by_the_scale(normalize):
    x = 1e4 * some_tokens()
    ratio = build(SoftConfig(scale_init=2.0, normalize=normalize))(x, torch.ones(G, S)).dispatch_GSEC.log()
    assert (ratio.amax(1) - ratio.amin(1)).max() <= 2 * 2.0 + 1e-5


def test_experts_see_tokens_as_long_as_they_came():
    """Ten times longer tokens give ten times longer slots, with the same weights."""
    router, x = build(SoftConfig(scale_init=3.0)), 100 * some_tokens()
    short, long = (router(factor * x, torch.ones(G, S)).dispatch(factor * x) for factor in (1, 10))
    torch.testing.assert_close(10 * short, long)


def test_weights_sum_to_one():
    valid = torch.ones(G, S)
    valid[0, 3:] = 0
    routing = build(SoftConfig(slots_per_expert=2, scale_init=20.0))(some_tokens(), valid)
    torch.testing.assert_close(routing.dispatch_GSEC.sum(1), torch.ones(G, E, 2))
    torch.testing.assert_close(routing.combine_GSEC.sum((2, 3)), torch.ones(G, S))
    assert routing.dispatch_GSEC[0, 3:].eq(0).all()


def test_noise_is_not_divided_by_the_experts_and_is_each_slots_own():
    """Without normalisation and at phi = 0 the logits are the noise; combine shows them up to a constant."""
    router = build(SoftConfig(slots_per_expert=2, normalize="none", noise_std=0.7))
    nn.init.zeros_(router.phi_DEC)
    keys_GS = torch.arange(G * S).view(G, S)
    routing: SoftRouting = router(some_tokens(), torch.ones(G, S), keys_GS)
    noise = 0.7 * gaussian(split(keys_GS, 2 * E)).view(G, S, E, 2)
    torch.testing.assert_close(routing.combine_GSEC, noise.flatten(2).softmax(-1).view_as(noise))
    torch.testing.assert_close(routing.dispatch_GSEC, noise.softmax(1))


def test_load_is_the_mass_that_goes_to_each_expert():
    valid = torch.ones(G, S)
    valid[1, :2] = 0
    routing = build(SoftConfig(slots_per_expert=2, scale_init=5.0))(some_tokens(), valid)
    expected = [
        [sum(routing.combine_GSEC[g, s, e].sum().item() for s in range(S) if valid[g, s]) for e in range(E)]
        for g in range(G)
    ]
    torch.testing.assert_close(routing.load_GE, torch.tensor(expected))
    assert routing.load_GE.sum(1).tolist() == pytest.approx([6, 4])


def test_seats_are_counted_exactly_under_a_bfloat16_mask():
    """All 257 slots see every token; 257 is not a bfloat16."""
    router = build_router(SoftConfig(), dim=D, num_experts=257)
    init_weights(router, seed=0)
    stats = router(some_tokens().bfloat16(), torch.ones(G, S, dtype=torch.bfloat16)).stats
    assert stats["seats_mean"].item() == stats["seats_max"].item() == 257


def test_parameters_are_those_that_are_used():
    def names(**fields) -> set[str]:
        return {name for name, _ in build(SoftConfig(**fields)).named_parameters()}

    assert names() == names(normalize="paper") == names(combine="uniform") == {"phi_DEC", "scale"}
    assert names(normalize="none") == {"phi_DEC"}
    assert names(dispatch="uniform", combine="uniform") == set()
    assert names(slots_per_expert=2, dispatch="identity", combine="identity") == set()


def test_slots_by_hand():
    assert SoftConfig(slots_per_expert=3).slots(num_tokens=1, num_experts=64) == 3
    assert SoftConfig(total_slots=128).slots(num_tokens=1, num_experts=64) == 2
    assert SoftConfig(total_slots=64, slots_per_expert=5).slots(num_tokens=1, num_experts=64) == 1
    assert SoftConfig(total_slots=8, dispatch="identity").slots(num_tokens=8, num_experts=4) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots_per_expert": 0}, "slots_per_expert must be at least 1, got 0"),
        ({"slots_per_expert": -2}, "slots_per_expert must be at least 1, got -2"),
        ({"total_slots": 0}, "total_slots must be at least 1, got 0"),
        ({"total_slots": -8}, "total_slots must be at least 1, got -8"),
        ({"noise_std": -1.0}, "noise_std must not be negative, got -1.0"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        SoftConfig(**fields)


@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_identity_needs_a_slot_per_token(where):
    config = SoftConfig(slots_per_expert=2, **{where: "identity"})
    with pytest.raises(ValueError, match=r"4 experts x 2 slots .* 9 tokens"):
        config.slots(num_tokens=9, num_experts=4)


def test_total_slots_must_divide_over_the_experts():
    with pytest.raises(ValueError, match="total_slots=10 does not divide over 4 experts"):
        SoftConfig(total_slots=10).slots(num_tokens=8, num_experts=4)
