"""Where MoE layers stand, what their groups are, and what a wrong config says."""

import pytest
import torch
import torch.nn.functional as F

from moe.experts import Experts
from moe.init import init_weights
from moe.layer import MoEConfig, MoELayer
from moe.routers import ExpertChoiceConfig, SoftConfig, TokenChoiceConfig

S, D = 6, 8


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
    ],
)
def test_placement(layers, depth, blocks):
    assert MoEConfig(layers=layers).blocks(depth) == blocks


@pytest.mark.parametrize(
    ("layers", "depth"), [("every_2", 1), ("last_5", 4), ((), 4), ((1, 4), 4), ((-1, 2), 4)]
)
def test_placement_that_does_not_fit(layers, depth):
    with pytest.raises(ValueError, match=rf"does not fit depth={depth}: blocks are 0 .. {depth - 1}"):
        MoEConfig(layers=layers).blocks(depth)


@pytest.mark.parametrize("layers", ["every_3", "last_0", "last_", "last_-1", "all", " every_2"])
def test_unknown_placement(layers):
    with pytest.raises(
        ValueError, match=f"layers must be every_2, last_<n> or block indices, got '{layers}'"
    ):
        MoEConfig(layers=layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 1}, "num_experts must be at least 2, got 1"),
        ({"images_per_group": 0}, "images_per_group must be at least 1, got 0"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**fields)


def test_experts_are_separate_mlps():
    """Dense, tanh GELU, Dense, with biases; row n of expert e sees weights e only."""
    experts = Experts(3, D, 16)
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    x_END = torch.randn(3, 5, D)
    for e in range(3):
        hidden = x_END[e] @ experts.w_in_EDF[e] + experts.b_in_EF[e]
        gelu = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        expected = gelu @ experts.w_out_EFD[e] + experts.b_out_ED[e]
        torch.testing.assert_close(experts(x_END)[e], expected)
    assert not torch.allclose(F.gelu(hidden), gelu, rtol=1e-5, atol=1e-5), "the case must tell GELUs apart"


@pytest.mark.parametrize(
    "router", [TokenChoiceConfig(), ExpertChoiceConfig(), SoftConfig()], ids=lambda r: r.kind
)
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
    "router", [TokenChoiceConfig(), ExpertChoiceConfig(), SoftConfig()], ids=lambda r: r.kind
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
