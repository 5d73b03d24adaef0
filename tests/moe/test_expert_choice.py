"""Expert choice: picks by hand, the layer against its definition, capacity bounds."""

import pytest
import torch

from moe.init import init_weights
from moe.layer import MoEConfig, MoELayer
from moe.routers import ExpertChoiceConfig, build_router


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
    assert routing.stats["load_cv"].item() == 0.0


def test_padding_leaves_slots_empty():
    """Three slots, two valid tokens: the third slot stays empty, and weighs nothing."""
    router = router_with([[1.0, -1.0]], capacity_factor=1.5)
    routing = router(torch.tensor([[[9.0], [1.0], [8.0], [2.0]]]), torch.tensor([[0.0, 1, 0, 1]]))
    assert routing.token_GEC.tolist() == [[[3, 1, 4], [1, 3, 4]]]
    assert routing.weight_GEC[..., 2].eq(0).all()
    assert routing.weight_GEC[..., :2].gt(0).all()


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 4.0])
def test_layer_is_its_definition(factor):
    """Routers in Vision MoE, algorithm 2, in loops."""
    G, S, D, E = 3, 12, 6, 4
    layer = MoELayer(
        MoEConfig(num_experts=E, router=ExpertChoiceConfig(capacity_factor=factor)), dim=D, hidden=16
    )
    init_weights(layer, seed=0)
    x = 2 * torch.randn(G, S, D, generator=torch.Generator().manual_seed(0))
    gates = (x @ layer.router.gate_DE).softmax(-1)
    every = layer.experts(x.reshape(1, G * S, D).expand(E, -1, -1)).unflatten(1, (G, S))
    expected = torch.zeros_like(x)
    for g in range(G):
        for e in range(E):
            column = gates[g, :, e].tolist()
            best = sorted(range(S), key=lambda s, p=column: -p[s])
            for s in best[: round(S * factor / E)]:
                expected[g, s] = expected[g, s] + gates[g, s, e] * every[e, g, s]
    got, routing = layer(x, torch.ones(G))
    torch.testing.assert_close(got, expected)
    assert routing.stats["dropped_frac"].item() == pytest.approx(expected.eq(0).all(-1).float().mean().item())


def test_no_auxiliary_loss():
    router = router_with([[1.0, 2.0]])
    assert router(torch.randn(3, 8, 1), torch.ones(3, 8)).aux_G.tolist() == [0, 0, 0]


def test_capacity_bounds():
    with pytest.raises(ValueError, match="capacity_factor must be positive, got 0"):
        ExpertChoiceConfig(capacity_factor=0.0)
    with pytest.raises(
        ValueError, match=r"capacity_factor=5.0 asks .* for 20 of only 16 tokens; use at most 4"
    ):
        ExpertChoiceConfig(capacity_factor=5.0).slots(num_tokens=16, num_experts=4)
    with pytest.raises(ValueError, match="leaves no slot"):
        ExpertChoiceConfig(capacity_factor=0.1).slots(num_tokens=16, num_experts=4)
    assert ExpertChoiceConfig(capacity_factor=4.0).slots(num_tokens=16, num_experts=4) == 16
