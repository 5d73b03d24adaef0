"""Experts: separate MLPs by formula, their activations, and dropout that follows its keys."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts import Experts, activate
from moe.init import dropout, init_weights, mix, split
from moe.layer import MoEConfig, MoELayer
from moe.routers import SoftConfig, TokenChoiceConfig

E, N, D, HIDDEN = 3, 5, 8, 16


def build(**fields) -> Experts:
    """Biases are not at their zero start."""
    experts = Experts(E, D, HIDDEN, **fields)
    init_weights(experts, seed=0)
    for bias in (experts.b_in_EF, experts.b_out_ED):
        torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(0))
    return experts


def rows() -> Tensor:
    return torch.randn(E, N, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_experts_are_separate_mlps(activation):
    """Dense, activation, Dense, with biases; row n of expert e sees weights e only."""
    experts, x_END = build(activation=activation), rows()
    for e in range(E):
        hidden = x_END[e] @ experts.w_in_EDF[e] + experts.b_in_EF[e]
        gelu = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        active = gelu if activation == "gelu" else hidden.clamp(min=0)
        expected = active @ experts.w_out_EFD[e] + experts.b_out_ED[e]
        torch.testing.assert_close(experts(x_END)[e], expected)
    assert not torch.allclose(F.gelu(hidden), gelu, rtol=1e-5, atol=1e-5), "the case must tell GELUs apart"


def test_activations_by_hand():
    h = torch.tensor([-1.0, 0.0, 2.0])
    assert activate(h, "relu").tolist() == [0, 0, 2]
    inner = [math.sqrt(2 / math.pi) * (v + 0.044715 * v**3) for v in (-1, 0, 2)]
    expected = [v / 2 * (1 + math.tanh(u)) for v, u in zip((-1, 0, 2), inner, strict=True)]
    assert activate(h, "gelu").tolist() == pytest.approx(expected)


def test_dropout_needs_keys_and_a_probability():
    keys_EN = torch.arange(E * N).view(E, N)
    assert torch.equal(build(dropout=0.5)(rows()), build()(rows()))
    assert torch.equal(build()(rows(), keys_EN), build()(rows()))
    assert not torch.equal(build(dropout=0.5)(rows(), keys_EN), build()(rows()))


def test_dropout_is_after_both_layers_with_numbers_of_their_own():
    """V-MoE section 3.5; the output is dropped with its bias."""
    experts, keys_EN = build(dropout=0.3), mix(torch.arange(E * N).view(E, N), 4)
    x_END = rows()
    hidden = torch.einsum("end,edf->enf", x_END, experts.w_in_EDF) + experts.b_in_EF.unsqueeze(1)
    hidden = dropout(F.gelu(hidden, approximate="tanh"), 0.3, mix(keys_EN, 0))
    out = torch.einsum("enf,efd->end", hidden, experts.w_out_EFD) + experts.b_out_ED.unsqueeze(1)
    torch.testing.assert_close(experts(x_END, keys_EN), dropout(out, 0.3, mix(keys_EN, 1)))
    first, second = (dropout(torch.ones(E, N, D), 0.3, mix(keys_EN, i)) for i in (0, 1))
    assert not torch.equal(first, second)


def test_dropout_of_a_row_depends_on_its_key_alone():
    """So it does not matter which rank computes it, or among which other rows."""
    experts, keys_EN = build(dropout=0.3), mix(torch.arange(E * N).view(E, N), 4)
    x_END = rows()
    torch.testing.assert_close(experts(x_END[:, 2:4], keys_EN[:, 2:4]), experts(x_END, keys_EN)[:, 2:4])


def test_dropout_keeps_the_mean():
    """Over keys, the output's mean is that without dropout, up to GELU, which sees no dropout itself."""
    experts, n = build(dropout=0.2), 4000
    x_END = rows()[:, :1].expand(E, n, D)
    out = experts(x_END, split(torch.arange(E), n))
    error = out.mean(1) - experts(x_END)[:, 0]
    assert (error.abs() < 5 * out.std(1) / n**0.5).all()


def test_gradients_through_dropout():
    experts, keys_EN = build(dropout=0.3).double(), torch.arange(E * N).view(E, N)
    x_END = rows().double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, *_: experts(x, keys_EN), (x_END, *experts.parameters()), fast_mode=True
    )


@pytest.mark.parametrize("router", [TokenChoiceConfig(noise_std=0.0), SoftConfig()], ids=lambda r: r.kind)
def test_layer_drops_by_the_key_of_the_group(router):
    """The same keys, the same output; other keys another; without keys none. A microbatch is a slice."""
    config = MoEConfig(num_experts=4, router=router, images_per_group=2, expert_dropout=0.2)
    layer = MoELayer(config, dim=D, hidden=HIDDEN, block=3)
    init_weights(layer, seed=0)
    x = torch.randn(6, 4, D, generator=torch.Generator().manual_seed(0))
    keys_B, valid = mix(torch.arange(6), 9), torch.ones(6)
    y = layer(x, valid, keys_B)[0]
    assert torch.equal(layer(x, valid, keys_B)[0], y)
    torch.testing.assert_close(layer(x[2:4], valid[2:4], keys_B[2:4])[0], y[2:4])
    assert not torch.allclose(layer(x, valid, keys_B + 1)[0], y)
    assert not torch.allclose(layer(x, valid)[0], y)


def test_layers_and_slots_drop_on_their_own():
    """Equal tokens in all groups and slots: no two rows come out alike, and another block drops others."""

    def output(block: int) -> Tensor:
        config = MoEConfig(num_experts=2, router=SoftConfig(slots_per_expert=2), expert_dropout=0.5)
        layer = MoELayer(config, dim=D, hidden=HIDDEN, block=block)
        init_weights(layer, seed=0)
        torch.nn.init.ones_(layer.experts.b_out_ED)
        seen = []
        layer.experts.register_forward_hook(lambda module, args, y_END: seen.append(y_END.flatten(0, 1)))
        layer(torch.ones(3, 4, D), torch.ones(3), torch.arange(3))
        return seen[0]

    first, other = output(1), output(3)
    assert len({tuple(row.tolist()) for row in first}) == len(first) == 2 * 3 * 2
    assert not torch.equal(first == 0, other == 0)
