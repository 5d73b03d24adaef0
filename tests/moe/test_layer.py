"""Position of MoE layers, routing groups, the router's arguments, and compilation without a graph break."""

import pytest
import torch
from torch import Tensor

from moe.init import mix, split
from moe.layer import MoEConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers import ROUTERS, ExpertChoiceConfig, MixtureConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from tests.moe.parts import build_layer, randn

S, D = 6, 8

each_kind = pytest.mark.parametrize("router", [kind() for kind in ROUTERS], ids=lambda r: r.kind)


@pytest.mark.parametrize(
    ("layers", "depth", "blocks"),
    [
        ("every_2", 5, (1, 3)),
        ("last_1", 4, (3,)),
        ("last_12", 12, tuple(range(12))),
        ((5, 1, 1), 6, (1, 5)),
        ((0,), 1, (0,)),
        ("last_5_odd", 32, (23, 25, 27, 29, 31)),  # V-MoE-H/14, Last-5
        ("last_2_odd", 5, (1, 3)),
    ],
)
def test_placement(layers, depth, blocks):
    assert MoEConfig(layers=layers).blocks(depth) == blocks


@pytest.mark.parametrize(
    ("layers", "depth"),
    [("every_2", 1), ("last_5", 4), ("last_3_odd", 4), ((), 4), ((1, 4), 4), ((-1, 2), 4)],
)
def test_placement_that_does_not_fit(layers, depth):
    with pytest.raises(ValueError, match=rf"does not fit depth={depth}: blocks are 0 .. {depth - 1}"):
        MoEConfig(layers=layers).blocks(depth)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 1}, "num_experts must be at least 2, got 1"),
        ({"expert_dim": 0}, "expert_dim must be at least 1, got 0"),
        ({"images_per_group": 0}, "images_per_group must be at least 1, got 0"),
        ({"expert_dropout": 1.0}, r"expert_dropout must lie in \[0, 1\), got 1.0"),
        ({"expert_dropout": -0.1}, r"expert_dropout must lie in \[0, 1\), got -0.1"),
        *(
            ({"layers": layers}, f"layers must be every_2, last_<n>, .* or block indices, got '{layers}'")
            for layers in ("every_3", "last_0", "last_", "last_2_even", " every_2")
        ),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**fields)


@each_kind
def test_groups_are_consecutive_images(router):
    """Images 0 and 1 share a group: image 0 depends on image 1, and not on image 2."""
    layer, x = build_layer(router, images_per_group=2), randn(4, S, D)
    y, routing = layer(x, torch.ones(4))
    assert y.shape == x.shape
    assert routing.aux_G.shape == (2,)
    other = torch.cat([x[:1], torch.randn(1, S, D), x[2:]])
    torch.testing.assert_close(layer(other, torch.ones(4))[0][2:], y[2:])
    x_GSD = x[:2].reshape(1, 2 * S, D)
    as_one_group = layer.router(x_GSD, torch.ones(1, 2 * S))
    expected = as_one_group.combine(layer.experts(as_one_group.dispatch(x_GSD)))
    torch.testing.assert_close(y[:2], expected.view(2, S, D))


def test_images_must_fill_groups():
    with pytest.raises(ValueError, match="images_per_group=2 does not divide a batch of 3"):
        build_layer(SoftConfig(), images_per_group=2)(torch.randn(3, S, D), torch.ones(3))


def test_dropped_tokens_are_zero():
    """All tokens choose expert 0, which seats one. No token receives the bias that expert 1 computes."""
    layer = build_layer(TokenChoiceConfig(capacity_factor=0.4), num_experts=2)
    torch.nn.init.zeros_(layer.router.gate_DE)
    y, _ = layer(torch.randn(1, S, D), torch.ones(1))
    assert y[0, 0].abs().min() > 0
    assert y[0, 1:].eq(0).all()


@each_kind
def test_router_gets_keys_of_block_image_and_token(router):
    """Keys are `split(mix(keys_B, block), tokens)`, image after image; random blocks have other keys."""
    layer, calls = build_layer(router, images_per_group=2, block=5), []
    layer.router.register_forward_hook(lambda module, args, routing: calls.append(args))
    keys_B, x, valid = torch.tensor([3, 1, 4, 1]), torch.randn(4, S, D), torch.tensor([1.0, 1, 0, 1])
    layer(x, valid, keys_B)
    layer(x, valid, keys_B, RoutingOverrides(random_blocks=(5,)))
    layer(x, valid)
    x_GSD, valid_GS, keys_GS, overrides, random_GS = calls[0]
    assert torch.equal(x_GSD, x.view(2, 2 * S, D))
    assert valid_GS.tolist() == [[1.0] * 2 * S, [0.0] * S + [1.0] * S]
    assert torch.equal(keys_GS.view(4, S), split(mix(keys_B, 5), S))
    assert overrides is AS_TRAINED
    assert random_GS is None
    assert not set(calls[1][4].flatten().tolist()) & set(keys_GS.flatten().tolist())
    assert calls[2][2] is calls[2][4] is None


@pytest.mark.parametrize(
    ("router", "others"),
    [
        pytest.param(
            TokenChoiceConfig(k=2, capacity_factor=0.8, balance_weight=0.1, z_weight=0.1),
            [
                RoutingOverrides(k=1, priority="sum"),
                RoutingOverrides(capacity_factor=0.4, priority="max"),
                RoutingOverrides(experts=2),
            ],
            marks=pytest.mark.smoke,
        ),
        *(
            pytest.param(router, others, marks=pytest.mark.slow)
            for router, others in [
                (TokenChoiceConfig(k=2, affinity=SinkhornConfig(), combine="affinity", priority="max"), []),
                (
                    ExpertChoiceConfig(noise_std=1.0),
                    [RoutingOverrides(capacity_factor=2.0, experts=(0, 2))],
                ),
                (ExpertChoiceConfig(affinity=SparseTransportConfig(iterations=30)), []),
                (
                    SoftConfig(slots_per_expert=2, noise_std=1.0),
                    [RoutingOverrides(experts=2), RoutingOverrides(random_blocks=(0,))],
                ),
                (MixtureConfig(level="hierarchical"), [RoutingOverrides(experts=(0, 2))]),
            ]
        ),
    ],
    ids=["token_choice", "sinkhorn", "expert_choice", "sparse_transport", "soft", "mixture"],
)
def test_compiled_without_a_break_it_is_the_same(router, others):
    """Forward and backward of the whole layer, with keys; one compiled function obeys its overrides."""
    layer = build_layer(router, images_per_group=2, expert_dropout=0.1)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, valid = randn(4, S, D), torch.tensor([1.0, 1, 1, 0])
    keys_B, first = torch.arange(4), None
    for overrides in (AS_TRAINED, *others, AS_TRAINED):  # the last shows that nothing was compiled in
        got = outcome(compiled, layer, x, valid, keys_B, overrides)
        torch.testing.assert_close(got, outcome(layer, layer, x, valid, keys_B, overrides))
        first = got["y"] if first is None else first
        assert torch.allclose(got["y"], first) == (overrides is AS_TRAINED), "the overrides must matter"
    if others:
        got = outcome(compiled, layer, x, valid, None, AS_TRAINED)
        torch.testing.assert_close(got, outcome(layer, layer, x, valid, None, AS_TRAINED))
        assert not torch.allclose(got["y"], first), "the keys must matter"


def outcome(function, layer, x: Tensor, valid: Tensor, keys, overrides) -> dict[str, Tensor]:
    """Output, auxiliary loss, statistics and gradients."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y, routing = function(leaf, valid, keys, overrides)
    (y.square().sum() + routing.aux_G.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "aux": routing.aux_G.detach(), "x": leaf.grad, **routing.stats, **gradients}
