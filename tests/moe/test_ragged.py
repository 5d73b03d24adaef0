"""Only the chosen experts run: the numbers of all experts with the others left out, from fewer of them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moe.experts import Experts, chosen_alone
from moe.init import init_weights
from moe.layer import MoEConfig, MoELayer
from moe.overrides import RoutingOverrides
from moe.patch_net import PatchNet, PatchNetConfig
from moe.presets import PRESETS
from moe.routers import (
    ExpertChoiceConfig,
    MixtureConfig,
    RouterConfig,
    SoftConfig,
    TokenChoiceConfig,
)
from moe.vit import ViT

B, S, D, E, HIDDEN = 6, 12, 8, 4, 16
CONFIGS = (
    TokenChoiceConfig(k=2, capacity_factor=0.7, priority="max"),
    TokenChoiceConfig(k=1, capacity_factor=2.0),
    ExpertChoiceConfig(capacity_factor=1.5),
    SoftConfig(slots_per_expert=2, scale_init=8.0),
    SoftConfig(scale_init=8.0, dispatch="uniform"),
    MixtureConfig(),
    MixtureConfig(level="image"),
    MixtureConfig(level="hierarchical"),
)
SUBSETS = (1, 2, 3, (0,), (3,), (1, 2), (3, 0, 1))
each_router = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.kind}-{getattr(c, 'level', getattr(c, 'dispatch', ''))}"
)


def build(config: RouterConfig, **moe_fields) -> MoELayer:
    """Its experts say something even of nothing."""
    layer = MoELayer(MoEConfig(num_experts=E, router=config, **moe_fields), dim=D, hidden=HIDDEN)
    init_weights(layer, seed=0)
    nn.init.normal_(layer.experts.b_out_ED, generator=torch.Generator().manual_seed(0))
    return layer


def images() -> Tensor:
    return 2 * torch.randn(B, S, D, generator=torch.Generator().manual_seed(0))


def both_ways(layer: MoELayer, experts: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """All experts with the others' weights at zero, as with gradients; and the chosen ones alone."""
    valid_B, overrides = torch.tensor([1.0, 1, 1, 0, 1, 1]), RoutingOverrides(experts=experts)
    x = images().to(layer.experts.w_in_EDF.dtype)
    masked = layer(x, valid_B, None, overrides)[0].detach()
    with torch.no_grad():
        return masked, layer(x, valid_B, None, overrides)[0]


@pytest.mark.parametrize("images_per_group", [1, 2])
@pytest.mark.parametrize("experts", SUBSETS, ids=str)
@each_router
def test_the_numbers_of_all_experts_with_the_others_left_out(config, experts, images_per_group):
    masked, alone = both_ways(build(config, images_per_group=images_per_group), experts)
    torch.testing.assert_close(alone, masked, rtol=1e-6, atol=1e-6)
    exact = both_ways(build(config, images_per_group=images_per_group).double(), experts)
    torch.testing.assert_close(*exact, rtol=1e-12, atol=1e-12)


@each_router
def test_experts_that_are_left_out_are_not_read(config):
    """Zero times NaN would be NaN."""
    layer = build(config)
    expected = both_ways(layer, (0, 2))[1]
    with torch.no_grad():
        for weight in layer.experts.parameters():
            weight[[1, 3]] = torch.nan
    masked, alone = both_ways(layer, (0, 2))
    assert masked.isnan().any()
    assert torch.equal(alone, expected)


def test_only_the_chosen_experts_slots_are_computed():
    """Six images, two of four experts for each, three slots: 6 x 2 x 3 rows; images choose differently."""
    layer = build(SoftConfig(slots_per_expert=3, scale_init=8.0))
    seen: list[tuple[Tensor, Tensor]] = []
    rows = layer.experts.rows

    def spy(x_MD: Tensor, count_E: Tensor) -> Tensor:
        seen.append((x_MD, count_E))
        return rows(x_MD, count_E)

    layer.experts.rows = spy
    with torch.no_grad():
        _, routing = layer(images(), torch.ones(B), None, RoutingOverrides(experts=2))
    (x_MD, count_E), *others = seen
    assert not others
    assert len(x_MD) == count_E.sum() == 6 * 2 * 3
    assert (count_E == 3 * routing.kept_GE.sum(0)).all()
    assert len(set(count_E.tolist())) > 1
    with torch.no_grad():
        x_END = routing.dispatch(images())
    for e, rows_of_e in enumerate(x_MD.split(count_E.tolist())):  # in any order of the groups that keep e
        slots_of_e = x_END[e].view(B, 3, D)[routing.kept_GE[:, e]].flatten(0, 1)
        ordered = [rows[rows[:, 0].argsort()] for rows in (rows_of_e, slots_of_e)]
        torch.testing.assert_close(*ordered)


@each_router
def test_all_experts_are_as_trained(config):
    layer = build(config)
    with torch.no_grad():
        expected = layer(images(), torch.ones(B))[0]
        for experts in (E, tuple(range(E))):
            assert torch.equal(
                layer(images(), torch.ones(B), None, RoutingOverrides(experts=experts))[0], expected
            )


def test_static_shapes_where_they_are_wanted():
    """With gradients, with other kinds of experts (over ranks), and for all experts."""

    class Elsewhere(Experts):
        pass

    layer, some = build(SoftConfig()), RoutingOverrides(experts=2)
    _, routing = layer(images(), torch.ones(B), None, some)
    assert chosen_alone(layer.experts, routing, some) is None
    with torch.no_grad():
        assert chosen_alone(layer.experts, routing, some) == 2
        assert chosen_alone(Elsewhere(E, D, HIDDEN), routing, some) is None
        assert chosen_alone(layer.experts, routing, RoutingOverrides(experts=E)) is None
        assert chosen_alone(layer.experts, replace(routing, kept_GE=None), some) is None


@pytest.mark.parametrize("counts", [(2, 0, 5, 1), (0, 0, 8, 0), (2, 2, 2, 2)])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_rows_by_expert(counts, activation):
    """Row m through the MLP of the expert that it is sorted to; in one kernel as well."""
    experts = Experts(E, D, HIDDEN, activation=activation)
    init_weights(experts, seed=0)
    for bias in (experts.b_in_EF, experts.b_out_ED):
        nn.init.normal_(bias, generator=torch.Generator().manual_seed(0))
    x_MD, count_E = torch.randn(8, D, generator=torch.Generator().manual_seed(1)), torch.tensor(counts)
    expected = [
        experts(x_MD[m].expand(E, 1, D))[e, 0]
        for m, e in enumerate(e for e, count in enumerate(counts) for _ in range(count))
    ]
    with torch.no_grad():
        torch.testing.assert_close(experts.rows(x_MD, count_E), torch.stack(expected))
        torch.testing.assert_close(experts.rows_in_groups(x_MD, count_E), torch.stack(expected))


def test_models_run_subsets_so():
    """The logits of a whole ViT, and of the net of patches."""
    moe = MoEConfig(num_experts=E, router=SoftConfig(scale_init=8.0), layers=(0, 1))
    model = ViT(replace(PRESETS["debug"], moe=moe))
    nn.init.normal_(model.head.weight)
    net = PatchNet(PatchNetConfig(image_size=8, patch_size=4, num_experts=8, total_hidden=64))
    cases = [(model, torch.randn(5, 3, 8, 8)), (net, torch.randn(5, 1, 8, 8))]
    for model, pixels in cases:
        for experts in (2, (1, 3)):
            overrides = RoutingOverrides(experts=experts)
            masked = model(pixels, routing_overrides=overrides)
            with torch.no_grad():
                alone = model(pixels, routing_overrides=overrides)
            if isinstance(model, ViT):
                masked, alone = masked.logits, alone.logits
            torch.testing.assert_close(alone, masked, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@each_router
def test_grouped_matmuls_of_a_gpu(config):
    """bfloat16: to its rounding; nothing is told to the host on the way."""
    layer = build(config).cuda().bfloat16()
    x, valid_B, some = images().cuda().bfloat16(), torch.ones(B).cuda(), RoutingOverrides(experts=2)
    masked = layer(x, valid_B, None, some)[0].detach()
    with torch.no_grad():
        alone = layer(x, valid_B, None, some)[0]
    torch.testing.assert_close(alone, masked, rtol=0.05, atol=0.05)
