"""Expert choice: picks by hand and against algorithm 2 of Routers, the layer against its definition."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe.init import gaussian, mix, split
from moe.routers import ExpertChoiceConfig
from moe.routers.affinity import SinkhornConfig, SoftmaxConfig, SparseTransportConfig, sinkhorn_plan
from moe.routers.expert_choice import best_tokens
from moe.routers.sparse_transport import sparse_plan
from tests.moe.parts import build_layer, every_expert, gate_router, keys, randn


def test_picks_by_hand():
    """Expert 0 prefers large tokens, expert 1 small tokens; each has room for two of four, best first."""
    router = gate_router(ExpertChoiceConfig(), [[1.0, -1.0]])
    routing = router(torch.tensor([[[3.0], [-1.0], [5.0], [-2.0]]]), torch.ones(1, 4))
    assert routing.token_GEC.tolist() == [[[2, 0], [3, 1]]]
    first, last = torch.tensor([5.0, -5.0]).softmax(0)[0], torch.tensor([-1.0, 1.0]).softmax(0)[1]
    torch.testing.assert_close(routing.weight_GEC[0, 0, 0], first)
    torch.testing.assert_close(routing.weight_GEC[0, 1, 1], last)
    assert routing.aux_G.tolist() == [0]


def test_a_token_may_be_picked_by_several_experts_or_none():
    """All gates are equal: both experts pick the first two tokens, and no expert the others."""
    routing = gate_router(ExpertChoiceConfig(), [[0.0, 0.0]])(torch.ones(1, 4, 1), torch.ones(1, 4))
    assert routing.token_GEC.tolist() == [[[0, 1], [0, 1]]]
    assert routing.stats["dropped_frac"].item() == pytest.approx(0.5)
    assert routing.stats["seats_max"].item() == 2
    assert routing.stats["seats_mean"].item() == 1
    assert routing.stats["load_cv"].item() == 0.0


@pytest.mark.parametrize("c", [0.5, 1.0, 2.0])
def test_normalised_weights_keep_what_equal_experts_compute(c):
    """Each token that some expert picked gets the whole output of one; otherwise only a share of it."""
    x_GSD, whole = randn(2, 16, 8), {}
    for normalize in (True, False):
        layer = build_layer(ExpertChoiceConfig(capacity_factor=c, normalize=normalize))
        for parameter in layer.experts.parameters():
            parameter.data[:] = parameter.data[0].clone()
        routing = layer.router(x_GSD, torch.ones(2, 16))
        picked_GS = torch.zeros(2, 16).scatter(1, routing.token_GEC.flatten(1), 1.0)
        expected = every_expert(layer, x_GSD)[0] * picked_GS[..., None]
        got = routing.combine(layer.experts(routing.dispatch(x_GSD)))
        whole[normalize] = torch.allclose(got, expected, atol=1e-6)
    assert picked_GS.any()
    assert whole == {True: True, False: False}


def test_padding_leaves_slots_empty():
    """Three slots, two valid tokens: the third slot stays empty, and weighs nothing."""
    router = gate_router(ExpertChoiceConfig(capacity_factor=1.5), [[1.0, -1.0]])
    routing = router(torch.tensor([[[9.0], [1.0], [8.0], [2.0]]]), torch.tensor([[0.0, 1, 0, 1]]))
    assert routing.token_GEC.tolist() == [[[3, 1, 4], [1, 3, 4]]]
    assert routing.weight_GEC[..., 2].eq(0).all()
    assert routing.weight_GEC[..., :2].gt(0).all()
    assert routing.load_GE.tolist() == [[2, 2]]


def algorithm_2(affinity_SE: list[list[float]], valid_S: list[float], capacity: int) -> list[list[int]]:
    """Routers in Vision MoE, algorithm 2, as printed: every expert takes its next best token C times; of
    equal tokens the earlier. Padding is skipped; S marks a slot without a token."""
    S, E = len(affinity_SE), len(affinity_SE[0])
    token_EC = []
    for e in range(E):
        left, slots = [s for s in range(S) if valid_S[s]], []
        for _ in range(capacity):
            best = S
            for s in left:
                if best == S or affinity_SE[s][e] > affinity_SE[best][e]:
                    best = s
            slots.append(best)
            left = [s for s in left if s != best]
        token_EC.append(slots)
    return token_EC


@settings(max_examples=100)
@given(
    G=st.integers(1, 3),
    S=st.integers(1, 9),
    E=st.integers(1, 5),
    data=st.data(),
    levels=st.sampled_from([1, 2, 3, 1000]),
    seed=st.integers(0, 2**31),
)
def test_picks_are_those_of_algorithm_2(G, S, E, data, levels, seed):
    """With few levels affinities are equal; 0, frequent in transport plans, is an affinity like any other."""
    capacity = data.draw(st.integers(1, S))
    g = torch.Generator().manual_seed(seed)
    affinity_GSE = torch.randint(0, levels, (G, S, E), generator=g).float()
    valid_GS = torch.randint(0, 4, (G, S), generator=g).clamp(max=1).float()
    expected = [
        algorithm_2(affinity, valid, capacity)
        for affinity, valid in zip(affinity_GSE.tolist(), valid_GS.tolist(), strict=True)
    ]
    assert best_tokens(affinity_GSE, valid_GS, capacity).tolist() == expected


@pytest.mark.parametrize(
    "config",
    [
        ExpertChoiceConfig(capacity_factor=0.5),
        ExpertChoiceConfig(capacity_factor=4.0, noise_std=3.0),
        ExpertChoiceConfig(affinity=SinkhornConfig()),
        ExpertChoiceConfig(affinity=SinkhornConfig(), combine="affinity", capacity_factor=2.0),
        ExpertChoiceConfig(affinity=SparseTransportConfig()),
        ExpertChoiceConfig(affinity=SparseTransportConfig(), capacity_factor=2.0),
    ],
    ids=lambda c: f"{c.affinity.kind}-{c.capacity_factor}-{c.combine}",
)
def test_layer_is_its_definition(config):
    """The affinity decides the picks; outputs weigh by the softmax, or by the affinity if asked for. The
    noise of the logits has standard deviation noise_std / E."""
    G, S, E = 3, 12, 4
    layer, x, valid, keys_B = build_layer(config), 2 * randn(G, S, 8), torch.ones(G, S), torch.arange(G)
    noise = gaussian(split(split(mix(keys_B, 0), S), E))
    logits = x @ layer.router.gate_DE + config.noise_std / E * noise
    C = round(S * config.capacity_factor / E)
    gates = affinity = logits.softmax(-1)
    if config.affinity.kind == "sinkhorn":
        affinity, _ = sinkhorn_plan(logits, valid, config.affinity.iterations)
    elif config.affinity.kind == "sparse_transport":
        affinity, _, _ = sparse_plan(gates, valid, C, config.affinity.iterations)
    weights = affinity if config.combine == "affinity" else gates
    every = every_expert(layer, x)
    expected, seats_GS = torch.zeros_like(x), torch.zeros(G, S)
    for g in range(G):
        for e, slots in enumerate(algorithm_2(affinity[g].tolist(), [1.0] * S, C)):
            for s in slots:
                expected[g, s] = expected[g, s] + weights[g, s, e] * every[e, g, s]
                seats_GS[g, s] += 1
    got, routing = layer(x, torch.ones(G), keys_B)
    torch.testing.assert_close(got, expected)
    assert routing.stats["dropped_frac"].item() == pytest.approx(seats_GS.eq(0).float().mean().item())
    assert routing.stats["seats_max"].item() == pytest.approx(seats_GS.amax(1).mean().item())
    assert routing.stats["seats_mean"].item() == pytest.approx(E * C / S)


def test_random_scores_drop_one_token_in_e_and_a_balanced_assignment_none():
    """A token is missed by E experts that take S / E of S tokens: (1 - 1 / E)^E. Soft MoE, figure 10."""
    for affinity, expected in ((SoftmaxConfig(), (1 - 1 / 32) ** 32), (SparseTransportConfig(), 0.0)):
        router = gate_router(ExpertChoiceConfig(noise_std=1.0, affinity=affinity), [[0.0] * 32])
        routing = router(torch.zeros(8, 256, 1), torch.ones(8, 256), keys(8, 256))
        assert routing.stats["dropped_frac"].item() == pytest.approx(expected, abs=0.04 * (expected > 0))
        assert routing.stats["seats_mean"].item() == 1
        assert routing.load_GE.eq(8).all()
