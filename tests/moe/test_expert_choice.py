"""Expert choice: picks by hand and against algorithm 2 of Routers, the layer against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.init import init_weights, split
from moe.layer import MoEConfig, MoELayer
from moe.routers import ExpertChoiceConfig, build_router
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig, sinkhorn_plan
from moe.routers.expert_choice import best_tokens
from moe.routers.sparse_transport import sparse_plan


def router_with(gate_DE: list[list[float]], **fields):
    router = build_router(ExpertChoiceConfig(**fields), dim=len(gate_DE), num_experts=len(gate_DE[0]))
    with torch.no_grad():
        router.gate_DE.copy_(torch.tensor(gate_DE))
    return router


def test_picks_by_hand():
    """Expert 0 likes large tokens, expert 1 small ones; each has room for two of four, best first."""
    router = router_with([[1.0, -1.0]])
    routing = router(torch.tensor([[[3.0], [-1.0], [5.0], [-2.0]]]), torch.ones(1, 4))
    assert routing.token_GEC.tolist() == [[[2, 0], [3, 1]]]
    first, last = torch.tensor([5.0, -5.0]).softmax(0)[0], torch.tensor([-1.0, 1.0]).softmax(0)[1]
    torch.testing.assert_close(routing.weight_GEC[0, 0, 0], first)
    torch.testing.assert_close(routing.weight_GEC[0, 1, 1], last)


def test_ties_go_to_the_earlier_token():
    routing = router_with([[0.0] * 4], capacity_factor=1.0)(torch.randn(1, 40, 1), torch.ones(1, 40))
    assert routing.token_GEC.tolist() == [[list(range(10))] * 4]


def test_a_token_may_be_picked_by_several_or_none():
    """Where all gates tie, both experts take the first two tokens and nobody the others."""
    router = router_with([[0.0, 0.0]])
    routing = router(torch.ones(1, 4, 1), torch.ones(1, 4))
    assert routing.token_GEC.tolist() == [[[0, 1], [0, 1]]]
    assert routing.stats["dropped_frac"].item() == pytest.approx(0.5)
    assert routing.stats["seats_max"].item() == 2
    assert routing.stats["seats_mean"].item() == 1
    assert routing.stats["load_cv"].item() == 0.0


def test_padding_leaves_slots_empty():
    """Three slots, two valid tokens: the third slot stays empty, and weighs nothing."""
    router = router_with([[1.0, -1.0]], capacity_factor=1.5)
    routing = router(torch.tensor([[[9.0], [1.0], [8.0], [2.0]]]), torch.tensor([[0.0, 1, 0, 1]]))
    assert routing.token_GEC.tolist() == [[[3, 1, 4], [1, 3, 4]]]
    assert routing.weight_GEC[..., 2].eq(0).all()
    assert routing.weight_GEC[..., :2].gt(0).all()
    assert routing.load_GE.tolist() == [[2, 2]]


def algorithm_2(affinity_SE: list[list[float]], valid_S: list[float], capacity: int) -> list[list[int]]:
    """Routers in Vision MoE, algorithm 2, as printed: every expert takes its next best token C times; of
    equals the earlier. Padding is not there; S marks a slot for which nobody is left."""
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


@settings(max_examples=200)
@given(
    G=st.integers(1, 3),
    S=st.integers(1, 9),
    E=st.integers(1, 5),
    data=st.data(),
    levels=st.sampled_from([1, 2, 3, 1000]),
    seed=st.integers(0, 2**31),
)
def test_picks_are_those_of_algorithm_2(G, S, E, data, levels, seed):
    """Affinities of few levels tie; 0, as a transport plan has many, is an affinity like any other."""
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
        *(ExpertChoiceConfig(capacity_factor=factor) for factor in (0.5, 1.0, 2.0, 4.0)),
        ExpertChoiceConfig(affinity=SinkhornConfig()),
        ExpertChoiceConfig(affinity=SinkhornConfig(), combine="affinity", capacity_factor=2.0),
        ExpertChoiceConfig(affinity=SparseTransportConfig()),
        ExpertChoiceConfig(affinity=SparseTransportConfig(), capacity_factor=2.0),
    ],
    ids=lambda c: f"{c.affinity.kind}-{c.capacity_factor}-{c.combine}",
)
def test_layer_is_its_definition(config):
    """Who sits where is the affinity's, the weight is the softmax's unless the affinity is to weigh."""
    G, S, D, E = 3, 12, 6, 4
    layer = MoELayer(MoEConfig(num_experts=E, router=config), dim=D, hidden=16)
    init_weights(layer, seed=0)
    x = 2 * torch.randn(G, S, D, generator=torch.Generator().manual_seed(0))
    logits, valid = x @ layer.router.gate_DE, torch.ones(G, S)
    C = round(S * config.capacity_factor / E)
    gates = affinity = logits.softmax(-1)
    if config.affinity.kind == "sinkhorn":
        affinity, _ = sinkhorn_plan(logits, valid, config.affinity.iterations)
    elif config.affinity.kind == "sparse_transport":
        affinity, _, _ = sparse_plan(gates, valid, C, config.affinity.iterations)
    weights = affinity if config.combine == "affinity" else gates
    every = layer.experts(x.reshape(1, G * S, D).expand(E, -1, -1)).unflatten(1, (G, S))
    expected, seats_GS = torch.zeros_like(x), torch.zeros(G, S)
    for g in range(G):
        for e, slots in enumerate(algorithm_2(affinity[g].tolist(), [1.0] * S, C)):
            for s in slots:
                expected[g, s] = expected[g, s] + weights[g, s, e] * every[e, g, s]
                seats_GS[g, s] += 1
    got, routing = layer(x, torch.ones(G))
    torch.testing.assert_close(got, expected)
    assert routing.stats["dropped_frac"].item() == pytest.approx(seats_GS.eq(0).float().mean().item())
    assert routing.stats["seats_max"].item() == pytest.approx(seats_GS.amax(1).mean().item())
    assert routing.stats["seats_mean"].item() == pytest.approx(E * C / S)


def test_a_balanced_assignment_drops_nobody():
    """With a seat per token, the sparse plan seats every token once; softmax experts pick some twice."""
    x = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(0))
    dropped = {}
    for affinity in (ExpertChoiceConfig().affinity, SinkhornConfig(), SparseTransportConfig(iterations=2000)):
        router = build_router(ExpertChoiceConfig(affinity=affinity), dim=6, num_experts=4)
        init_weights(router, seed=0)
        dropped[affinity.kind] = router(2 * x, torch.ones(2, 16)).stats["dropped_frac"].item()
    assert dropped["sparse_transport"] == 0
    assert 0 < dropped["sinkhorn"] < dropped["softmax"]


def test_random_scores_drop_one_in_e():
    """A token is missed by all of E experts that take S / E of S: (1 - 1 / E)^E; that few are seen by many.
    Soft MoE, figure 10."""
    router = router_with([[0.0] * 32], noise_std=1.0)
    routing = router(torch.zeros(8, 256, 1), torch.ones(8, 256), torch.arange(8 * 256).view(8, 256))
    assert routing.stats["dropped_frac"].item() == pytest.approx((1 - 1 / 32) ** 32, abs=0.04)  # 0.362
    assert routing.stats["seats_mean"].item() == 1
    assert routing.load_GE.eq(8).all()


def test_no_auxiliary_loss():
    router = router_with([[1.0, 2.0]])
    assert router(torch.randn(3, 8, 1), torch.ones(3, 8)).aux_G.tolist() == [0, 0, 0]


def test_noise_has_the_standard_deviation_of_the_config_over_E():
    router = router_with([[0.0] * 4], noise_std=2.0)
    gates = router(torch.zeros(40, 50, 1), torch.ones(40, 50), torch.arange(2000).view(40, 50)).gates_GSE
    difference = (gates[..., 0] / gates[..., 1]).log()
    assert difference.std().item() == pytest.approx(2**0.5 * 2.0 / 4, rel=0.08)


def test_flip_frac_is_the_share_of_picks_that_noise_changes_and_grows_with_it():
    x, keys_GS = (
        torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(128).view(2, 64),
    )
    valid = torch.ones(2, 64)
    valid[0, 40:] = 0
    seen = []
    for std in (0.0, 0.1, 2.0, 1e4):
        router = build_router(ExpertChoiceConfig(noise_std=std), dim=8, num_experts=8)
        init_weights(router, seed=0)
        noisy, clean = router(x, valid, keys_GS), router(x, valid)
        pairs = [(g, e) for g in range(2) for e in range(8)]
        kept = [
            len(set(noisy.token_GEC[p].tolist()) & set(clean.token_GEC[p].tolist()) - {64}) for p in pairs
        ]
        assert noisy.stats["flip_frac"].item() == pytest.approx(1 - sum(kept) / (2 * 8 * 8))
        assert clean.stats["flip_frac"] == 0
        seen.append(noisy.stats["flip_frac"].item())
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] > 0.7


def test_combining_by_a_plan_without_gradient_is_refused():
    with pytest.raises(ValueError, match=r"combine='affinity' would train no router.*sparse_transport"):
        ExpertChoiceConfig(affinity=SparseTransportConfig(), combine="affinity")


@pytest.mark.parametrize("kind", [SinkhornConfig, SparseTransportConfig])
def test_affinities_need_an_iteration(kind):
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        kind(iterations=0)


def test_capacity_bounds():
    with pytest.raises(ValueError, match="capacity_factor must be positive and finite, got 0"):
        ExpertChoiceConfig(capacity_factor=0.0)
    with pytest.raises(ValueError, match="noise_std must not be negative, got -1"):
        ExpertChoiceConfig(noise_std=-1)
    with pytest.raises(
        ValueError, match=r"capacity_factor=5.0 asks .* for 20 of only 16 tokens; use at most 4"
    ):
        ExpertChoiceConfig(capacity_factor=5.0).slots(num_tokens=16, num_experts=4)
    with pytest.raises(ValueError, match="leaves no slot"):
        ExpertChoiceConfig(capacity_factor=0.1).slots(num_tokens=16, num_experts=4)
    assert ExpertChoiceConfig(capacity_factor=4.0).slots(num_tokens=16, num_experts=4) == 16


def test_flip_frac_is_of_the_picks_that_a_plan_makes():
    x = 0.5 + torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0))
    config = ExpertChoiceConfig(noise_std=3.0, affinity=SparseTransportConfig())
    router, keys_GS = build_router(config, dim=8, num_experts=8), split(torch.tensor([4]), 64)
    init_weights(router, seed=0)
    noisy, clean = router(x, torch.ones(1, 64), keys_GS), router(x, torch.ones(1, 64))
    picks = [
        {(e, s) for e, row in enumerate(routing.token_GEC[0].tolist()) for s in row}
        for routing in (noisy, clean)
    ]
    assert noisy.stats["flip_frac"].item() == pytest.approx(1 - len(picks[0] & picks[1]) / 64)
