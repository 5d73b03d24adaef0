"""Laws that every router satisfies, in every variant. A new router is tested because it is a RouterConfig."""

from dataclasses import fields, replace
from typing import Literal, get_args, get_origin

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from moe.codec import hints_of
from moe.config import members
from moe.routers import (
    ExpertChoiceConfig,
    HashConfig,
    MixtureConfig,
    ReLUConfig,
    RouterConfig,
    SoftConfig,
    TokenChoiceConfig,
    TopKConfig,
)
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from moe.routers.balance import QuantileConfig, SignConfig
from moe.routers.choice import CapacityConfig
from moe.routing import Routing
from moe.rows import RowsRouting
from tests.moe import parts
from tests.moe.parts import build_layer, build_router, randn

G, S, D, E = 3, 16, 8, 4

# Enough iterations to converge: the gradient of a Sinkhorn plan is that of the converged plan.
SINKHORN, SPARSE = SinkhornConfig(iterations=300), SparseTransportConfig(iterations=60)

VARIANTS = (
    *(kind() for kind in members(RouterConfig)),
    TokenChoiceConfig(k=2, capacity_factor=0.6, priority="max"),
    TokenChoiceConfig(k=3, capacity_factor=0.5, priority="sum", capacity_rounding="ceil"),
    TokenChoiceConfig(k=2, capacity_multiple_of=4, gshard_balance_weight=0.01, z_weight=0.001, noise_std=0.0),
    TokenChoiceConfig(affinity=SINKHORN, importance_weight=0.0, load_weight=0.0),
    TokenChoiceConfig(k=2, affinity=SINKHORN, combine="affinity", priority="max", capacity_factor=0.7),
    ExpertChoiceConfig(capacity_factor=2.0, noise_std=1.0, capacity_rounding="ceil"),
    ExpertChoiceConfig(affinity=SINKHORN),
    ExpertChoiceConfig(affinity=SINKHORN, combine="affinity", capacity_factor=1.5, noise_std=1.0),
    ExpertChoiceConfig(affinity=SPARSE),
    ExpertChoiceConfig(affinity=SPARSE, capacity_factor=2.0),
    SoftConfig(slots_per_expert=3, normalize="paper", scale_init=4.0, noise_std=0.5),
    SoftConfig(slots_per_expert=2, normalize="none"),
    SoftConfig(total_slots=8, dispatch="soft", combine="uniform"),
    SoftConfig(dispatch="uniform", combine="soft", scale_init=4.0),
    SoftConfig(dispatch="uniform", combine="uniform"),
    SoftConfig(total_slots=S, dispatch="identity", combine="identity"),
    SoftConfig(total_slots=S, dispatch="identity", combine="soft"),
    MixtureConfig(level="image", temperature=0.5),
    MixtureConfig(level="hierarchical", clusters=2),
    MixtureConfig(gate="mlp", scale_inputs=True, learn_temperature=True, temperature=2.0),
    TokenChoiceConfig(k=2, topk="before"),
    TopKConfig(
        k=2, normalise=True, balance_weight=0.01, balance_level="group", z_weight=1e-3, priority="max"
    ),
    TopKConfig(score="sigmoid", balance=SignConfig(), capacity_factor=0.7),
    TopKConfig(k=2, score="sigmoid", normalise=True, balance=QuantileConfig(), priority="sum"),
    TopKConfig(k=3, score="sqrtsoftplus", normalise=True, balance_weight=0.1, balance_level="pass"),
    TopKConfig(k=2, balance_weight=0.1, balance_level="batch", balance=SignConfig(), priority="none"),
    TopKConfig(k=2, cosine=True, projection=5, temperature=0.5, normalise=True),
    TopKConfig(cosine=True, capacity_factor=0.7, capacity_rounding="ceil"),
    ReLUConfig(k=2, coefficient=0.1, capacity_rounding="ceil"),
    TopKConfig(k=2, score="sigmoid", normalise=True, balance=SignConfig(), capacity_factor="dropless"),
    TopKConfig(k=3, balance_weight=0.1, capacity_factor="dropless"),
    HashConfig(by="content", capacity_factor=1.0, capacity_rounding="ceil"),
)


def changed(config: RouterConfig) -> str:
    """Name of a case: the kind and the fields that differ from their defaults."""
    default = type(config)()
    different = [
        f"{f.name}={getattr(value, 'kind', value)}"
        for f in fields(config)
        if (value := getattr(config, f.name)) != getattr(default, f.name)
    ]
    return "-".join([config.kind, *different])


each_router = pytest.mark.parametrize("config", VARIANTS, ids=changed)
# Keys are left out too if the config has noise.
with_and_without_noise = pytest.mark.parametrize(
    ("config", "noise"),
    [(c, noise) for c in VARIANTS for noise in ([False, True] if getattr(c, "noise_std", 0) else [True])],
    ids=lambda value: ("noise" if value else "still") if isinstance(value, bool) else changed(value),
)


def build(config: RouterConfig, num_experts: int = E) -> nn.Module:
    return build_router(config, dim=D, num_experts=num_experts)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return 3 * randn(*shape, D, seed=seed)


def keys(G: int, S: int, noise: bool = True) -> Tensor | None:
    return parts.keys(G, S) if noise else None


def through(routing: Routing, x_GSD: Tensor) -> Tensor:
    """Dispatches and combines, with experts that multiply by different factors."""
    x_END = routing.dispatch(x_GSD)
    if isinstance(routing, RowsRouting):
        return routing.combine(x_END * (1 + routing.expert_GSK.flatten()[routing.order_M, None]))
    return routing.combine(x_END * torch.arange(1, len(x_END) + 1).to(x_END)[:, None, None])


def run(
    router: nn.Module, x_GSD: Tensor, valid_GS: Tensor | None = None, keys_GS: Tensor | None = None
) -> Tensor:
    valid_GS = torch.ones(x_GSD.shape[:2]) if valid_GS is None else valid_GS
    return through(router(x_GSD, valid_GS, keys_GS), x_GSD)


def dense(routing: Routing, G: int, S: int, E: int) -> tuple[Tensor, Tensor]:
    """The D_GSEC and C_GSEC of Routers in Vision MoE, eq. 2, read off identity matrices.

    Every token of the batch is its own unit vector, so a token seen by another group would show up. Rows of
    any number are put into C = S slots, each in that of its token.
    """
    D_ENT = routing.dispatch(torch.eye(G * S).view(G, S, G * S))
    rows = isinstance(routing, RowsRouting)
    if rows:
        assert D_ENT.shape == (routing.expert_GSK.numel(), G * S)
        assert routing.count_E is not None
        computed = int(routing.count_E.sum())
        assert D_ENT[computed:].eq(0).all(), "a row of no expert holds a token"
        expert_M = torch.arange(E).repeat_interleave(routing.count_E)
        slot_M = expert_M * G * S + D_ENT[:computed].argmax(1)
        assert len(slot_M.unique()) == computed, "one expert, one token, twice"
        D_ENT = torch.zeros(E * G * S, G * S).index_copy(0, slot_M, D_ENT[:computed]).view(E, G * S, G * S)
    C = D_ENT.shape[1] // G
    D_GECGS = D_ENT.view(E, G, C, G, S).transpose(0, 1)
    slots = torch.eye(G * E * C).view(G, E, C, G * E * C).transpose(0, 1).flatten(1, 2)
    if rows:
        others = torch.full((len(routing.order_M) - computed, G * E * C), 7.0)  # weighed by 0
        slots = torch.cat([slots.flatten(0, 1)[slot_M], others])
    C_GSGEC = routing.combine(slots).view(G, S, G, E, C)
    same = torch.eye(G, dtype=torch.bool)
    assert D_GECGS.permute(0, 3, 1, 2, 4)[~same].eq(0).all(), "a slot holds a token of another group"
    assert C_GSGEC.transpose(1, 2)[~same].eq(0).all(), "a token got the output of another group's slot"
    each = torch.arange(G)
    return D_GECGS[each, :, :, each].permute(0, 3, 1, 2), C_GSGEC[each, :, each]


def test_every_router_and_every_literal_is_among_the_variants():
    for kind in members(RouterConfig):
        mine = [config for config in VARIANTS if type(config) is kind]
        for name, hint in hints_of(kind).items():
            wanted = set(get_args(hint)) if get_origin(hint) is Literal else set()
            assert wanted <= {getattr(config, name) for config in mine}, f"{kind.__name__}.{name}"


@st.composite
def groups(draw: st.DrawFn, config: RouterConfig) -> tuple[RouterConfig, Tensor, Tensor, Tensor | None]:
    """A config that fits, tokens with many ties or few, a mask, keys or none; for 4 or 6 experts."""
    num_experts = draw(st.sampled_from([4, 6]))
    num_groups, per_expert = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    total_slots = getattr(config, "total_slots", None)
    extra = 0 if total_slots else draw(st.integers(0, num_experts - 1))
    num_tokens = num_experts * per_expert + extra
    if total_slots:
        config = replace(config, total_slots=num_tokens)
    levels = draw(st.sampled_from([1, 2, 100]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randint(-levels, levels + 1, (num_groups, num_tokens, D), generator=g).float()
    valid = torch.randint(0, 4, (num_groups, num_tokens), generator=g).clamp(max=1).float()
    return config, x, valid, keys(num_groups, num_tokens, draw(st.booleans())), num_experts


@each_router
@settings(max_examples=15)
@given(data=st.data())
def test_slots_hold_at_most_one_token(config, data):
    """Each of C slots has at most one token's weight, no expert gets a token twice, padding has no slot.

    Shapes depend neither on tokens nor on padding, so the host need not look.
    """
    config, x, valid, some_keys, num_experts = data.draw(groups(config))
    num_groups, num_tokens, _ = x.shape
    C = config.slots(num_tokens=num_tokens, num_experts=num_experts)
    routing = build(config, num_experts)(x, valid, some_keys)
    D_GSEC, C_GSEC = dense(routing, num_groups, num_tokens, num_experts)
    if isinstance(routing, RowsRouting):  # C is a mean, reached where no token is padding
        expected = C * num_experts * valid.sum() / num_tokens
        assert routing.count_E.sum().item() == pytest.approx(expected.item())
        C = num_tokens
    assert D_GSEC.shape[3] == C
    assert routing.aux_G.shape == (num_groups,)
    assert routing.gates_GSE.shape == (num_groups, num_tokens, num_experts)
    assert routing.load_GE.shape == (num_groups, num_experts)
    assert not routing.load_GE.requires_grad
    assert D_GSEC.min() >= 0
    assert C_GSEC.min() >= 0
    assert D_GSEC.sum(1).max() <= 1 + 1e-5
    assert D_GSEC.sum(3).max() <= (C if isinstance(config, SoftConfig) else 1) + 1e-5, (
        "one expert, one token, twice"
    )
    if not isinstance(config, ReLUConfig):
        assert C_GSEC.sum((2, 3)).max() <= 1 + 1e-5
    if not isinstance(config, MixtureConfig):  # where all have a place of their own, padding has, too
        some_valid = valid.any(1)  # a group of padding alone may mix anything, as long as it is finite
        assert D_GSEC[some_valid][valid[some_valid] == 0].eq(0).all(), "padding sits in a slot"
    if isinstance(config, CapacityConfig):
        assert D_GSEC.unique().tolist() in ([0.0], [0.0, 1.0], [1.0]), "whole tokens"
        assert C_GSEC[D_GSEC == 0].eq(0).all(), "a token gets the output of a slot it does not sit in"


@with_and_without_noise
def test_einsum_form_equals_layer(config, noise):
    """y_t = sum_ec C_tec f_e(sum_s D_sec x_s): Routers in Vision MoE, eq. 2; the group has two images."""
    images_per_group = 2
    layer = build_layer(config, images_per_group=images_per_group)
    x_BSD = tokens(4, S // images_per_group)
    got, routing = layer(x_BSD, torch.ones(4), torch.arange(4) if noise else None)
    x = x_BSD.reshape(4 // images_per_group, S, D)
    D_GSEC, C_GSEC = dense(routing, len(x), S, E)
    slots = torch.einsum("gsec,gsd->egcd", D_GSEC, x)
    outputs = layer.experts(slots.flatten(1, 2)).view_as(slots)
    expected = torch.einsum("gsec,egcd->gsd", C_GSEC, outputs)
    torch.testing.assert_close(got, expected.view_as(got))
    assert expected.abs().mean() > 0.1


@with_and_without_noise
def test_gradient_reaches_every_parameter(config, noise):
    x, router = tokens(G, S).requires_grad_(), build(config)
    routing = router(x, torch.ones(G, S), keys(G, S, noise))
    (through(routing, x).square().sum() + routing.aux_G.mean()).backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0
    for name, p in router.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().sum() > 1e-6, name


@with_and_without_noise
def test_groups_are_independent(config, noise):
    router, x = build(config), tokens(G, S)
    some_keys = keys(G, S, noise)
    together = router(x, torch.ones(G, S), some_keys)
    for g in range(G):
        alone = x[g : g + 1]
        routing = router(alone, torch.ones(1, S), None if some_keys is None else some_keys[g : g + 1])
        torch.testing.assert_close(through(together, x)[g : g + 1], through(routing, alone))
        if getattr(config, "balance_level", "") != "pass":
            torch.testing.assert_close(together.aux_G[g : g + 1], routing.aux_G)
        torch.testing.assert_close(together.load_GE[g : g + 1], routing.load_GE)


@with_and_without_noise
def test_float64_stays_float64_and_its_gradient_is_right(config, noise):
    """Gradients of output and auxiliary loss for tokens and parameters, checked by differences."""
    router = build(config).double()
    x = (0.5 * tokens(2, S).double()).requires_grad_()
    names, values = list(dict(router.named_parameters())), list(router.parameters())

    def forward(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, parameters, strict=True))
        routing = torch.func.functional_call(router, given, (x, torch.ones(2, S).double(), keys(2, S, noise)))
        return through(routing, x), routing.aux_G

    y, aux_G = forward(x, *values)
    assert y.dtype == aux_G.dtype == torch.float64
    assert torch.autograd.gradcheck(forward, (x, *values), fast_mode=True)


@with_and_without_noise
def test_bfloat16_stays_bfloat16_and_is_routed_in_float32(config, noise):
    """Tokens may be huge or tiny."""
    router, x = build(config).to(torch.bfloat16), tokens(G, S).to(torch.bfloat16)
    ones, some_keys = torch.ones(G, S, dtype=torch.bfloat16), keys(G, S, noise)
    out = run(router, x, ones, some_keys)
    assert out.dtype == torch.bfloat16
    for scale in (1e-20, 1e4):
        scaled = (scale * x).requires_grad_()
        routing = router(scaled, ones, some_keys)
        y = through(routing, scaled)
        assert y.isfinite().all()
        assert routing.aux_G.isfinite().all()
        (y.sum() + routing.aux_G.sum()).backward()
        assert all(t.grad is None or t.grad.isfinite().all() for t in (scaled, *router.parameters()))
    exact = run(router.float(), x.float(), None, some_keys)
    assert (out.float() - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize(
    "config",
    [
        TokenChoiceConfig(k=3, capacity_factor=E),
        TokenChoiceConfig(k=1, capacity_factor=0.5, priority="max"),  # the best tokens are seated
        TokenChoiceConfig(k=2, capacity_factor=0.5, priority="sum"),
        TokenChoiceConfig(k=2, capacity_factor=E, affinity=SINKHORN),
        HashConfig(by="content", capacity_factor=E),
        *(
            c
            for c in VARIANTS
            if not isinstance(c, TokenChoiceConfig | HashConfig) and getattr(c, "dispatch", "") != "identity"
            if getattr(c, "priority", "") != "none"
            if c != ExpertChoiceConfig(affinity=SPARSE, capacity_factor=2.0)  # not converged: sums decide
        ),
    ],
    ids=changed,
)
@pytest.mark.parametrize("noise", [False, True])
def test_token_order_does_not_matter(config, noise):
    """Noise belongs to its token. Token choice and hashes without enough room or priority drop the last
    tokens, and ``identity`` and ``place`` depend on positions, so they are left out."""
    router, x = build(config), tokens(G, S)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(1))
    some_keys = keys(G, S, noise)
    other_keys = None if some_keys is None else some_keys[:, order]
    torch.testing.assert_close(
        run(router, x, None, some_keys)[:, order], run(router, x[:, order], None, other_keys)
    )


@each_router
@pytest.mark.parametrize("images_per_group", [1, 2])
def test_padding_does_not_reach_valid_images(config, images_per_group):
    """Whatever the padding images hold, the others compute the same; alone in their groups, as without it."""
    if images_per_group == 2 and getattr(config, "total_slots", None) == S:
        config = replace(config, total_slots=2 * S)
    layer = build_layer(config, images_per_group=images_per_group)
    valid = torch.tensor([0.0, 1, 1, 0, 1, 1])
    x = tokens(6, S)
    other = torch.where(valid.bool()[:, None, None], x, 100 * tokens(6, S, seed=1))
    got, routing = layer(x, valid)
    got_other, routing_other = layer(other, valid)
    torch.testing.assert_close(got[valid == 1], got_other[valid == 1])
    torch.testing.assert_close(routing.aux_G, routing_other.aux_G)
    torch.testing.assert_close(routing.stats, routing_other.stats)
    if images_per_group == 1:
        real = x[valid == 1]
        torch.testing.assert_close(got[valid == 1], layer(real, torch.ones(4))[0])
    elif mixes_images(config):
        with_mask, without = got, layer(x, torch.ones(6))[0]
        assert not torch.allclose(with_mask[1], without[1]), "the mask is ignored"


def mixes_images(config: RouterConfig) -> bool:
    """Whether a token's output depends on the other tokens of its group."""
    if isinstance(config, SoftConfig):
        return config.dispatch != "identity"
    if getattr(config, "capacity_factor", 1.0) == "dropless":
        return False
    if isinstance(config, HashConfig):
        return config.by == "content"  # where the room is short; by place there is enough
    return not isinstance(config, MixtureConfig) or config.level == "image"


@with_and_without_noise
def test_group_of_padding_alone_is_finite(config, noise):
    router, x = build(config), torch.zeros(2, S, D).requires_grad_()
    routing = router(x, torch.zeros(2, S), keys(2, S, noise))
    y = through(routing, x)
    assert y.isfinite().all()
    assert routing.aux_G.eq(0).all()
    assert all(value.isfinite() for value in routing.stats.values())
    (y.square().sum() + y.sum() + routing.aux_G.sum()).backward()
    for tensor in (x, *router.parameters()):
        assert tensor.grad is None or tensor.grad.isfinite().all()


@with_and_without_noise
def test_stats_are_those_described_and_count_what_is_there(config, noise):
    """Detached float32; dropped tokens and seats as counted in the dense form, padding left out."""
    x, valid = tokens(G, S), torch.ones(G, S)
    valid[0, 11:] = 0
    routing = build(config)(x.requires_grad_(), valid, keys(G, S, noise))
    assert {*routing.stats} == {*config.described}
    for name, value in routing.stats.items():
        assert value.shape == ((E,) if config.described[name].per == "expert" else ()), name
        assert not value.requires_grad, name
        assert value.dtype == torch.float32, name
    D_GSEC, _ = dense(routing, G, S, E)
    seats_GS = (D_GSEC > 0).sum((2, 3))[valid.bool()].float()
    assert routing.stats["dropped_frac"].item() == pytest.approx(seats_GS.eq(0).float().mean().item())
    assert routing.stats["seats_mean"].item() == pytest.approx(seats_GS.mean().item())
    most_G = ((D_GSEC > 0).sum((2, 3)) * valid).amax(1).float()
    assert routing.stats["seats_max"].item() == pytest.approx(most_G.mean().item())
    assert routing.stats["load_max"].item() == pytest.approx(routing.load_GE.float().amax(1).mean().item())
    if isinstance(config, CapacityConfig):
        chosen = routing.load_GE.sum() / valid.sum() / E
        assert routing.stats["open_frac"].item() == pytest.approx(chosen.item())
    entropy = -(routing.gates_GSE * routing.gates_GSE.log()).nan_to_num().sum(-1)[valid.bool()].mean()
    assert routing.stats["gate_entropy_nats"].item() == pytest.approx(entropy.item(), rel=1e-5, abs=1e-6)
    flips = noise and getattr(config, "noise_std", 0) > 0 and not isinstance(config, SoftConfig)
    assert (routing.stats["flip_frac"] > 0) == flips


@each_router
def test_noise_comes_with_keys_alone(config):
    """Without keys twice the same; with them the config's noise, the same for the same keys."""
    router, x = build(config), tokens(G, S)
    still, again = run(router, x), run(router, x)
    assert torch.equal(still, again)
    noisy = run(router, x, None, keys(G, S))
    assert torch.equal(noisy, run(router, x, None, keys(G, S)))
    has_noise = getattr(config, "noise_std", 0) > 0
    assert torch.equal(still, noisy) == (not has_noise)
    if has_noise:
        assert not torch.equal(noisy, run(router, x, None, keys(G, S) + 1))


@pytest.mark.parametrize(
    "config",
    [
        TokenChoiceConfig(k=2, capacity_factor=E),
        TokenChoiceConfig(capacity_factor=E, affinity=SinkhornConfig()),
        ExpertChoiceConfig(),
        ExpertChoiceConfig(affinity=SparseTransportConfig()),
    ],
    ids=changed,
)
def test_flip_frac_is_the_share_of_choices_that_noise_changes_and_grows_with_it(config):
    """The mean over groups; there is a slot for every choice, and padding has no choices."""
    x, valid, seen = randn(G, 64, D), torch.ones(G, 64), []
    valid[0, 40:] = 0
    for std in (0.0, 0.1, 2.0, 1e4):
        router = build(replace(config, noise_std=std))
        routings = router(x, valid, keys(G, 64)), router(x, valid)
        shares = []
        for g in range(G):
            noisy, clean = (
                {(e, s) for e, row in enumerate(r.token_GEC[g].tolist()) for s in row if s < 64}
                for r in routings
            )
            shares.append(1 - len(noisy & clean) / len(clean))
        seen.append(routings[0].stats["flip_frac"].item())
        assert seen[-1] == pytest.approx(sum(shares) / G, abs=1e-6)
        assert routings[1].stats["flip_frac"] == 0
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] > 0.4
