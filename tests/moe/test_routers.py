"""What every router must satisfy. A new router joins by being in ROUTERS."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moe.init import init_weights
from moe.layer import MoEConfig, MoELayer
from moe.routers import ROUTERS, ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig, build_router
from moe.routing import Routing, routing_stats

G, S, D, E = 3, 16, 8, 4

each_router = pytest.mark.parametrize("config", [kind() for kind in ROUTERS], ids=lambda c: c.kind)


def build(config: RouterConfig, num_experts: int = E) -> nn.Module:
    router = build_router(config, dim=D, num_experts=num_experts)
    init_weights(router, seed=0)
    return router


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def run(router: nn.Module, x_GSD: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Tokens through slots and back, with experts that do nothing."""
    routing = router(x_GSD, torch.ones(x_GSD.shape[:2]) if valid_GS is None else valid_GS)
    return routing.combine(routing.dispatch(x_GSD))


def dense(routing: Routing, G: int, S: int, E: int) -> tuple[Tensor, Tensor]:
    """The D_GSEC and C_GSEC of Routers in Vision MoE, eq. 2: what comes out when identity matrices go in.

    Every token of the batch is its own unit vector, so a token seen by another group would show up.
    """
    D_ENT = routing.dispatch(torch.eye(G * S).view(G, S, G * S))
    C = D_ENT.shape[1] // G
    D_GECGS = D_ENT.view(E, G, C, G, S).transpose(0, 1)
    slots = torch.eye(G * E * C).view(G, E, C, G * E * C).transpose(0, 1).flatten(1, 2)
    C_GSGEC = routing.combine(slots).view(G, S, G, E, C)
    same = torch.eye(G, dtype=torch.bool)
    assert D_GECGS.permute(0, 3, 1, 2, 4)[~same].eq(0).all(), "a slot holds a token of another group"
    assert C_GSGEC.transpose(1, 2)[~same].eq(0).all(), "a token got the output of another group's slot"
    each = torch.arange(G)
    return D_GECGS[each, :, :, each].permute(0, 3, 1, 2), C_GSGEC[each, :, each]


def test_defaults_are_of_the_table():
    assert {kind().kind for kind in ROUTERS} == {"token_choice", "expert_choice", "soft"}


@each_router
def test_shapes_are_static(config):
    router, C = build(config), config.slots(num_tokens=S, num_experts=E)
    for seed in range(3):
        x, valid = tokens(G, S, seed=seed), torch.rand(G, S).round()
        routing = router(x, valid)
        assert routing.dispatch(x).shape == (E, G * C, D)
        assert routing.combine(torch.zeros(E, G * C, D)).shape == x.shape
        assert routing.aux_G.shape == (G,)


@each_router
@settings(deadline=None, max_examples=30)
@given(
    G=st.integers(1, 3),
    S=st.integers(3, 12),
    E=st.integers(2, 5),
    levels=st.sampled_from([1, 2, 100]),
    seed=st.integers(0, 2**31),
)
def test_slots_hold_at_most_one_token(config, G, S, E, levels, seed):
    """C slots, each with at most one token's weight: an expert never works on more than C tokens."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-levels, levels + 1, (G, S, D), generator=g).float()  # few levels: many ties
    valid = torch.randint(0, 4, (G, S), generator=g).clamp(max=1).float()
    D_GSEC, C_GSEC = dense(build(config, E)(x, valid), G, S, E)
    assert D_GSEC.min() >= 0
    assert C_GSEC.min() >= 0
    assert D_GSEC.sum(1).max() <= 1 + 1e-5
    assert C_GSEC.sum((2, 3)).max() <= 1 + 1e-5
    some_valid = valid.any(1)  # a group of padding alone may mix anything, as long as it is finite
    assert D_GSEC[some_valid][valid[some_valid] == 0].eq(0).all(), "padding sits in a slot"


@each_router
def test_einsum_form_equals_layer(config):
    """y_t = sum_ec C_tec f_e(sum_s D_sec x_s): Routers in Vision MoE, eq. 2."""
    layer = MoELayer(MoEConfig(num_experts=E, router=config), dim=D, hidden=16)
    init_weights(layer, seed=0)
    nn.init.normal_(layer.experts.b_out_ED)  # an empty slot then computes something that must not leak
    x, valid = tokens(G, S), torch.ones(G)
    D_GSEC, C_GSEC = dense(layer.router(x, torch.ones(G, S)), G, S, E)
    slots = torch.einsum("gsec,gsd->egcd", D_GSEC, x)
    outputs = layer.experts(slots.flatten(1, 2)).view_as(slots)
    expected = torch.einsum("gsec,egcd->gsd", C_GSEC, outputs)
    torch.testing.assert_close(layer(x, valid)[0], expected)
    assert expected.abs().mean() > 0.1


@each_router
def test_gradient_reaches_every_parameter(config):
    x, router = tokens(G, S).requires_grad_(), build(config)
    routing = router(x, torch.ones(G, S))
    (routing.combine(routing.dispatch(x)).square().sum() + routing.aux_G.mean()).backward()
    assert x.grad.isfinite().all()
    for name, p in router.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().sum() > 0, name


@each_router
def test_groups_are_independent(config):
    router, x = build(config), tokens(G, S)
    for g in range(G):
        alone, ones = x[g : g + 1], torch.ones(1, S)
        torch.testing.assert_close(run(router, x)[g : g + 1], run(router, alone))
        torch.testing.assert_close(router(x, torch.ones(G, S)).aux_G[g : g + 1], router(alone, ones).aux_G)


@each_router
def test_bfloat16_stays_bfloat16_and_is_routed_in_float32(config):
    router, x = build(config).to(torch.bfloat16), tokens(G, S).to(torch.bfloat16)
    out = run(router, x, torch.ones(G, S, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
    exact = run(router.float(), x.float())
    assert (out.float() - exact).abs().max() < 0.02 * exact.abs().max()


@each_router
def test_float64_stays_float64(config):
    router, x = build(config).double(), tokens(G, S).double().requires_grad_()
    routing = router(x, torch.ones(G, S))
    y = routing.combine(routing.dispatch(x))
    assert y.dtype == routing.aux_G.dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x: run(router, x), x, fast_mode=True)


@pytest.mark.parametrize(
    "config",
    [
        TokenChoiceConfig(capacity_factor=E),
        TokenChoiceConfig(k=3, capacity_factor=E),
        ExpertChoiceConfig(),
        ExpertChoiceConfig(capacity_factor=2.5),
        SoftConfig(slots_per_expert=2),
        SoftConfig(normalize=False),
    ],
    ids=repr,
)
def test_token_order_does_not_matter(config):
    """Given room for everybody; without it token choice drops the last comers (test_token_choice)."""
    router, x, order = build(config), tokens(G, S), torch.randperm(S)
    torch.testing.assert_close(run(router, x)[:, order], run(router, x[:, order]))


@each_router
@pytest.mark.parametrize("images_per_group", [1, 2])
def test_padding_does_not_reach_valid_images(config, images_per_group):
    """Whatever the padding images hold, the others compute the same; alone in their groups, as without it."""
    moe = MoEConfig(num_experts=E, router=config, images_per_group=images_per_group)
    layer = MoELayer(moe, dim=D, hidden=16)
    init_weights(layer, seed=0)
    valid = torch.tensor([0.0, 1, 1, 0, 1, 1])
    x = tokens(6, S)
    other = torch.where(valid.bool()[:, None, None], x, 100 * tokens(6, S, seed=1))
    torch.testing.assert_close(layer(x, valid)[0][valid == 1], layer(other, valid)[0][valid == 1])
    if images_per_group == 1:
        real = x[valid == 1]
        torch.testing.assert_close(layer(x, valid)[0][valid == 1], layer(real, torch.ones(4))[0])
    else:
        with_mask, without = layer(x, valid)[0], layer(x, torch.ones(6))[0]
        assert not torch.allclose(with_mask[1], without[1]), "the mask is ignored"


@each_router
def test_padding_takes_no_seat(config):
    """Also where it comes first and every expert has more room than there are tokens."""
    valid = torch.ones(G, S)
    valid[0, :5] = 0
    valid[1, 2:] = 0
    D_GSEC, _ = dense(build(config)(tokens(G, S), valid), G, S, E)
    assert D_GSEC[valid == 0].eq(0).all()
    assert D_GSEC[0, 5:].sum() > 0
    assert D_GSEC[1, :2].sum() > 0


@each_router
def test_group_of_padding_alone_is_finite(config):
    router, x = build(config), torch.zeros(2, S, D).requires_grad_()
    routing = router(x, torch.zeros(2, S))
    y = routing.combine(routing.dispatch(x))
    assert y.isfinite().all()
    assert routing.aux_G.eq(0).all()
    assert all(value.isfinite() for value in routing.stats.values())
    (y.square().sum() + y.sum() + routing.aux_G.sum()).backward()
    for tensor in (x, *router.parameters()):
        assert tensor.grad.isfinite().all()


@each_router
def test_stats(config):
    """The same detached scalars for all; dropped tokens as counted, entropy as defined, padding left out."""
    x, valid = tokens(G, S), torch.ones(G, S)
    valid[0, 11:] = 0
    routing = build(config)(x.requires_grad_(), valid)
    reference = routing_stats(
        gates_GSE=torch.full((1, 2, 2), 0.5),
        load_GE=torch.ones(1, 2),
        seats_GS=torch.ones(1, 2),
        valid_GS=torch.ones(1, 2),
    )
    assert set(routing.stats) == set(reference) == {"dropped_frac", "load_cv", "gate_entropy_nats"}
    for name, value in routing.stats.items():
        assert value.shape == (), name
        assert not value.requires_grad, name
        assert value.dtype == torch.float32, name
    D_GSEC, _ = dense(routing, G, S, E)
    dropped = D_GSEC.sum((2, 3)).eq(0) & valid.bool()
    assert routing.stats["dropped_frac"].item() == pytest.approx(dropped.sum().item() / (G * S - 5))
    assert (dropped.sum() > 0) == (not isinstance(config, SoftConfig)), "the case must drop something"
