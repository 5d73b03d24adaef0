"""Soft MoE: the layer against the paper's sums, the authors' l2 norm, the limits of the learned scale."""

import math

import pytest
import torch
from torch import nn

from moe.init import init_weights
from moe.layer import MoEConfig, MoELayer
from moe.routers import SoftConfig, build_router
from moe.routers.soft import l2_normalize

G, S, D, E = 2, 7, 5, 3


def build_layer(config: SoftConfig) -> MoELayer:
    layer = MoELayer(MoEConfig(num_experts=E, router=config), dim=D, hidden=8)
    init_weights(layer, seed=0)
    return layer


def unit(vector: list[float]) -> list[float]:
    """The authors' code: v * rsqrt(sum v^2 + 1e-6)."""
    norm = math.sqrt(sum(v * v for v in vector) + 1e-6)
    return [v / norm for v in vector]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_layer_is_its_definition(slots, normalize):
    """Soft MoE, equations 1 and 2, in loops over tokens, experts and slots."""
    layer = build_layer(SoftConfig(slots_per_expert=slots, normalize=normalize, scale_init=3.0)).double()
    x = torch.randn(G, S, D, generator=torch.Generator().manual_seed(0)).double()
    phi = layer.router.phi_DEC
    expected = torch.zeros_like(x)
    for g in range(G):
        score = {}
        for s in range(S):
            for e in range(E):
                for c in range(slots):
                    token, slot = x[g, s].tolist(), phi[:, e, c].tolist()
                    if normalize:
                        token, slot = unit(token), [3.0 * v for v in unit(slot)]
                    score[s, e, c] = math.exp(sum(a * b for a, b in zip(token, slot, strict=True)))
        for e in range(E):
            for c in range(slots):
                column = sum(score[s, e, c] for s in range(S))
                slot = sum(score[s, e, c] / column * x[g, s] for s in range(S))  # of the tokens as they came
                output = layer.experts(slot.expand(E, 1, D))[e, 0]
                for s in range(S):
                    row = sum(score[s, i, j] for i in range(E) for j in range(slots))
                    expected[g, s] = expected[g, s] + score[s, e, c] / row * output
    torch.testing.assert_close(layer(x, torch.ones(G).double())[0], expected, rtol=1e-9, atol=1e-12)


def test_l2_normalize_has_its_epsilon_under_the_root():
    v = torch.tensor([3e-4, 4e-4], dtype=torch.float64)  # length 5e-4, half of sqrt(1e-6)
    torch.testing.assert_close(l2_normalize(v, dim=0), v / math.sqrt(25e-8 + 1e-6))


def test_l2_normalize_is_finite_at_zero():
    v = torch.zeros(3, requires_grad=True)
    l2_normalize(v, dim=0).sum().backward()
    torch.testing.assert_close(v.grad, torch.full((3,), 1e3))


def test_scale_zero_mixes_uniformly():
    router = build_router(SoftConfig(slots_per_expert=2, scale_init=0.0), dim=D, num_experts=E)
    init_weights(router, seed=0)
    routing = router(torch.randn(G, S, D), torch.ones(G, S))
    torch.testing.assert_close(routing.dispatch_GSEC, torch.full((G, S, E, 2), 1 / S))
    torch.testing.assert_close(routing.combine_GSEC, torch.full((G, S, E, 2), 1 / (E * 2)))
    assert routing.stats["gate_entropy_nats"].item() == pytest.approx(math.log(E), rel=1e-6)
    assert routing.stats["load_cv"].item() == pytest.approx(0, abs=1e-5)


def test_logits_are_bounded_by_the_scale():
    router = build_router(SoftConfig(scale_init=2.0), dim=D, num_experts=E)
    init_weights(router, seed=0)
    x = 1e4 * torch.randn(G, S, D)
    ratio = router(x, torch.ones(G, S)).dispatch_GSEC.log()
    assert (ratio.amax(1) - ratio.amin(1)).max() <= 2 * 2.0 + 1e-5


def test_weights_sum_to_one():
    router = build_router(SoftConfig(slots_per_expert=2, scale_init=20.0), dim=D, num_experts=E)
    init_weights(router, seed=0)
    valid = torch.ones(G, S)
    valid[0, 3:] = 0
    routing = router(torch.randn(G, S, D), valid)
    torch.testing.assert_close(routing.dispatch_GSEC.sum(1), torch.ones(G, E, 2))
    torch.testing.assert_close(routing.combine_GSEC.sum((2, 3)), torch.ones(G, S))


def test_gradients():
    layer = build_layer(SoftConfig(slots_per_expert=2, scale_init=3.0)).double()
    x = torch.randn(G, S, D, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def forward(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, given, (x, torch.ones(G).double()))[0]

    assert "router.scale" in names
    assert torch.autograd.gradcheck(forward, (x, *values), fast_mode=True)


def test_no_scale_without_normalisation():
    def names(normalize: bool) -> set[str]:
        router: nn.Module = build_router(SoftConfig(normalize=normalize), dim=D, num_experts=E)
        return {name for name, _ in router.named_parameters()}

    assert names(True) == {"phi_DEC", "scale"}
    assert names(False) == {"phi_DEC"}


def test_slots_are_configured_and_checked():
    assert SoftConfig(slots_per_expert=3).slots(num_tokens=1, num_experts=64) == 3
    with pytest.raises(ValueError, match="slots_per_expert must be at least 1, got 0"):
        SoftConfig(slots_per_expert=0)
