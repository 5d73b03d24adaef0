"""Where MoE layers stand, what their groups are, and what a wrong config says."""

import pytest
import torch
from torch import Tensor

from moe.init import init_weights, mix, split
from moe.layer import MoEConfig, MoELayer
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers import ROUTERS, ExpertChoiceConfig, MixtureConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig

S, D = 6, 8

each_kind = pytest.mark.parametrize("router", [kind() for kind in ROUTERS], ids=lambda r: r.kind)


def build(config: MoEConfig) -> MoELayer:
    layer = MoELayer(config, dim=D, hidden=16)
    init_weights(layer, seed=0)
    return layer


@pytest.mark.parametrize(
    ("layers", "depth", "blocks"),
    [
        ("every_2", 12, (1, 3, 5, 7, 9, 11)),
        ("every_2", 3, (1,)),
        ("last_1", 4, (3,)),
        ("last_6", 12, (6, 7, 8, 9, 10, 11)),
        ("last_12", 12, tuple(range(12))),
        ((5, 1), 6, (1, 5)),
        ((0,), 1, (0,)),
        ((3, 3, 1), 4, (1, 3)),
        ("last_5_odd", 32, (23, 25, 27, 29, 31)),  # V-MoE-H/14, Last-5
        ("last_2_odd", 12, (9, 11)),
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
    "layers", ["every_3", "last_0", "last_", "last_-1", "last_2_even", "all", " every_2"]
)
def test_unknown_placement(layers):
    with pytest.raises(
        ValueError, match=f"layers must be every_2, last_<n>, last_<n>_odd or block indices, got '{layers}'"
    ):
        MoEConfig(layers=layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 1}, "num_experts must be at least 2, got 1"),
        ({"images_per_group": 0}, "images_per_group must be at least 1, got 0"),
        ({"expert_dropout": 1.0}, r"expert_dropout must lie in \[0, 1\), got 1.0"),
        ({"expert_dropout": -0.1}, r"expert_dropout must lie in \[0, 1\), got -0.1"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**fields)


@each_kind
def test_groups_are_consecutive_images(router):
    """Images 0 and 1 share a group: 1 matters to 0, and 2 does not."""
    layer = build(MoEConfig(num_experts=2, images_per_group=2, router=router))
    x = torch.randn(4, S, D, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y, routing = layer(x, torch.ones(4))
    assert y.shape == x.shape
    assert routing.aux_G.shape == (2,)
    other = torch.cat([x[:1], torch.randn(1, S, D), x[2:]])
    torch.testing.assert_close(layer(other, torch.ones(4))[0][2:], y[2:])
    as_one_group = layer.router(x[:2].reshape(1, 2 * S, D), torch.ones(1, 2 * S))
    expected = as_one_group.combine(layer.experts(as_one_group.dispatch(x[:2].reshape(1, 2 * S, D))))
    torch.testing.assert_close(y[:2], expected.view(2, S, D))


@pytest.mark.parametrize(
    "router",
    [TokenChoiceConfig(), ExpertChoiceConfig(), SoftConfig(), MixtureConfig(level="image")],
    ids=lambda r: r.kind,
)
def test_images_per_group_matters(router):
    x = 3 * torch.randn(4, S, D, generator=torch.Generator().manual_seed(0))
    outputs = [
        build(MoEConfig(num_experts=4, images_per_group=n, router=router))(x, torch.ones(4))[0]
        for n in (1, 2, 4)
    ]
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[1], outputs[2])


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_images_must_fill_groups(batch):
    layer = build(MoEConfig(num_experts=2, images_per_group=2, router=SoftConfig()))
    with pytest.raises(ValueError, match=f"images_per_group=2 does not divide a batch of {batch}"):
        layer(torch.randn(batch, S, D), torch.ones(batch))


def test_dropped_tokens_come_out_as_zero():
    """Not as an expert's bias: a slot nobody sits in computes something, and nobody receives it."""
    layer = build(MoEConfig(num_experts=2, router=TokenChoiceConfig(capacity_factor=0.4)))
    torch.nn.init.ones_(layer.experts.b_out_ED)
    torch.nn.init.constant_(
        layer.router.gate_DE, 0.0
    )  # all want expert 0, which seats one; expert 1 is empty
    y, _ = layer(torch.randn(1, S, D), torch.ones(1))
    assert y[0, 0].abs().min() > 0
    assert y[0, 1:].eq(0).all()


@each_kind
def test_router_gets_keys_of_block_image_and_token(router):
    """`split(mix(keys_B, block), tokens)`, image after image; without keys none; random blocks others yet."""
    layer = MoELayer(MoEConfig(num_experts=2, images_per_group=2, router=router), dim=D, hidden=16, block=5)
    init_weights(layer, seed=0)
    calls = []
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
        pytest.param(
            TokenChoiceConfig(k=2, affinity=SinkhornConfig(), combine="affinity", priority="max"),
            [],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ExpertChoiceConfig(noise_std=1.0),
            [RoutingOverrides(capacity_factor=2.0, experts=(0, 2))],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ExpertChoiceConfig(affinity=SparseTransportConfig(iterations=30)), [], marks=pytest.mark.slow
        ),
        pytest.param(
            SoftConfig(slots_per_expert=2, noise_std=1.0),
            [RoutingOverrides(experts=2), RoutingOverrides(random_blocks=(0,))],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MixtureConfig(level="hierarchical"),
            [RoutingOverrides(experts=(0, 2))],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["token_choice", "sinkhorn", "expert_choice", "sparse_transport", "soft", "mixture"],
)
def test_compiled_without_a_break_it_is_the_same(router, others):
    """Forward and backward of the whole layer, with keys; one compiled function obeys its overrides."""
    layer = build(MoEConfig(num_experts=4, images_per_group=2, router=router, expert_dropout=0.1))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, valid = torch.randn(4, S, D, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 1, 1, 0])
    keys_B, first = torch.arange(4), None
    for overrides in (AS_TRAINED, *others, AS_TRAINED):  # and back: nothing was baked in
        got = outcome(compiled, layer, x, valid, keys_B, overrides)
        torch.testing.assert_close(got, outcome(layer, layer, x, valid, keys_B, overrides))
        first = got["y"] if first is None else first
        assert torch.allclose(got["y"], first) == (overrides is AS_TRAINED), "the overrides must matter"
    if others:
        got = outcome(compiled, layer, x, valid, None, AS_TRAINED)
        torch.testing.assert_close(got, outcome(layer, layer, x, valid, None, AS_TRAINED))
        assert not torch.allclose(got["y"], first), "the keys must matter"


def outcome(function, layer: MoELayer, x: Tensor, valid: Tensor, keys, overrides) -> dict[str, Tensor]:
    """Output, auxiliary loss, statistics and gradients."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y, routing = function(leaf, valid, keys, overrides)
    (y.square().sum() + routing.aux_G.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "aux": routing.aux_G.detach(), "x": leaf.grad, **routing.stats, **gradients}
