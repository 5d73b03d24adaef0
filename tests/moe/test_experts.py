"""Experts: separate MLPs by formula, dropout that follows its keys, and subsets that run alone."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts import Experts, chosen_alone, grouped_matmul_fits
from moe.init import dropout, init_weights, mix
from moe.overrides import RoutingOverrides
from moe.routers import ExpertChoiceConfig, MixtureConfig, SoftConfig, TokenChoiceConfig
from tests.moe.parts import build_layer, randn

E, N, D, HIDDEN = 3, 5, 8, 16
ROWS = randn(E, N, D, seed=1)
KEYS_EN = mix(torch.arange(E * N).view(E, N), 4)


def build(**fields) -> Experts:
    """Biases are not at their zero start."""
    experts = Experts(E, D, HIDDEN, **fields)
    init_weights(experts, seed=0)
    for bias in (experts.b_in_EF, experts.b_out_ED):
        torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(0))
    return experts


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_experts_are_separate_mlps(activation):
    """Dense, activation, Dense, with biases; row n of expert e sees weights e only."""
    experts, x_END = build(activation=activation), ROWS
    for e in range(E):
        hidden = x_END[e] @ experts.w_in_EDF[e] + experts.b_in_EF[e]
        gelu = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        active = gelu if activation == "gelu" else hidden.clamp(min=0)
        expected = active @ experts.w_out_EFD[e] + experts.b_out_ED[e]
        torch.testing.assert_close(experts(x_END)[e], expected)
    assert not torch.allclose(F.gelu(hidden), gelu, rtol=1e-5, atol=1e-5), "the case must tell GELUs apart"


def test_biases_keep_their_precision_under_autocast():
    experts = build()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert experts(ROWS).dtype == torch.float32


def test_dropout_is_after_both_layers_with_different_numbers():
    """V-MoE section 3.5; the output is dropped with its bias. A row depends on its own key alone."""
    experts, keys_EN, x_END = build(dropout=0.3), KEYS_EN, ROWS
    hidden = torch.einsum("end,edf->enf", x_END, experts.w_in_EDF) + experts.b_in_EF.unsqueeze(1)
    hidden = dropout(F.gelu(hidden, approximate="tanh"), 0.3, mix(keys_EN, 0))
    out = torch.einsum("enf,efd->end", hidden, experts.w_out_EFD) + experts.b_out_ED.unsqueeze(1)
    torch.testing.assert_close(experts(x_END, keys_EN), dropout(out, 0.3, mix(keys_EN, 1)))
    first, second = (dropout(torch.ones(E, N, D), 0.3, mix(keys_EN, i)) for i in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(experts(x_END), build()(x_END))  # without keys there is no dropout
    torch.testing.assert_close(experts(x_END[:, 2:4], keys_EN[:, 2:4]), experts(x_END, keys_EN)[:, 2:4])


def test_layers_and_slots_drop_different_numbers():
    """All tokens are equal, yet all rows differ, and another block drops other numbers."""

    def output(block: int) -> Tensor:
        layer = build_layer(SoftConfig(slots_per_expert=2), num_experts=2, expert_dropout=0.5, block=block)
        torch.nn.init.ones_(layer.experts.b_out_ED)
        seen = []
        layer.experts.register_forward_hook(lambda module, args, y_END: seen.append(y_END.flatten(0, 1)))
        layer(torch.ones(3, 4, D), torch.ones(3), torch.arange(3))
        return seen[0]

    first, other = output(1), output(3)
    assert len({tuple(row.tolist()) for row in first}) == len(first) == 2 * 3 * 2
    assert not torch.equal(first == 0, other == 0)


CONFIGS = (
    TokenChoiceConfig(k=2, capacity_factor=0.7, priority="max"),
    ExpertChoiceConfig(capacity_factor=1.5),
    SoftConfig(slots_per_expert=2, scale_init=8.0),
    MixtureConfig(level="hierarchical"),
)
each_router = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
X_BSD = 2 * randn(6, 12, D)


def both_ways(layer, experts: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Outputs with the others' weights at zero (with gradients), and of the chosen experts alone."""
    valid_B, overrides = torch.tensor([1.0, 1, 1, 0, 1, 1]), RoutingOverrides(experts=experts)
    x = X_BSD.to(layer.experts.w_in_EDF.dtype)
    masked = layer(x, valid_B, None, overrides)[0].detach()
    with torch.no_grad():
        return masked, layer(x, valid_B, None, overrides)[0]


@pytest.mark.parametrize(("experts", "images_per_group"), [(1, 1), (3, 2), ((3, 0, 1), 2)])
@each_router
def test_chosen_experts_alone_equal_all_experts_with_the_others_masked(config, experts, images_per_group):
    """The weights of the other experts are not read: zero times NaN would be NaN."""
    layer = build_layer(config, images_per_group=images_per_group).double()
    masked, alone = both_ways(layer, experts)
    torch.testing.assert_close(alone, masked, rtol=1e-12, atol=1e-12)
    if isinstance(experts, tuple):
        with torch.no_grad():
            for weight in layer.experts.parameters():
                weight[2] = torch.nan
        masked, again = both_ways(layer, experts)
        assert masked.isnan().any()
        assert torch.equal(again, alone)


def test_only_the_slots_of_chosen_experts_are_computed():
    """Six images, two of four experts for each, three slots: 6 x 2 x 3 rows; images choose differently."""
    layer, seen = build_layer(SoftConfig(slots_per_expert=3, scale_init=8.0)), []
    rows = layer.experts.rows
    layer.experts.rows = lambda x_MD, count_E: seen.append((x_MD, count_E)) or rows(x_MD, count_E)
    with torch.no_grad():
        _, routing = layer(X_BSD, torch.ones(6), None, RoutingOverrides(experts=2))
    ((x_MD, count_E),) = seen
    assert len(x_MD) == count_E.sum() == 6 * 2 * 3
    assert (count_E == 3 * routing.kept_GE.sum(0)).all()
    assert len(set(count_E.tolist())) > 1


def test_static_shapes_where_they_are_needed():
    """All experts run with gradients, if they are of a subclass (over ranks), and if all are chosen."""

    class Elsewhere(Experts):
        pass

    layer, some = build_layer(SoftConfig()), RoutingOverrides(experts=2)
    _, routing = layer(X_BSD, torch.ones(6), None, some)
    assert chosen_alone(layer.experts, routing, some) is None
    with torch.no_grad():
        assert chosen_alone(layer.experts, routing, some) == 2
        assert chosen_alone(Elsewhere(4, D, HIDDEN), routing, some) is None
        assert chosen_alone(layer.experts, routing, RoutingOverrides(experts=4)) is None
        assert chosen_alone(layer.experts, replace(routing, kept_GE=None), some) is None


@pytest.mark.parametrize("counts", [(2, 0, 6), (0, 8, 0)])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_by_expert(counts, activation, dtype):
    """Each row is processed by the expert that it is sorted to, one after another in float64 and grouped in
    float32; rows of no expert become finite."""
    experts, x_MD = build(activation=activation).to(dtype), randn(8, D, seed=1).to(dtype)
    count_E = torch.tensor(counts)
    expected = [
        experts(x_MD[m].expand(E, 1, D))[e, 0]
        for m, e in enumerate(e for e, count in enumerate(counts) for _ in range(count))
    ]
    with torch.no_grad():
        assert grouped_matmul_fits(experts.w_in_EDF) == (dtype == torch.float32)
        y_MD = experts.rows(F.pad(x_MD, (0, 0, 0, 3)), count_E)
        torch.testing.assert_close(y_MD[:8], torch.stack(expected))
        assert y_MD[8:].isfinite().all()


@pytest.mark.gpu
@each_router
def test_grouped_matmuls_of_a_gpu(config):
    """bfloat16: equal up to its rounding."""
    layer = build_layer(config).cuda().bfloat16()
    x, valid_B, some = X_BSD.cuda().bfloat16(), torch.ones(6).cuda(), RoutingOverrides(experts=2)
    masked = layer(x, valid_B, None, some)[0].detach()
    with torch.no_grad():
        alone = layer(x, valid_B, None, some)[0]
    torch.testing.assert_close(alone, masked, rtol=0.05, atol=0.05)
